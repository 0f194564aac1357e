"""What receivers noted, and what follows from it: goodput, the first second, how long a step takes. Pure.

A timeline is (CLOCK_MONOTONIC ns, payload bytes so far) of one connection, from the first byte on. All processes of a
testbed share that clock, so a timeline can be laid beside when a sender began or when the kernel had a new rate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from netem.link import LinkError

Timeline = Sequence[tuple[int, int]]

_SUPER_PACKET_BYTES = 65_536
_STRIDE_NS = 5_000_000
_HELD_S = 0.5  # a new rate that is kept for as long is there


def bytes_at(timeline: Timeline, at_ns: int) -> float:
    """Payload bytes that had arrived by then, straight between two notes; 0 before the first."""
    after = bisect_left(timeline, at_ns, key=lambda note: note[0])
    if after == len(timeline):
        return float(timeline[-1][1]) if timeline else 0.0
    t1_ns, then = timeline[after]
    if after == 0:
        return float(then) if t1_ns == at_ns else 0.0
    t0_ns, before = timeline[after - 1]
    return before + (then - before) * (at_ns - t0_ns) / max(1, t1_ns - t0_ns)


def had_arrived(timeline: Timeline, at_ns: int) -> int:
    """Payload bytes that a read had returned by then: never more than had arrived. Between two notes `bytes_at` may say
    more, for of several connections each waits while another's super-packet is on the link."""
    after = bisect_right(timeline, at_ns, key=lambda note: note[0])
    return timeline[after - 1][1] if after else 0


def delivered(timelines: Sequence[Timeline], start_ns: int, end_ns: int) -> float:
    """Payload bytes of all connections that arrived between two times."""
    return sum(bytes_at(one, end_ns) - bytes_at(one, start_ns) for one in timelines)


def goodput_bps(
    timelines: Sequence[Timeline], seconds: float, skip_s: float, catch_up_s: float = 0.0
) -> tuple[float, float]:
    """(bits/s, window in s) of several receivers' timelines over their common window.

    The window is [last first byte + skip_s, earliest first byte + seconds], or to the last byte if that came sooner. A
    lost packet holds back all that came after it (a second of it, where a retransmission is lost too). Senders that go
    on for `catch_up_s` let the window close up to so much later, while all still send: at the first moment when what
    had arrived was as far as it then ever got beside a straight line, to a super-packet.
    Raises LinkError if nothing is left of it.
    """
    if not timelines or not all(timelines):
        raise LinkError("probe: a connection received nothing; is the link down, or far slower than asked?")
    start_ns = max(timeline[0][0] for timeline in timelines) + round(skip_s * 1e9)
    end_ns = min(timeline[0][0] for timeline in timelines) + round(seconds * 1e9)
    end_ns = min(end_ns, max(timeline[-1][0] for timeline in timelines))
    if end_ns <= start_ns:
        raise LinkError(f"probe: nothing came after the first {skip_s} s; measure for longer")
    mean = delivered(timelines, start_ns, end_ns) / (end_ns - start_ns)  # bytes/ns

    def behind(at_ns: int) -> float:
        return mean * (at_ns - start_ns) - sum(bytes_at(one, at_ns) for one in timelines)

    last_ns = min(end_ns + round(catch_up_s * 1e9), *(timeline[-1][0] for timeline in timelines))
    moments = range(end_ns, max(end_ns, last_ns) + 1, _STRIDE_NS)
    lags = [behind(at_ns) for at_ns in moments]
    bound = min(lags) + _SUPER_PACKET_BYTES
    end_ns = next(at_ns for at_ns, lag in zip(moments, lags, strict=True) if lag <= bound)
    window_s = (end_ns - start_ns) / 1e9
    return delivered(timelines, start_ns, end_ns) * 8 / window_s, window_s


def first_second_bps(timelines: Sequence[Timeline], began_ns: int) -> float:
    """Payload bits of all connections in the second from `began_ns`, when the first sender began. At most what an
    honest shaper lets through in a second, however late a receiver's process wakes up."""
    return sum(had_arrived(one, began_ns + 1_000_000_000) for one in timelines) * 8.0


def step_response_s(
    timelines: Sequence[Timeline], step_ns: int, expected_bps: float, tolerance: float, window_s: float = 0.1
) -> float | None:
    """Seconds from `step_ns` until goodput is `expected_bps`: the start of the first window from which on every one
    within the next half second has it, to the tolerance (a fraction). None if it never is, or if the timelines end."""
    window_ns, held_ns = round(window_s * 1e9), round(_HELD_S * 1e9)
    end_ns = min((one[-1][0] for one in timelines if one), default=0)
    stride_ns = window_ns // 10
    since_ns = at_ns = step_ns
    while at_ns + window_ns <= end_ns:
        found_bps = delivered(timelines, at_ns, at_ns + window_ns) * 8 / window_s
        if abs(found_bps / expected_bps - 1) > tolerance:
            since_ns = at_ns + stride_ns
        elif at_ns + window_ns - since_ns >= held_ns:
            return (since_ns - step_ns) / 1e9
        at_ns += stride_ns
    return None
