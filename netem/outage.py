"""The outages that the kernel makes, carried to it and read back: blackhole (`blackhole.py`) and down.

A stall is the delay line's (`keeper.py`). What an agent before this one left is found and set right by the first
`apply`: an outage outlives its agent, as a link without one must not become a better link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from netem.blackhole import drop, dropping
from netem.link import OutageKind
from netem.topology import is_up, set_wan_interface


class Outages:
    """Of one WAN. `interfaces`: direction -> the interface of `netem.topology` that it leaves by.

    Entered and used in the WAN's network namespace. Restoring what is whole is a no-op.
    """

    def __init__(self, interfaces: Mapping[str, str]) -> None:
        self._interfaces = interfaces
        self._applied: dict[str, OutageKind | None] | None = None  # None: unknown

    async def apply(self, wanted: Mapping[str, OutageKind | None]) -> set[str]:
        """Have every direction as wanted; the directions that changed. Raises LinkError when that cannot be had."""
        wanted = {way: None if kind == "stall" else kind for way, kind in wanted.items()}
        if self._applied == wanted:
            return set()
        before = self._applied if self._applied is not None else await asyncio.to_thread(self._found)
        changed = {way for way, kind in wanted.items() if before[way] != kind}
        self._applied = None
        if changed:
            await asyncio.to_thread(self._carry, wanted)
        self._applied = dict(wanted)
        return changed

    async def read_back(self) -> dict[str, OutageKind | None]:
        """What the kernel has, by direction."""
        return await asyncio.to_thread(self._found)

    def _found(self) -> dict[str, OutageKind | None]:
        dropped = dropping()
        return {
            way: "down" if not is_up(interface) else "blackhole" if interface in dropped else None
            for way, interface in self._interfaces.items()
        }

    def _carry(self, wanted: Mapping[str, OutageKind | None]) -> None:
        """In an order in which no packet slips through from one outage to the next."""
        down = {way for way, kind in wanted.items() if kind == "down"}
        for way in down:
            set_wan_interface(self._interfaces[way], up=False)
        drop(self._interfaces[way] for way, kind in wanted.items() if kind == "blackhole")
        for way in wanted.keys() - down:
            if not is_up(self._interfaces[way]):
                set_wan_interface(self._interfaces[way], up=True)
