"""What all tests share: a busy machine fails none of them, and what is tested is the source, not a build of it."""

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

os.environ["PRFAAS_PURE"] = "1"
settings.register_profile("prfaas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prfaas")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was captured may hold half a surrogate pair, which one process cannot send to another."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
