"""Model time on the wall: a machine is woken by its own schedule, never early, and before what comes later.

No test here judges how fast anything is: the clock is turned by hand, or what is asserted holds on any slow machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from emulator import clock as clock_module
from emulator.clock import Clock, Driver, Lateness
from emulator.messages import CONTROL, WAKE, AnyMessage, Landed, Out, Wake

PATIENCE_S = 30.0  # bounds a hang


class Scripted:
    """A machine that wants to be woken at given times, and records when it was called with what."""

    def __init__(self, *due_s: float) -> None:
        self.due_s = sorted(due_s)
        self.calls: list[tuple[float, AnyMessage]] = []
        self.on_message: Callable[[], None] = lambda: None

    def next_s(self) -> float | None:
        return self.due_s[0] if self.due_s else None

    def handle(self, now_s: float, message: AnyMessage) -> list[Out]:
        self.calls.append((now_s, message))
        if type(message) is Wake:
            self.due_s.pop(0)
        else:
            self.on_message()
        return [(CONTROL, message)]


class HandClock(Clock):
    """Time that the test turns."""

    __slots__ = ("t_s",)

    def __init__(self, t_s: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(0, scale)
        self.t_s = t_s

    def now_s(self) -> float:
        return self.t_s


class Rig:
    """A driver, its machine, and what it delivered."""

    def __init__(self, clock: Clock, *due_s: float) -> None:
        self.machine = Scripted(*due_s)
        self.clock = clock
        self.lateness = Lateness()
        self.delivered: list[AnyMessage] = []
        self.driver = Driver(self.machine, clock, self._deliver, self.lateness)

    def _deliver(self, out: list[Out]) -> None:
        self.delivered += [message for _, message in out]

    async def until_calls(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.machine.calls) < count:
                await asyncio.sleep(0.001)


def now_at(clock: Clock, ns: int) -> float:
    """What the clock says when CLOCK_MONOTONIC reads `ns`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock_module.time, "monotonic_ns", lambda: ns)
        return clock.now_s()


class TestClock:
    """now = (ns - t0) x scale."""

    @given(
        t0_ns=st.integers(0, 10**16),
        scale=st.floats(0.01, 1000),
        model_s=st.floats(-1000, 100_000),
    )
    def test_the_two_directions_agree(self, t0_ns: int, scale: float, model_s: float) -> None:
        clock = Clock(t0_ns, scale)
        ns = round(clock.monotonic_s(model_s) * 1e9)
        assert now_at(clock, ns) == pytest.approx(model_s, abs=1e-5 * scale)

    def test_a_second_of_wall_is_scale_seconds_of_the_model(self) -> None:
        assert now_at(Clock(5_000_000_000, 20.0), 6_000_000_000) == pytest.approx(20.0)

    def test_before_t0_time_is_negative(self) -> None:
        assert now_at(Clock(5_000_000_000, 2.0), 4_000_000_000) == pytest.approx(-2.0)

    async def test_the_event_loops_time_is_the_clocks(self) -> None:
        """monotonic_s is given to call_at, so the loop's time must be CLOCK_MONOTONIC."""
        clock = Clock(0, 1.0)
        before_s, loop_s, after_s = clock.now_s(), asyncio.get_running_loop().time(), clock.now_s()
        assert before_s - 0.002 <= loop_s <= after_s + 0.002


class TestLateness:
    """How late timers fired."""

    def test_none_is_zero(self) -> None:
        lateness = Lateness()
        assert (lateness.p99_s(), lateness.max_s) == (0.0, 0.0)

    def test_the_99th_percentile_and_the_maximum(self) -> None:
        lateness = Lateness()
        for i in range(101):
            lateness.add(i / 1000)
        assert (lateness.p99_s(), lateness.max_s) == (pytest.approx(0.099), 0.1)

    def test_it_forgets_old_samples_but_not_the_maximum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clock_module, "_KEEP", 10)
        lateness = Lateness()
        lateness.add(1.0)
        for _ in range(30):
            lateness.add(0.001)
        assert (lateness.p99_s(), lateness.max_s) == (pytest.approx(0.001), 1.0)


