"""Which prefixes are hot."""

from __future__ import annotations

from testbed.scheduler.heat import Heat, Hot

SYSTEM = (1, 2, 3, 4)


def conversation(number: int, blocks: int = 8) -> tuple[int, ...]:
    """A prompt that begins with the system prompt."""
    return (*SYSTEM, *(100 * number + i for i in range(blocks - len(SYSTEM))))


def test_a_prefix_is_counted_once_a_request_however_many_nodes_hold_it() -> None:
    heat = Heat(300)
    heat.note(0, conversation(1), [4, 4, 4])
    heat.note(1, conversation(2), [4])
    [hot] = heat.hottest(2, least=2)
    assert (hot.block_id, hot.blocks, hot.hits) == (4, 4, 2)
    assert hot.ids[:4] == SYSTEM


def test_every_length_that_somebody_holds_is_a_prefix_of_its_own() -> None:
    heat = Heat(300)
    for _ in range(2):
        heat.note(0, conversation(1), [4, 6])
    assert [(one.blocks, one.hits) for one in heat.hottest(0, least=2)] == [(6, 2), (4, 2)]


def test_what_was_found_less_often_is_not_hot() -> None:
    heat = Heat(300)
    heat.note(0, conversation(1), [4, 6])
    heat.note(0, conversation(2), [4])
    assert [one.blocks for one in heat.hottest(0, least=2)] == [4]


def test_the_hottest_spares_the_most_blocks_and_ties_have_an_order() -> None:
    heat = Heat(300)
    long, short = tuple(range(1000, 1020)), tuple(range(2000, 2004))
    for ids, times in ((long, 3), (short, 9), ((7, 8), 1), ((5, 6), 1)):
        for _ in range(times):
            heat.note(0, ids, [len(ids)])
    assert [one.block_id for one in heat.hottest(0, least=1)] == [1019, 2003, 6, 8]


def test_hits_are_forgotten_within_the_window_and_not_before_half_of_it() -> None:
    heat = Heat(300)
    heat.note(10, conversation(1), [4])
    heat.note(140, conversation(2), [4])
    assert [one.hits for one in heat.hottest(290, least=1)] == [2]
    assert heat.hottest(441, least=1) == []


def test_hits_of_both_halves_add_up() -> None:
    heat = Heat(300)
    heat.note(140, conversation(1), [4])
    heat.note(160, conversation(2), [4])
    assert heat.hottest(170, least=2) == [Hot(conversation(2), 4, 2)]


def test_after_a_long_silence_nothing_is_hot() -> None:
    heat = Heat(300)
    heat.note(10, conversation(1), [4])
    assert heat.hottest(1000, least=1) == []


def test_it_counts_no_more_prefixes_than_it_may() -> None:
    heat = Heat(300, most=10)
    for number in range(50):
        heat.note(0, (number,), [1])
    heat.note(0, (3,), [1])
    assert len(heat) == 10
    assert [one.ids for one in heat.hottest(0, least=2)] == [(3,)]
