"""A load that cannot be leaves no half-begun one behind at the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.launch.state import TestbedError
from testbed.load import _given_up


class Gateway:
    """Notes what it is asked, and may be gone."""

    def __init__(self, *, gone: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self._gone = gone

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> dict[str, Any]:
        self.asked.append((method, path))
        if self._gone:
            raise TestbedError("the gateway is gone")
        return {}


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("error", [TestbedError("the link refuses"), KeyboardInterrupt()])
def test_a_load_that_fails_on_its_way_is_ended(error: BaseException, gone: bool) -> None:
    gateway = Gateway(gone=gone)
    with pytest.raises(type(error)), _given_up(gateway, {"id": "one"}):  # type: ignore[arg-type]
        raise error
    assert gateway.asked == [("POST", "/prfaas/loads/one/end")]


def test_one_that_went_its_way_is_not_ended_twice() -> None:
    gateway = Gateway()
    with _given_up(gateway, {"id": "one"}):  # type: ignore[arg-type]
        pass
    assert gateway.asked == []
