"""Continuous batching against a simulation that counts every token, and its step's closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.batching import BatchedDecodeInstance, decode_instance
from emulator.decode_instance import DecodeInstance
from emulator.decode_step import AffineStep
from emulator.messages import WAKE, Admitted, Announce, Cancel, Finished, Hinder, Landed, Out, Tokens
from emulator.profile import ProfileError, load_profile

# Times and coefficients are multiples of 1/1024 s, so that every sum is exact and equal times are equal.
TICK = 1 / 1024
coefficients = st.builds(
    lambda a, b, c: AffineStep(a * TICK, b * TICK, c * TICK),
    st.integers(1, 40), st.integers(0, 8), st.integers(0, 3),
)  # fmt: skip


@dataclass
class Job:
    """A request that lands at `at` ticks; cancelled at `cancel` ticks, if at all."""

    at: int
    input_tokens: int
    output_tokens: int
    cancel: int | None = None
    admitted_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)
    freed_s: float | None = None
    steps: int = 0
    gone: bool = False


jobs = st.lists(
    st.builds(Job, st.integers(0, 400), st.integers(1, 30), st.integers(1, 12), st.none() | st.integers(0, 600)),
    min_size=1, max_size=9,
)  # fmt: skip


def every_token(timing: AffineStep, slots: int, given_jobs: list[Job]) -> None:
    """Brute force: one step after the other, and whatever happens meanwhile."""
    order = sorted(given_jobs, key=lambda job: job.at)
    happens = sorted({job.at * TICK for job in order} | {j.cancel * TICK for j in order if j.cancel is not None})
    waiting: list[Job] = []
    slot: list[Job] = []
    batch: list[Job] = []  # in the step under way

    def admit(now_s: float) -> None:
        while waiting and len(slot) < slots:
            job = waiting.pop(0)
            job.admitted_s = now_s
            job.tokens_s.append(now_s)
            slot.append(job)

    def outside(now_s: float) -> None:
        for job in order:
            if job.at * TICK == now_s:
                waiting.append(job)
                admit(now_s)
        for job in order:
            if job.cancel is not None and job.cancel * TICK == now_s and job.at <= job.cancel and not job.freed_s:
                job.gone = True
                for where in (waiting, slot):
                    if job in where:
                        where.remove(job)
                admit(now_s)

    now_s = 0.0
    while True:
        while happens and happens[0] <= now_s:
            outside(happens.pop(0))
        batch = list(slot)
        if not batch:
            if not happens:
                return
            now_s = happens[0]
            continue
        end_s = now_s + timing.step_s(len(batch), sum(job.input_tokens + 1 + job.steps for job in batch))
        # What is outside at the very end of the step is told before the step ends.
        while happens and happens[0] <= end_s:
            outside(happens.pop(0))
        now_s = end_s
        for job in batch:
            if job.gone:
                continue
            job.steps += 1
            if job.steps < job.output_tokens:
                job.tokens_s.append(now_s)
            else:
                job.freed_s = now_s
                slot.remove(job)
        admit(now_s)


def by_machine(machine: BatchedDecodeInstance, given_jobs: list[Job]) -> tuple[list[tuple[float, Out]], int]:
    """The machine's own account, and how often it was called."""
    order = sorted(range(len(given_jobs)), key=lambda i: given_jobs[i].at)
    tokens = {i: n for n, i in enumerate(order)}
    things = [(given_jobs[i].at * TICK, 0, tokens[i], i) for i in order]
    things += [(j.cancel * TICK, 1, tokens[i], i) for i, j in enumerate(given_jobs)
               if j.cancel is not None and j.at <= j.cancel]  # fmt: skip
    out: list[tuple[float, Out]] = []
    calls = 0

    def tell(now_s: float, message: object) -> None:
        nonlocal calls
        calls += 1
        out.extend((now_s, one) for one in machine.handle(now_s, message))  # type: ignore[arg-type]

    for i in order:
        job = given_jobs[i]
        machine.handle(0.0, Announce(str(i), 1, "p", 1, job.input_tokens, job.output_tokens))
    for at_s, cancels, token, i in sorted(things):
        while (due_s := machine.next_s()) is not None and due_s < at_s:
            tell(due_s, WAKE)
        tell(at_s, Cancel(str(i), 1) if cancels else Landed(token))
    while (due_s := machine.next_s()) is not None:
        tell(due_s, WAKE)
    return out, calls


@settings(max_examples=250, deadline=None)
@given(timing=coefficients, slots=st.integers(1, 4), given_jobs=jobs, interval=st.sampled_from([None, 1, 3]))
def test_it_does_what_a_simulation_of_every_token_does(
    timing: AffineStep, slots: int, given_jobs: list[Job], interval: int | None
) -> None:
    machine = BatchedDecodeInstance("d", slots=slots, timing=timing, landing_bytes=10**6, stream_interval=interval)
    out, _ = by_machine(machine, given_jobs)
    every_token(timing, slots, given_jobs)
    told = [(at_s, message) for at_s, (_, message) in out]
    for i, job in enumerate(given_jobs):
        mine = [(at_s, m) for at_s, m in told if getattr(m, "request_id", None) == str(i)]
        admitted = [m.admitted_s for _, m in mine if type(m) is Admitted]
        finished = [m for _, m in mine if type(m) is Finished]
        assert admitted == ([] if job.admitted_s is None else [job.admitted_s])
        if len(job.tokens_s) == job.output_tokens:
            assert [m.finished_s for m in finished] == [job.tokens_s[-1]]
            if job.freed_s is not None and job.output_tokens > 1:
                assert finished[0].freed_s == job.freed_s
        else:
            assert not finished
        for at_s, message in mine:
            if type(message) is Tokens:
                assert at_s == job.tokens_s[message.first + message.count - 1]
    assert machine.running_requests(math.inf) == 0
    assert machine.landing_used == 0
    assert machine._batch == machine._kv_tokens == 0