class TestDriverByHand:
    """What a message finds when it arrives."""

    async def test_a_message_is_handled_at_the_present(self) -> None:
        rig = Rig(HandClock(3.0))
        rig.driver.handle(Landed(1))
        assert rig.machine.calls == [(3.0, Landed(1))]
        assert rig.delivered == [Landed(1)]

    async def test_what_is_due_is_handled_first_at_its_scheduled_time(self) -> None:
        rig = Rig(HandClock(3.0), 1.0, 2.5, 3.0, 3.5)
        rig.driver.handle(Landed(1))
        rig.driver.close()
        assert rig.machine.calls == [(1.0, WAKE), (2.5, WAKE), (3.0, WAKE), (3.0, Landed(1))]

    async def test_everything_emitted_is_delivered_in_order(self) -> None:
        rig = Rig(HandClock(3.0), 1.0, 2.0)
        rig.driver.handle(Landed(1))
        rig.driver.handle(Landed(2))
        assert rig.delivered == [WAKE, WAKE, Landed(1), Landed(2)]

    async def test_lateness_is_in_wall_seconds(self) -> None:
        rig = Rig(HandClock(30.0, scale=10.0), 10.0)
        rig.driver.handle(Landed(1))
        assert rig.lateness.max_s == pytest.approx(2.0)

    async def test_a_message_that_is_not_late_leaves_no_lateness(self) -> None:
        rig = Rig(HandClock(3.0))
        rig.driver.handle(Landed(1))
        assert rig.lateness.max_s == 0.0

    async def test_a_timer_that_fires_early_wakes_nobody_and_is_set_again(self) -> None:
        clock = HandClock(0.0)
        rig = Rig(clock, 1e-4)
        rig.driver.handle(Landed(1))
        await asyncio.sleep(0.02)  # the wall is long past; the model's clock stands still
        assert rig.machine.calls == [(0.0, Landed(1))]
        clock.t_s = 5e-4
        await rig.until_calls(2)
        assert rig.machine.calls[1] == (1e-4, WAKE)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoop:
    """The workers use uvloop, whose timers have whole milliseconds; people debug with asyncio."""
    made: asyncio.AbstractEventLoop = request.param()
    yield made
    made.close()


class TestDriverOnTheWall:
    """One timer, by CLOCK_MONOTONIC."""

    def begin(self, *due_s: float, scale: float = 1.0) -> tuple[Rig, list[float]]:
        """A rig whose t = 0 is now; and the model times at which the machine was really called."""
        rig = Rig(Clock(clock_module.time.monotonic_ns(), scale), *due_s)
        called_s: list[float] = []
        handle = rig.machine.handle

        def timed(now_s: float, message: AnyMessage) -> list[Out]:
            called_s.append(rig.clock.now_s())
            return handle(now_s, message)

        rig.machine.handle = timed  # type: ignore[method-assign]
        return rig, called_s

    @pytest.mark.parametrize("scale", [0.5, 1.0, 50.0])
    def test_wakes_come_by_themselves_with_their_scheduled_times_and_never_early(
        self, loop: asyncio.AbstractEventLoop, scale: float
    ) -> None:
        due_s = [0.0003 * scale, 0.0012 * scale, 0.0012 * scale, 0.0305 * scale]

        async def body() -> None:
            rig, called_s = self.begin(*due_s, scale=scale)
            rig.driver.handle(Landed(0))
            await rig.until_calls(5)
            wakes = [(due, called) for (due, m), called in zip(rig.machine.calls, called_s, strict=True) if m is WAKE]
            assert [due for due, _ in wakes] == due_s
            assert all(called >= due for due, called in wakes)

        loop.run_until_complete(body())

    def test_a_late_loop_is_recorded_and_keeps_scheduled_times(self, loop: asyncio.AbstractEventLoop) -> None:
        async def body() -> None:
            rig, _ = self.begin(0.01, 0.02)
            rig.driver.handle(Landed(0))
            clock_module.time.sleep(0.05)  # the loop is held up
            await rig.until_calls(3)
            assert [due for due, message in rig.machine.calls if message is WAKE] == [0.01, 0.02]
            assert rig.lateness.max_s >= 0.03

        loop.run_until_complete(body())

    def test_a_wish_for_an_earlier_time_moves_the_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        async def body() -> None:
            rig, _ = self.begin(1000.0)
            rig.driver.handle(Landed(0))
            rig.machine.on_message = lambda: rig.machine.due_s.insert(0, 0.005)
            rig.driver.handle(Landed(1))
            await rig.until_calls(3)
            assert rig.machine.calls[2] == (0.005, WAKE)
            rig.driver.close()

        loop.run_until_complete(body())

    def test_a_withdrawn_wish_wakes_nobody(self, loop: asyncio.AbstractEventLoop) -> None:
        async def body() -> None:
            rig, _ = self.begin(0.02)
            rig.driver.handle(Landed(0))
            rig.machine.on_message = rig.machine.due_s.clear
            rig.driver.handle(Landed(1))
            seen = list(rig.machine.calls)
            await asyncio.sleep(0.04)
            assert rig.machine.calls == seen

        loop.run_until_complete(body())

    def test_closed_the_machine_is_not_called_again(self, loop: asyncio.AbstractEventLoop) -> None:
        async def body() -> None:
            rig, _ = self.begin(1.0)
            rig.driver.handle(Landed(0))
            rig.clock.t0_ns -= 990_000_000  # 1.0 is 10 ms away
            rig.driver.close()
            seen = list(rig.machine.calls)
            await asyncio.sleep(0.03)
            assert rig.machine.calls == seen

        loop.run_until_complete(body())
