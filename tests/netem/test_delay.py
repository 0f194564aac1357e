"""The delay line without a kernel: due times, jitter without reordering, losses, lateness; the kernel's messages."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from itertools import pairwise
from random import Random

import pytest

from netem import nfnetlink as nl
from netem import nftables
from netem.forwarding import COMPAT, NATIVE, Drop, Queue, understand
from netem.holding import Holding, Jitter, Lateness
from netem.link import Impairment, LinkError
from netem.train import Tally

MS = 1_000_000


class Draws(Random):
    """Says the numbers it was given, in order."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def uniform(self, a: float, b: float) -> float:
        number = self.numbers.pop(0)
        assert a <= number <= b
        return number


def holding(**impairment: float) -> Holding:
    made = Holding("seed")
    made.set(Impairment(**impairment), 0)
    return made


def test_a_packet_is_due_a_delay_after_it_arrived() -> None:
    line = holding(delay_s=0.015)
    assert line.due_ns is None
    assert line.arrive(1, 100 * MS)
    assert line.arrive(2, 103 * MS)
    assert line.due_ns == 115 * MS
    assert line.release(115 * MS - 1) is None
    assert line.release(115 * MS) == 1
    assert (line.due_ns, line.held, line.passed) == (118 * MS, 1, 1)


def test_a_release_names_the_newest_of_all_that_are_due() -> None:
    line = holding(delay_s=0.001)
    for packet in range(5):
        line.arrive(packet, packet * MS)
    assert line.release(4 * MS) == 3
    assert line.lateness.max_ns == 3 * MS  # packet 0 was due at 1 ms
    assert line.release(5 * MS) == 4


def test_a_shorter_delay_never_overtakes_what_waits() -> None:
    line = holding(delay_s=0.080)
    line.arrive(1, 0)
    line.set(Impairment(delay_s=0.005), 5 * MS)
    line.arrive(2, 10 * MS)
    line.arrive(3, 90 * MS)
    assert line.release(79 * MS) is None
    assert line.release(80 * MS) == 2
    assert line.due_ns == 95 * MS


def test_jitter_is_straight_between_its_knots() -> None:
    # knots 4 x 5 ms apart: 0 ms draws 2 and -4, 20 ms goes on from there to 1
    jitter = Jitter(Draws(2 * MS, -4 * MS, 1 * MS))
    jitter.set(5 * MS)
    assert [jitter.at(t * MS) for t in (0, 10, 15)] == [2 * MS, -1 * MS, -2.5 * MS]
    assert [jitter.at(t * MS) for t in (20, 30)] == [-4 * MS, -1.5 * MS]


def test_jitter_after_a_silence_starts_from_a_new_knot() -> None:
    jitter = Jitter(Draws(2 * MS, -4 * MS, 5 * MS, 3 * MS))
    jitter.set(5 * MS)
    jitter.at(0)
    assert jitter.at(100 * MS) == 5 * MS


