"""What all tests share: a busy machine fails none of them, and what is tested is the source, not a build of it."""

import os

from hypothesis import HealthCheck, settings

os.environ["PRFAAS_PURE"] = "1"
settings.register_profile("prfaas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prfaas")
