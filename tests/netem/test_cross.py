"""Cross-traffic as data: when a source sends, what competes at a time, and what is refused."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from netem.cross import Present, Source, present
from netem.link import LinkError

ROOM = Path(__file__).parents[2]


def elastic(**said: Any) -> Source:
    return Source(**{"direction": "to_pd", "kind": "elastic", "flows": 2, **said})


def constant(**said: Any) -> Source:
    return Source(**{"direction": "to_pd", "kind": "constant", "rate_bps": 1e9, **said})


class TestASource:
    def test_without_spells_sends_for_ever(self) -> None:
        assert list(elastic().spells()) == [(0.0, math.inf)]

    def test_sends_from_its_start_for_its_duration(self) -> None:
        assert list(constant(start_s=5, duration_s=10).spells()) == [(5, 15)]

    def test_in_fixed_spells_begins_with_one_and_is_cut_at_its_end(self) -> None:
        found = elastic(on_s=3, off_s=2, law="fixed", start_s=10, duration_s=12).spells()
        assert list(found) == [(10, 13), (15, 18), (20, 22)]

    def test_in_exponential_spells_has_their_means(self) -> None:
        spells = list(islice(elastic(on_s=3, off_s=1, seed=7).spells(), 20_000))
        on_s = [stop_s - start_s for start_s, stop_s in spells]
        off_s = [later[0] - before[1] for before, later in pairwise(spells)]
        assert sum(on_s) / len(on_s) == pytest.approx(3, rel=0.03)
        assert sum(off_s) / len(off_s) == pytest.approx(1, rel=0.03)

    def test_in_exponential_spells_is_there_at_the_start_as_often_as_later(self) -> None:
        first = [next(elastic(on_s=3, off_s=1, seed=seed).spells())[0] == 0 for seed in range(1000)]
        assert sum(first) / 1000 == pytest.approx(0.75, abs=0.05)

    def test_draws_by_its_seed_and_its_place(self) -> None:
        def drawn(**said: Any) -> list[tuple[float, float]]:
            return list(islice(elastic(on_s=3, off_s=1, **said).spells(), 50))

        assert drawn(seed=1) == drawn(seed=1)
        assert drawn(seed=1) != drawn(seed=2) != drawn(seed=2, stream=1)

    def test_in_other_units_of_time_sends_in_the_same_spells(self) -> None:
        """A wire ten times as fast: what the scenario says in model seconds, in wall seconds."""
        model, wall = elastic(on_s=30, off_s=10, start_s=5, seed=3), elastic(on_s=3, off_s=1, start_s=0.5, seed=3)
        for on_model, on_wall in zip(islice(model.spells(), 500), wall.spells(), strict=False):
            assert on_wall == pytest.approx([one / 10 for one in on_model], rel=1e-12)


def test_the_same_seed_gives_the_same_spells_in_every_process() -> None:
    code = (
        "from itertools import islice; from netem.cross import Source\n"
        "one = Source('to_pd', 'elastic', flows=1, on_s=20.0, off_s=5.0, seed=11, stream=2)\n"
        "print([(a.hex(), b.hex()) for a, b in islice(one.spells(), 100)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOM,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4711")
    }
    assert len(told) == 1
    here = islice(elastic(flows=1, on_s=20.0, off_s=5.0, seed=11, stream=2).spells(), 100)
    assert told == {f"{[(a.hex(), b.hex()) for a, b in here]}\n"}


class TestWhatCompetes:
    def test_is_the_sum_of_those_that_send(self) -> None:
        both = [elastic(start_s=10, duration_s=20), constant(start_s=15, duration_s=10)]
        assert list(present(both, "to_pd")) == [(10, 2, 0), (15, 2, 1e9), (25, 2, 0), (30, 0, 0)]

    def test_is_of_one_direction(self) -> None:
        assert list(present([elastic(direction="to_prfaas")], "to_pd")) == []
        assert list(present([elastic(direction="to_prfaas")], "to_prfaas")) == [Present(0, 2, 0)]

    def test_changes_once_where_one_goes_as_an_equal_one_comes(self) -> None:
        in_turn = [elastic(duration_s=5), elastic(start_s=5, duration_s=5)]
        assert list(present(in_turn, "to_pd")) == [(0, 2, 0), (10, 0, 0)]

    def test_leaves_no_dust_of_rates_behind(self) -> None:
        three = [constant(rate_bps=rate, duration_s=1) for rate in (0.1e9, 0.2e9, 0.3e9)]
        assert list(present(three, "to_pd"))[-1] == (1, 0, 0.0)

    def test_goes_on_without_end_and_in_order(self) -> None:
        many = [elastic(on_s=1, off_s=2, seed=seed) for seed in range(5)]
        found: Iterator[Present] = islice(present(many, "to_pd"), 3000)
        told = list(found)
        assert all(a.at_s < b.at_s for a, b in pairwise(told))
        assert all(0 <= one.flows <= 10 for one in told)


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ({"direction": "up"}, "direction", "use to_pd or to_prfaas"),
        ({"kind": "udp"}, "kind", "use elastic or constant"),
        ({"law": "even"}, "law", "use exponential or fixed"),
        ({"flows": None}, "flows", "elastic cross-traffic needs it"),
        ({"flows": 0}, "flows", "give 1 to 64"),
        ({"flows": 65}, "flows", "give 1 to 64"),
        ({"flows": True}, "flows", "give 1 to 64"),
        ({"rate_bps": 1e9}, "rate_bps", "no meaning for elastic"),
        ({"kind": "constant"}, "rate_bps", "constant cross-traffic needs it"),
        ({"kind": "constant", "rate_bps": 1e9}, "flows", "no meaning for constant"),
        ({"kind": "constant", "flows": None, "rate_bps": -1.0}, "rate_bps", "is no rate"),
        ({"kind": "constant", "flows": None, "rate_bps": math.nan}, "rate_bps", "is not finite"),
        ({"on_s": 3.0}, "off_s", "is missing beside on_s"),
        ({"off_s": 3.0}, "on_s", "is missing beside off_s"),
        ({"on_s": 0.0, "off_s": 1.0}, "on_s", "is no span of time"),
        ({"start_s": -1.0}, "start_s", "give at least 0"),
        ({"duration_s": 0.0}, "duration_s", "is no span of time"),
        ({"seed": -1}, "seed", "is no seed"),
    ],
)
def test_a_source_that_cannot_be_is_refused(said: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(LinkError, match=words) as refused:
        elastic(**said)
    assert refused.value.field == field
    assert refused.value.remedy
