"""Which calls the kernel's outages take, in which order; with a kernel that only remembers. Real ones: tests/wire."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from netem import outage
from netem.link import LinkError
from netem.outage import Outages

INTERFACES = {"to_pd": "w-pd", "to_prfaas": "w-prfaas"}
WHOLE = dict.fromkeys(INTERFACES)


class Kernel:
    """What two interfaces are; `calls` is what was asked of them, `refuses` makes it refuse to drop."""

    def __init__(self) -> None:
        self.dropped: set[str] = set()
        self.down: set[str] = set()
        self.calls: list[str] = []
        self.refuses = False

    def drop(self, interfaces: Iterable[str]) -> None:
        wanted = set(interfaces)
        if wanted != self.dropped:
            if self.refuses:
                raise LinkError("table prfaas_forward: the kernel does not drop packets")
            self.calls.append(f"drop {' '.join(sorted(wanted)) or 'nothing'}")
        self.dropped = wanted

    def set_wan_interface(self, interface: str, up: bool) -> None:
        self.calls.append(f"{interface} {'up' if up else 'down'}")
        (self.down.discard if up else self.down.add)(interface)

    def is_up(self, interface: str) -> bool:
        return interface not in self.down


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(outage, "drop", made.drop)
    monkeypatch.setattr(outage, "dropping", lambda: set(made.dropped))
    monkeypatch.setattr(outage, "set_wan_interface", made.set_wan_interface)
    monkeypatch.setattr(outage, "is_up", made.is_up)
    return made


async def test_a_whole_link_is_left_alone(kernel: Kernel) -> None:
    outages = Outages(INTERFACES)
    assert await outages.apply(WHOLE) == set()
    assert await outages.apply(WHOLE) == set()
    assert kernel.calls == []


async def test_a_stall_is_not_the_kernels(kernel: Kernel) -> None:
    assert await Outages(INTERFACES).apply({"to_pd": "stall", "to_prfaas": None}) == set()
    assert kernel.calls == []


async def test_each_outage_is_made_and_healed_by_direction(kernel: Kernel) -> None:
    outages = Outages(INTERFACES)
    assert await outages.apply({"to_pd": "blackhole", "to_prfaas": "down"}) == {"to_pd", "to_prfaas"}
    assert await outages.read_back() == {"to_pd": "blackhole", "to_prfaas": "down"}
    assert await outages.apply({"to_pd": "blackhole", "to_prfaas": None}) == {"to_prfaas"}
    assert await outages.apply(WHOLE) == {"to_pd"}
    assert kernel.calls == ["w-prfaas down", "drop w-pd", "w-prfaas up", "drop nothing"]


async def test_no_packet_slips_through_from_one_outage_to_the_next(kernel: Kernel) -> None:
    outages = Outages(INTERFACES)
    await outages.apply({"to_pd": "blackhole", "to_prfaas": None})
    await outages.apply({"to_pd": "down", "to_prfaas": None})
    await outages.apply({"to_pd": "blackhole", "to_prfaas": None})
    assert kernel.calls == ["drop w-pd", "w-pd down", "drop nothing", "drop w-pd", "w-pd up"]


async def test_what_an_agent_before_this_one_left_is_set_right(kernel: Kernel) -> None:
    kernel.dropped, kernel.down = {"w-pd"}, {"w-prfaas"}
    assert await Outages(INTERFACES).apply(WHOLE) == {"to_pd", "to_prfaas"}
    assert (kernel.dropped, kernel.down) == (set(), set())


async def test_after_a_refusal_the_kernel_is_looked_at_anew(kernel: Kernel) -> None:
    outages = Outages(INTERFACES)
    kernel.refuses = True
    with pytest.raises(LinkError, match="does not drop packets"):
        await outages.apply({"to_pd": "blackhole", "to_prfaas": "down"})
    kernel.refuses = False
    assert await outages.apply(WHOLE) == {"to_prfaas"}
    assert kernel.down == set()