def test_a_long_answer_costs_no_event_a_token() -> None:
    machine = BatchedDecodeInstance("d", slots=4, timing=AffineStep(0.02, 1e-4, 1e-8), landing_bytes=10**6)
    _, calls = by_machine(machine, [Job(at, 1000, 100_000) for at in range(4)])
    assert calls <= 4 * 4


@given(timing=coefficients, batch=st.integers(1, 50), kv=st.integers(1, 10**6), steps=st.integers(0, 3000))
def test_the_time_of_steps_is_their_sum_and_its_inverse_is_right(
    timing: AffineStep, batch: int, kv: int, steps: int
) -> None:
    elapsed_s = timing.elapsed_s(batch, kv, steps)
    assert elapsed_s == sum(timing.step_s(batch, kv + i * batch) for i in range(steps))
    assert timing.steps_by(batch, kv, elapsed_s) == steps
    assert timing.steps_by(batch, kv, elapsed_s + TICK / 2) == steps + 1


def test_with_full_slots_and_a_constant_step_it_serves_as_equation_5_says() -> None:
    """N_d BS_max / (T_decode L_out): 4 slots, 0.5 s, 8 tokens: 1 request a second."""
    machine = BatchedDecodeInstance("d", slots=4, timing=AffineStep(0.5), landing_bytes=10**6)
    out, _ = by_machine(machine, [Job(0, 10, 8) for _ in range(40)])
    freed = sorted(message.freed_s for _, (_, message) in out if type(message) is Finished)
    assert freed[-1] == 40.0


def test_alone_and_idle_it_is_the_constant_machine() -> None:
    same = {"slots": 2, "landing_bytes": 1000}
    constant = DecodeInstance("d", step_s=0.5, **same)  # type: ignore[arg-type]
    batched = BatchedDecodeInstance("d", timing=AffineStep(0.5), **same)  # type: ignore[arg-type]
    told = []
    for machine in (constant, batched):
        out, _ = by_machine(machine, [Job(1024, 10, 8)])  # type: ignore[arg-type]
        told.append([message for _, (_, message) in out if type(message) in (Admitted, Finished)])
    assert told[0] == told[1]


def test_a_profile_without_a_timing_has_the_constant_machine() -> None:
    assert type(decode_instance("d", slots=1, step_s=0.1, timing=None, landing_bytes=1)) is DecodeInstance
    made = decode_instance("d", slots=1, step_s=0.1, timing=AffineStep(0.1), landing_bytes=1)
    assert type(made) is BatchedDecodeInstance


@pytest.mark.parametrize("bad", [{"base_s": 0.0}, {"base_s": -1.0}, {"base_s": 1.0, "per_request_s": -1e-9},
                                 {"base_s": 1.0, "per_kv_token_s": float("nan")}])  # fmt: skip
def test_a_step_that_takes_no_time_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be seconds"):
        AffineStep(**bad)


# where it comes from
STEP = """decode_step:
  base_s: 0.012
  per_request_s: 0.0004
  per_kv_token_s: 0.00000001
  status: assumed
  source: a test
"""


def profile_file(tmp_path: Path, extra: str) -> Path:
    """The shipped toy profile with something appended."""
    path = tmp_path / "mine.yaml"
    path.write_text((resources.files("emulator") / "profiles" / "toy.yaml").read_text() + extra)
    return path


def test_a_profile_may_have_a_step_that_depends_on_its_batch_and_says_where_it_is_from(tmp_path: Path) -> None:
    profile = load_profile(profile_file(tmp_path, STEP))
    assert profile.decode_step == AffineStep(0.012, 0.0004, 1e-8)
    assert profile.provenance["decode_step"].source == "a test"
    assert load_profile("toy").decode_step is None


def test_a_step_in_a_profile_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"decode_step\.base_s"):
        load_profile(profile_file(tmp_path, STEP.replace("0.012", "0.0")))


def test_a_constant_step_given_takes_the_place_of_an_affine_one(tmp_path: Path) -> None:
    constant = load_profile(profile_file(tmp_path, STEP)).with_decode(step_s=0.05)
    assert constant.decode_step is None
    assert "decode_step" not in constant.provenance
    affine = load_profile("toy").with_decode(step=AffineStep(0.01))
    assert affine.decode_step == AffineStep(0.01)
    assert affine.decode_step_s == 0.025
    assert affine.provenance["decode_step"].source == "scenario"


def test_a_fault_slows_the_steps_that_begin_under_it() -> None:
    """The step under way goes on as it began; the batch's next ones take longer, and then as long as before."""
    node = BatchedDecodeInstance("d", slots=2, timing=AffineStep(1.0), landing_bytes=1000, stream_interval=1)
    node.handle(0.0, Announce("a", 1, "p", 1, 10, 6))
    node.handle(0.0, Landed(0))
    times: list[float] = []

    def until(end_s: float) -> None:
        while (due_s := node.next_s()) is not None and due_s <= end_s:
            times.extend(due_s for _, message in node.handle(due_s, WAKE) if isinstance(message, Tokens))

    until(1.5)
    node.handle(1.5, Hinder(3.0))
    until(6.0)
    node.handle(6.0, Hinder())
    until(100.0)
    assert times == [1.0, 2.0, 5.0, 8.0, 9.0]
