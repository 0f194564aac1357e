"""What all tests share: a busy machine fails none of them."""

from hypothesis import HealthCheck, settings

settings.register_profile("prfaas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prfaas")
