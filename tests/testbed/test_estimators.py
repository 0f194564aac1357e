"""What is known of the system, from observations only: lengths, and above all what the link carries."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.scheduler.estimators import WINDOW, Lengths, LinkEstimate, Observed, Series, differ
from testbed.scheduler.model import LengthDistribution, ModelError

NOMINAL_BPS = 100e9
GB = 10**9


class Link:
    """A LinkEstimate that is told once a second what landed and what waits."""

    def __init__(self, pieces: int = 1) -> None:
        self.estimate = LinkEstimate(NOMINAL_BPS, pieces)
        self.now_s = 0.0
        self.landed = 0.0
        self.estimate.account(0.0, 0.0, 0.0)

    def second(self, gbps: float, waiting_gb: float = 0.0) -> Link:
        self.now_s += 1
        self.landed += gbps * 1e9 / 8
        self.estimate.account(self.now_s, self.landed, waiting_gb * GB)
        return self

    def backlogged(self, gbps: float, seconds: int = 4) -> Link:
        """Far more waits all the time than lands."""
        for _ in range(seconds):
            self.second(gbps, waiting_gb=1000)
        return self

    def lands(self, gb: float, waited_s: float) -> None:
        """A transfer lands now, so long after its prefill had ended."""
        self.estimate.transfer(self.now_s - waited_s, self.now_s, round(gb * GB))

    @property
    def gbps(self) -> float:
        return self.estimate.bps / 1e9


class TestBacklog:
    """While more waits than lands the link is never idle: what lands is its rate."""

    def test_before_anything_is_seen_the_operator_is_believed(self) -> None:
        assert Link().gbps == 100

    def test_what_lands_meanwhile_is_what_the_link_carries(self) -> None:
        assert Link().backlogged(5).gbps == pytest.approx(5)

    def test_it_is_believed_when_it_lasts(self) -> None:
        link = Link().second(0, waiting_gb=1000)
        assert link.second(5, waiting_gb=1000).gbps == 100
        assert link.second(5, waiting_gb=1000).gbps == 5

    def test_a_little_more_or_less_is_followed_in_part(self) -> None:
        link = Link().backlogged(10)
        assert 10 < link.second(11, waiting_gb=1000).gbps < 11

    def test_much_less_is_taken_as_it_is(self) -> None:
        link = Link().backlogged(50)
        for _ in range(2):
            link.second(5, waiting_gb=1000)
        assert link.gbps == pytest.approx(5)

    def test_never_more_than_the_operator_said(self) -> None:
        assert Link().backlogged(300).gbps == 100

    def test_bytes_that_wait_now_and_then_are_none(self) -> None:
        """Something waits at every account, but less than lands: the link may have been idle between."""
        link = Link()
        for _ in range(20):
            link.second(8, waiting_gb=0.9)
        assert not link.estimate.backlogged
        assert link.gbps == 100

    def test_one_account_without_a_byte_may_be_an_outage_and_is_no_rate(self) -> None:
        assert Link().backlogged(5).second(0, waiting_gb=1000).gbps == pytest.approx(5)

    def test_a_link_that_carries_nothing_for_long_is_worth_nothing(self) -> None:
        assert Link().backlogged(5).backlogged(0).gbps == 0

    @settings(max_examples=60, deadline=None)
    @given(
        gbps=st.floats(0.5, 90),
        sizes=st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 20)), min_size=5, max_size=120),
    )
    def test_it_is_only_seen_where_there_is_one(self, gbps: float, sizes: list[tuple[float, float]]) -> None:
        """Whatever arrives when: accounts that say "backlogged" are of seconds in which a link of that rate worked all
        the time, and so is the estimate below nominal."""
        link, waiting, clock_s = Link(), 0.0, 0.0
        arrivals = []
        for gap_s, gigabits in sizes:
            clock_s += gap_s
            arrivals.append((clock_s, gigabits))
        for second in range(1, int(clock_s) + 20):
            sent, at_s = 0.0, second - 1.0
            for arrives_s, gigabits in [*(a for a in arrivals if second - 1 < a[0] <= second), (float(second), 0.0)]:
                carried = min(waiting, gbps * (arrives_s - at_s))
                sent, waiting, at_s = sent + carried, waiting - carried + gigabits, arrives_s
            link.second(sent, waiting_gb=waiting / 8)
            if link.estimate.backlogged:
                assert sent == pytest.approx(gbps)
                assert link.gbps == pytest.approx(gbps)


class TestMore:
    """A link that is not backlogged shows that it is faster than believed, or nothing."""

    def test_more_that_lands_than_believed(self) -> None:
        assert Link().backlogged(5).second(9).second(9).gbps == pytest.approx(9)

    def test_a_link_that_is_hardly_used_keeps_its_estimate(self) -> None:
        link = Link().backlogged(5)
        for _ in range(20):
            link.second(1)
        assert link.gbps == pytest.approx(5)

    def test_three_transfers_that_waited_for_less_than_half_the_time(self) -> None:
        """The last piece is all that a transfer waits for once its prefill has ended: 8 Gbit in 0.5 s."""
        link = Link().backlogged(5)
        link.second(0)
        for _ in range(2):
            link.lands(gb=1, waited_s=0.5)
            assert link.gbps == pytest.approx(5)
        link.lands(gb=1, waited_s=0.5)
        assert link.gbps == pytest.approx(10)

    def test_accounts_that_are_not_of_one_instant_even_out(self) -> None:
        """5 Gbit/s all the time, told now a second early and now late."""
        link = Link()
        for gbit in (5, 5, 7, 3, 6, 4, 7, 3, 5, 5):
            link.second(gbit, waiting_gb=1000)
        assert link.gbps == pytest.approx(5, rel=0.05)

    def test_only_the_last_piece_of_a_transfer_counts(self) -> None:
        link = Link(pieces=4).backlogged(5)
        link.second(0)
        for _ in range(4):
            link.lands(gb=1, waited_s=0.5)
        assert link.gbps == pytest.approx(5)

    def test_one_that_waited_between_them_says_wait(self) -> None:
        link = Link().backlogged(5)
        link.second(0)
        for waited_s in (0.5, 1.6, 0.5):
            link.lands(gb=1, waited_s=waited_s)
        assert link.gbps == pytest.approx(5)

    def test_it_doubles_up_to_what_the_operator_said(self) -> None:
        link = Link().backlogged(5)
        link.second(0)
        for _ in range(20):
            link.lands(gb=1, waited_s=0.0)
        assert link.gbps == 100

    def test_one_that_landed_before_the_link_was_last_judged_is_told_of_too_late(self) -> None:
        """It had to wait for a slot since."""
        link = Link().backlogged(5)
        for _ in range(5):
            link.estimate.transfer(0.4, 0.5, GB)
        assert link.gbps == pytest.approx(5)


class TestNothing:
    """An estimate that keeps everything local gets no evidence: it must not confirm itself for ever."""

    def quiet(self, link: Link, seconds: int) -> Link:
        for _ in range(seconds):
            link.second(0)
        return link

    def test_it_stands_while_it_is_fresh(self) -> None:
        assert self.quiet(Link().backlogged(5), 30).gbps == pytest.approx(5)

    def test_then_the_link_is_tried_with_twice_as_much(self) -> None:
        assert self.quiet(Link().backlogged(5), 32).gbps == pytest.approx(10)

    def test_a_link_given_up_for_lost_is_tried_with_something(self) -> None:
        assert self.quiet(Link().backlogged(0, 6), 32).gbps == 1

    def test_in_the_end_the_operator_is_believed_again(self) -> None:
        assert self.quiet(Link().backlogged(0, 6), 300).gbps == 100

    def test_a_transfer_that_waited_as_expected_is_evidence(self) -> None:
        link = Link().backlogged(5)
        for _ in range(100):
            link.second(1)
            link.lands(gb=1, waited_s=1.6)
        assert link.gbps == pytest.approx(5)

    def test_a_backlog_is_evidence(self) -> None:
        assert Link().backlogged(5, 200).gbps == pytest.approx(5)

    def test_the_trial_of_a_slow_link_is_over_as_soon_as_it_is_felt(self) -> None:
        link = self.quiet(Link().backlogged(5), 32)
        assert link.backlogged(5, 3).gbps == pytest.approx(5)


class TestAccounts:
    """Stamps come late, twice, or not at all."""

    def test_two_of_one_time_say_nothing(self) -> None:
        link = Link().backlogged(5)
        link.estimate.account(link.now_s, link.landed + 50 * GB, 0.0)
        assert link.gbps == pytest.approx(5)

    def test_of_other_nodes_than_before_start_anew(self) -> None:
        link = Link().backlogged(5)
        link.estimate.rebase(link.now_s + 1, link.landed + 50 * GB, 0.0)
        assert link.gbps == pytest.approx(5)
        assert link.estimate.egress.age_s(link.now_s + 1) == 1

    def test_after_a_new_start_the_next_one_counts_from_there(self) -> None:
        link = Link()
        link.estimate.rebase(10.0, 7.0 * GB, 0.0)
        link.estimate.account(11.0, 8.0 * GB, 0.0)
        assert link.estimate.egress.latest == pytest.approx(8e9)

    def test_one_that_was_missed_is_made_good_by_the_next(self) -> None:
        link = Link().backlogged(5)
        link.now_s += 9
        link.landed += 9 * 5e9 / 8
        assert link.second(5, waiting_gb=1000).gbps == pytest.approx(5)

    def test_utilisation_is_egress_over_the_estimate(self) -> None:
        link = Link()
        for _ in range(20):
            link.second(13)
        assert link.estimate.utilisation == pytest.approx(0.13)

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("account"), st.floats(-10, 1e4), st.floats(0, 1e13), st.floats(0, 1e13)),
                st.tuples(st.just("rebase"), st.floats(-10, 1e4), st.floats(0, 1e13), st.floats(0, 1e13)),
                st.tuples(st.just("transfer"), st.floats(-10, 1e4), st.floats(-1, 1e4), st.integers(0, 10**11)),
            ),
            max_size=40,
        )
    )
    def test_whatever_is_told_the_estimate_is_a_rate_up_to_nominal(
        self, told: list[tuple[str, float, float, int]]
    ) -> None:
        estimate = LinkEstimate(NOMINAL_BPS, 4)
        for what, *given_ in told:
            getattr(estimate, what)(*given_)
            assert 0 <= estimate.bps <= NOMINAL_BPS
            assert not math.isnan(estimate.utilisation)


class TestDiffer:
    """Whether other lengths come than those in use: chance alone changes nothing."""

    PAPER = LengthDistribution.log_normal(9.9, 1.0, 128, 131_072)

    def sample(self, mu: float, seed: int, n: int = 2000) -> LengthDistribution:
        drawn = np.exp(np.random.default_rng(seed).normal(mu, 1.0, 4 * n))
        return LengthDistribution.of_sample(np.round(drawn[(drawn > 128) & (drawn < 131_072)])[:n])

    def test_samples_of_one_distribution_hardly_ever(self) -> None:
        assert sum(differ(self.sample(9.9, seed), self.PAPER, 2000, math.inf) for seed in range(60)) <= 3

    def test_two_samples_of_one_distribution_hardly_ever(self) -> None:
        samples = [self.sample(9.9, seed) for seed in range(60)]
        assert sum(differ(one, other, 2000, 2000) for one, other in pairwise(samples)) <= 3

    def test_samples_of_shorter_prompts(self) -> None:
        assert all(differ(self.sample(9.7, seed), self.PAPER, 2000, math.inf) for seed in range(20))

    def test_a_sample_of_a_mix_is_of_that_mix(self) -> None:
        """Two lengths, half each: as many of each as in the sample, within chance."""
        mix = LengthDistribution.of_sample([1024, 32_768])
        assert not differ(LengthDistribution.of_sample([1024] * 1010 + [32_768] * 990), mix, 2000, math.inf)

    def test_another_share_of_a_mix_differs(self) -> None:
        mix = LengthDistribution.of_sample([1024, 32_768])
        assert differ(LengthDistribution.of_sample([1024] * 1200 + [32_768] * 800), mix, 2000, math.inf)

    def test_a_length_that_came_no_more_differs(self) -> None:
        mix = LengthDistribution.of_sample([1024, 2048, 32_768])
        assert differ(LengthDistribution.of_sample([1024, 32_768]), mix, 2000, math.inf)


class TestLengths:
    """The last 2,000 requests."""

    def test_the_oldest_make_room(self) -> None:
        lengths = Lengths(window=3)
        for i in range(5):
            lengths.add(float(i), 100 + i, 0, 0)
        assert lengths.incremental(across=False).atoms.tolist() == [102, 103, 104]
        assert (lengths.held, lengths.count) == (3, 5)

    def test_what_is_cached_is_taken_off(self) -> None:
        lengths = Lengths()
        lengths.add(0.0, 1000, 300, 400)
        assert lengths.incremental(across=False).atoms.tolist() == [700]
        assert lengths.incremental(across=True).atoms.tolist() == [600]

    def test_of_nothing_there_is_no_distribution(self) -> None:
        with pytest.raises(ModelError):
            Lengths().incremental(across=False)

    def test_fewer_than_a_thousand_are_not_enough(self) -> None:
        lengths = Lengths()
        for i in range(WINDOW):
            assert not lengths.enough
            lengths.add(float(i), 100, 0, 0)
        assert lengths.enough

    @pytest.mark.parametrize("count", [100, WINDOW, 3 * WINDOW + 7])
    def test_the_rate_is_that_of_the_window(self, count: int) -> None:
        lengths = Lengths()
        for i in range(count):
            lengths.add(i / 4, 100, 0, 0)
        assert lengths.rate_rps(count / 4) == pytest.approx(4, rel=0.01)

    def test_before_the_second_arrival_there_is_no_rate(self) -> None:
        lengths = Lengths()
        lengths.add(0.0, 100, 0, 0)
        assert lengths.rate_rps(1.0) is None


class TestSeries:
    """A figure over the last seconds."""

    def test_its_slope(self) -> None:
        series = Series(10.0)
        for at_s in range(8):
            series.add(float(at_s), 3.0 * at_s + 1)
        assert series.slope == pytest.approx(3)

    def test_what_is_older_than_it_keeps_is_gone(self) -> None:
        series = Series(10.0)
        series.add(0.0, 1000.0)
        series.add(10.5, 2.0)
        assert series.mean == 2.0

    def test_of_one_point_or_of_one_time_there_is_no_slope(self) -> None:
        series = Series(10.0)
        series.add(1.0, 5.0)
        assert series.slope == 0
        series.add(1.0, 9.0)
        assert series.slope == 0

    def test_its_age_and_that_of_nothing(self) -> None:
        series = Series(10.0)
        assert (series.age_s(5.0), series.latest, series.mean) == (math.inf, None, None)
        series.add(1.0, 5.0)
        assert series.age_s(5.0) == 4.0


class TestObserved:
    """All of it."""

    def test_the_mean_answer_is_of_those_that_ended_lately(self) -> None:
        observed = Observed(NOMINAL_BPS)
        assert observed.output_tokens is None
        for _ in range(WINDOW):
            observed.answered(10)
        for _ in range(WINDOW):
            observed.answered(30)
        assert observed.output_tokens == 30

    def test_round_trips_are_judged_by_the_shortest_seen(self) -> None:
        observed = Observed(NOMINAL_BPS)
        assert observed.rtt_inflation == 1
        observed.path(0.0, 0.02, 0)
        observed.path(1.0, 0.06, 0)
        assert observed.rtt_inflation == pytest.approx(2)

    def test_an_unknown_round_trip_is_none(self) -> None:
        observed = Observed(NOMINAL_BPS)
        observed.path(0.0, 0.0, 0)
        assert observed.rtt_s.latest is None
