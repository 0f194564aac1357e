"""Conversations: each prompt holds the one before it, ids say so, and the load is steady at its rate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from traces.info import describe
from traces.request import Request, TraceError
from traces.sessions import Sessions
from traces.synthetic import DiscreteLengths, Synthetic

USER = DiscreteLengths((100, 700), (1, 1))
SHAPE = Sessions(turns_mean=4, think_s=20, system_tokens=1300, max_input_tokens=20_000)
LOAD = Synthetic(5, 600, USER, (50, 250), seed=1, sessions=SHAPE)


def conversations(load: Synthetic) -> list[list[Request]]:
    by_name: dict[str, list[Request]] = {}
    for request in load.generate().requests:
        by_name.setdefault(request.session, []).append(request)
    return list(by_name.values())


def test_a_prompt_is_the_one_before_with_its_answer_and_new_tokens() -> None:
    turns = [pair for chat in conversations(LOAD) for pair in pairwise(chat)]
    assert len(turns) > 1000
    for before, after in turns:
        assert after.input_tokens - before.input_tokens - before.output_tokens in (100, 700)


def test_a_first_prompt_is_the_system_prompt_and_new_tokens() -> None:
    firsts = {chat[0].input_tokens for chat in conversations(replace(LOAD, sessions=replace(SHAPE, turns_mean=1)))}
    assert firsts == {1400, 2000}


def test_turns_share_their_full_blocks_and_conversations_the_system_prompts() -> None:
    chats = conversations(LOAD)
    shared = 1300 // 512
    assert len({chat[0].block_hashes[:shared] for chat in chats}) == 1
    beyond = [{block for turn in chat for block in turn.block_hashes[shared:]} for chat in chats]
    assert sum(map(len, beyond)) == len(set().union(*beyond))
    for before, after in (pair for chat in chats for pair in pairwise(chat)):
        full = before.input_tokens // 512
        assert after.block_hashes[:full] == before.block_hashes[:full]
        if before.input_tokens % 512:
            assert before.block_hashes[full] not in after.block_hashes


def test_the_block_size_is_that_of_the_ids() -> None:
    trace = replace(LOAD, duration_s=60, sessions=replace(SHAPE, block_size=16)).generate()
    assert {request.block_size for request in trace.requests} == {16}


def test_no_system_prompt_is_nothing_shared() -> None:
    chats = conversations(replace(LOAD, sessions=replace(SHAPE, system_tokens=0)))
    ids = [{block for turn in chat for block in turn.block_hashes} for chat in chats]
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_the_mean_rate_is_the_loads_and_steady_from_the_start() -> None:
    """Conversations that began before 0 are under way: no ramp. Short windows over many seeds."""
    halves = []
    for seed in range(400):
        times = [r.arrival_s for r in replace(LOAD, duration_s=60, seed=seed).generate().requests]
        halves.append((sum(time < 30 for time in times), sum(time >= 30 for time in times)))
    counts = np.array(halves)
    assert counts.mean(axis=0) == pytest.approx([150, 150], rel=0.03)


@pytest.mark.parametrize(
    "arrivals",
    [
        {"arrivals": "uniform"},
        {"arrivals": "gamma", "cv": 2.0},
        {"arrivals": "mmpp", "states": ((0.5, 20.0), (4.0, 5.0))},
        {"arrivals": "diurnal", "period_s": 100.0, "amplitude": 1.0},
    ],
)
def test_every_process_may_begin_conversations(arrivals: dict[str, Any]) -> None:
    figures = describe(replace(LOAD, duration_s=4000, **arrivals).generate())
    assert figures["kept"] == pytest.approx(20_000, rel=0.1)


def test_conversations_begin_at_the_loads_hour() -> None:
    """With one turn each, a diurnal load of sessions swings as one without them: the lead does not shift it."""
    swing = replace(LOAD, duration_s=2000, arrivals="diurnal", period_s=100.0, amplitude=1.0)
    times = np.array([r.arrival_s for r in replace(swing, sessions=Sessions(1, 3.7)).generate().requests])
    counts, _ = np.histogram(times % 100, bins=4, range=(0, 100))
    assert counts[0] == pytest.approx(counts[1], rel=0.1)
    assert counts[:2].sum() > 4 * counts[2:].sum()


def test_turns_and_think_times_have_their_means() -> None:
    long = replace(LOAD, duration_s=20_000, sessions=replace(SHAPE, max_input_tokens=10**9))
    whole = [chat for chat in conversations(long) if 1000 < chat[0].arrival_s < 18_000]
    assert np.mean([len(chat) for chat in whole]) == pytest.approx(4, rel=0.03)
    gaps = [after.arrival_s - before.arrival_s for chat in whole for before, after in pairwise(chat)]
    assert np.mean(gaps) == pytest.approx(20, rel=0.03)
    assert np.std(gaps) == pytest.approx(20, rel=0.05)


def test_turns_are_capped_and_the_mean_says_so() -> None:
    capped = replace(SHAPE, turns_max=3)
    chats = conversations(replace(LOAD, duration_s=5000, sessions=capped))
    assert max(map(len, chats)) == 3
    assert capped.mean_turns == pytest.approx(1 + 3 / 4 + 9 / 16)
    assert sum(map(len, chats)) == pytest.approx(25_000, rel=0.05)


def test_a_conversation_at_the_end_of_its_window_begins_anew_under_another_name() -> None:
    small = replace(SHAPE, max_input_tokens=3000, turns_mean=12)
    trace = replace(LOAD, sessions=small).generate()
    assert max(request.input_tokens for request in trace.requests) <= 3000
    anew = [chat for chat in conversations(replace(LOAD, sessions=small)) if "." in chat[0].session]
    assert len(anew) > 100
    assert {chat[0].input_tokens for chat in anew if chat[0].arrival_s > 500} >= {1400, 2000}
    assert len(trace.requests) == pytest.approx(3000, rel=0.2)


def test_equal_parameters_give_equal_requests_and_seeds_differ() -> None:
    assert LOAD.generate().rows_sha256 == LOAD.generate().rows_sha256
    assert LOAD.generate().rows_sha256 != replace(LOAD, seed=2).generate().rows_sha256


def test_the_ideal_hit_is_nearly_all_that_is_not_new() -> None:
    figures = describe(replace(LOAD, duration_s=3000).generate())
    assert figures["prefix"]["block_size"] == 512
    assert 0.6 < figures["prefix"]["hit_ratio"] < 0.95
    assert any("turns of" in note for note in figures["notes"])


def test_the_lengths_that_policies_are_told_are_those_of_the_load() -> None:
    told = SHAPE.sample_input_tokens(USER, (50, 250), 20_000)
    offered = [request.input_tokens for request in replace(LOAD, duration_s=8000).generate().requests]
    assert len(told) >= 20_000
    assert np.mean(told) == pytest.approx(np.mean(offered), rel=0.05)
    assert np.percentile(told, 90) == pytest.approx(np.percentile(offered, 90), rel=0.08)
    assert told.tolist() == SHAPE.sample_input_tokens(USER, (50, 250), 20_000).tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"turns_mean": 0.5}, "turns_mean = 0.5"),
        ({"turns_mean": float("inf")}, "turns_mean = inf"),
        ({"think_s": 0}, "think_s = 0"),
        ({"turns_max": 0}, "turns_max = 0"),
        ({"system_tokens": -1}, "system_tokens = -1"),
        ({"max_input_tokens": 0}, "max_input_tokens = 0"),
        ({"block_size": 0}, "block_size = 0"),
    ],
)
def test_shapes_without_a_meaning_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match="sessions: ") as refusal:
        replace(SHAPE, **change)
    assert said in str(refusal.value)


def test_a_window_too_small_for_one_turn_is_refused() -> None:
    with pytest.raises(TraceError, match="up to 700 user tokens a turn are more than max_input_tokens = 1999"):
        replace(LOAD, sessions=replace(SHAPE, max_input_tokens=1999))