def test_jitter_neither_reorders_nor_shifts_the_mean_nor_exceeds_its_bound() -> None:
    line = holding(delay_s=0.015, jitter_s=0.005)
    arrivals = range(0, 60_000 * MS, MS // 2)
    due = []
    for packet, t_ns in enumerate(arrivals):
        line.arrive(packet, t_ns)
        assert line.due_ns is not None
        due.append(line.due_ns)
        line.release(line.due_ns)
    delays = [(at - t_ns) / MS for at, t_ns in zip(due, arrivals, strict=True)]
    assert all(later > before for before, later in pairwise(due))
    assert 10 <= min(delays) < 11 < 19 < max(delays) <= 20
    assert sum(delays) / len(delays) == pytest.approx(15, abs=0.2)


def test_a_loss_is_a_draw_a_packet_and_the_lost_are_not_held() -> None:
    line = holding(loss=0.01)
    kept = sum(line.arrive(packet, 0) for packet in range(100_000))
    assert line.lost == 100_000 - kept
    assert line.held == kept
    assert line.lost == pytest.approx(1000, abs=4 * 31.5)


def test_losses_are_those_of_the_seed() -> None:
    first, again, other = Holding("7/to_pd"), Holding("7/to_pd"), Holding("7/to_prfaas")
    for line in (first, again, other):
        line.set(Impairment(loss=0.5), 0)
    lost = [[line.arrive(packet, 0) for packet in range(64)] for line in (first, again, other)]
    assert lost[0] == lost[1] != lost[2]


def test_without_loss_nothing_is_lost() -> None:
    line = holding(delay_s=0.001)
    assert all(line.arrive(packet, 0) for packet in range(10_000))


def test_lateness_is_read_from_its_buckets_and_the_maximum_is_exact() -> None:
    late = Lateness()
    assert late.quantile_s(0.99) == 0.0
    for late_ns in [12_000] * 98 + [61_000, 30 * MS]:
        late.add(late_ns)
    assert late.quantile_s(0.5) == pytest.approx(15e-6)  # the bucket 10-15 us
    assert late.quantile_s(0.99) == pytest.approx(65e-6)
    assert late.max_ns == 30 * MS


def stalling(line: Holding, now_ms: float, stalled: bool, delay_s: float = 0.010) -> None:
    line.set(Impairment(delay_s=delay_s, stalled=stalled), round(now_ms * MS))


def test_in_a_stall_nothing_leaves_and_what_was_under_way_keeps_its_pace() -> None:
    line = holding(delay_s=0.010)
    line.arrive(1, 0)
    line.arrive(2, 4 * MS)
    stalling(line, 5, True)
    assert line.due_ns is None
    assert line.release(500 * MS) is None
    stalling(line, 1005, False)  # 1 s later
    assert line.due_ns == 1010 * MS
    assert line.release(1010 * MS) == 1
    assert line.due_ns == 1014 * MS


def test_what_comes_in_a_stall_is_due_a_delay_after_it_and_in_order() -> None:
    line = holding(delay_s=0.010)
    line.arrive(1, 0)
    stalling(line, 5, True)
    for packet, t_ms in ((2, 6), (3, 900)):
        line.arrive(packet, t_ms * MS)
    stalling(line, 1005, False)
    line.arrive(4, 1006 * MS)
    assert line.release(1010 * MS) == 1
    assert line.release(1015 * MS) == 3
    assert line.release(1016 * MS) == 4
    assert line.held == 0


def test_a_stall_makes_nobody_late() -> None:
    line = holding(delay_s=0.010)
    line.arrive(1, 0)
    stalling(line, 5, True)
    line.arrive(2, 100 * MS)
    stalling(line, 2005, False)
    line.release(2016 * MS)
    assert line.lateness.max_ns == 6 * MS  # packet 1, due at 2010


def test_stalls_add_up_and_a_change_of_the_delay_in_one_does_not_end_it() -> None:
    line = holding(delay_s=0.010)
    stalling(line, 100, True)
    stalling(line, 150, True, delay_s=0.020)
    assert line.release(10_000 * MS) is None
    stalling(line, 200, False, delay_s=0.020)
    stalling(line, 300, True, delay_s=0.020)
    stalling(line, 350, False, delay_s=0.020)
    line.arrive(1, 400 * MS)
    assert line.due_ns == 420 * MS


def test_a_stall_needs_the_delay_line() -> None:
    assert Impairment(stalled=True).does_something


def test_a_blackhole_is_a_drop_of_what_leaves_by_the_interface() -> None:
    """By hand from linux/netfilter/nf_tables.h: oifname == "w-pd", then the verdict register is NF_DROP."""
    expressions = [nl.attributes(element) for _, element in nl.attribute_list(Drop("w-pd").encode())]
    meta, compare, immediate = (nl.attributes(parts[2]) for parts in expressions)
    assert [parts[1] for parts in expressions] == [b"meta\0", b"cmp\0", b"immediate\0"]
    assert (meta[2], meta[1]) == (bytes([0, 0, 0, 7]), bytes([0, 0, 0, 1]))  # NFT_META_OIFNAME to register 1
    assert compare[1] == bytes([0, 0, 0, 1])
    assert compare[2] == bytes(4)  # equal
    assert nl.attributes(compare[3])[1] == b"w-pd".ljust(16, b"\0")
    assert immediate[1] == bytes(4)  # NFT_REG_VERDICT
    assert nl.attributes(nl.attributes(immediate[2])[2])[1] == bytes(4)  # NF_DROP


@pytest.mark.parametrize("rule", [Drop("w-pd"), Queue("w-pd", 2, NATIVE), Queue("w-prfaas", 258, COMPAT)])
def test_a_rule_is_understood_as_it_was_written(rule: Drop | Queue) -> None:
    assert understand(rule.encode()) == rule


def test_rules_are_written_behind_each_other_in_one_batch_that_keeps_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in ahead of each other they would drop nothing that a queue takes first; a chain that goes takes what waits
    in its queues with it."""
    sent: list[bytes] = []

    class Socket:
        def send(self, raw: bytes) -> None:
            sent.append(raw)

        def recv(self, size: int) -> bytes:
            return b"".join(nl.message(nl.NLMSG_ERROR, 0, seq, 0, 0, b"")[:16] + bytes(4) for seq in range(1, 7))

    monkeypatch.setattr(nftables, "_socket", lambda: nullcontext(Socket()))
    rules = [Drop("w-pd").encode(), Queue("w-pd", 1).encode(), Queue("w-prfaas", 2).encode()]
    nftables.Table("t", -150).replace(rules)
    (raw,) = sent
    kinds = [kind for kind, _, _ in nl.messages(raw)]
    begin, end = 0x10, 0x11
    new_table, new_chain, new_rule, del_rule = (0xA00 | n for n in (0, 3, 6, 8))
    assert kinds == [begin, new_table, new_chain, del_rule, new_rule, new_rule, new_rule, end]
    flags = [struct.unpack_from("=H", raw, at + 6)[0] for at in offsets(raw)]
    assert [bool(flag & 0x800) for flag in flags] == [kind == new_rule for kind in kinds]  # NLM_F_APPEND


def offsets(raw: bytes) -> list[int]:
    found, at = [], 0
    while at < len(raw):
        found.append(at)
        at += struct.unpack_from("=I", raw, at)[0]
    return found


def test_a_rule_carries_no_bypass() -> None:
    expressions = [nl.attributes(element) for _, element in nl.attribute_list(Queue("w-pd", 258, NATIVE).encode())]
    assert [parts[1] for parts in expressions] == [b"meta\0", b"cmp\0", b"queue\0"]
    assert nl.attributes(expressions[2][2]) == {1: b"\x01\x02", 2: b"\x00\x01"}  # number and total; no flags


def test_the_compatible_rule_is_the_target_without_flags() -> None:
    expressions = [nl.attributes(element) for _, element in nl.attribute_list(Queue("w-pd", 258, COMPAT).encode())]
    target = nl.attributes(expressions[2][2])
    assert (target[1], target[2]) == (b"NFQUEUE\0", bytes(4))  # revision 0 knows a number only
    assert target[3] == struct.pack("=H6x", 258)


def test_a_rule_with_a_bypass_is_not_ours() -> None:
    meta_and_compare = b"".join(nl.attribute(1, body) for _, body in nl.attribute_list(Queue("w-pd", 1).encode())[:2])
    data = nl.attribute(1, b"\0\1") + nl.attribute(2, b"\0\1") + nl.attribute(3, b"\0\1")
    bypass = nl.nested(1, nl.attribute(1, b"queue\0"), nl.nested(2, data))
    with pytest.raises(LinkError, match="not this agent's"):
        understand(meta_and_compare + bypass)


def test_attributes_are_padded_and_nested_ones_marked() -> None:
    assert nl.attribute(3, b"abcde") == struct.pack("=HH", 9, 3) + b"abcde\0\0\0"
    assert nl.attributes(nl.nested(7, nl.attribute(3, b"abcde"))) == {7: nl.attribute(3, b"abcde")}


def test_a_message_comes_apart_as_it_was_put_together() -> None:
    raw = nl.message(0x302, nl.REQUEST, 9, 2, 258, b"body") + nl.message(3, 0, 10, 0, 0)
    assert list(nl.messages(raw)) == [(0x302, 9, b"\x02\0\x01\x02body"), (3, 10, bytes(4))]
    assert nl.error_of(struct.pack("=i", -16)) == 16


def test_a_tally_counts_what_came_late_and_what_came_twice_once() -> None:
    tally = Tally()
    for number in (0, 1, 4, 3, 3, 5):
        tally.add(number)
    assert (len(tally.seen), tally.reordered, tally.highest) == (5, 1, 5)
