"""The cache directory: who holds which prefix, as far as control has been told."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testbed.directory import Directory

PROMPT = (11, 12, 13, 14)
"""A prompt's blocks; each id stands for all before it too."""


def told(**held: tuple[int, ...]) -> Directory:
    directory = Directory(512)
    for node, blocks in held.items():
        directory.changed(node, blocks, ())
    return directory


class TestHits:
    """The longest prefix of each node, in tokens."""

    def test_of_nobody_there_are_none(self) -> None:
        assert told().hits(PROMPT) == {}

    def test_a_prefix_goes_by_its_last_block(self) -> None:
        assert told(p0=(12,)).hits(PROMPT) == {"p0": 1024}

    def test_the_longest_of_several_counts(self) -> None:
        assert told(p0=(13, 11, 12)).hits(PROMPT) == {"p0": 1536}

    def test_each_node_has_its_own(self) -> None:
        assert told(p0=(11,), f0=(11, 12, 13)).hits(PROMPT) == {"p0": 512, "f0": 1536}

    def test_of_another_prompt_there_are_none(self) -> None:
        assert told(p0=(21, 22)).hits(PROMPT) == {}

    def test_what_they_have_in_common_is_a_hit_of_a_prompt_that_goes_on_otherwise(self) -> None:
        assert told(p0=(11, 12, 13)).hits((11, 12, 99)) == {"p0": 1024}

    def test_a_prompt_without_whole_blocks_has_none(self) -> None:
        assert told(p0=(11,)).hits(()) == {}


class TestChanges:
    """A node's own word on what it holds."""

    def test_what_is_evicted_is_no_hit_any_more(self) -> None:
        directory = told(p0=(11, 12))
        directory.changed("p0", (), (12,))
        assert directory.hits(PROMPT) == {"p0": 512}

    def test_another_holder_is_not_touched_by_it(self) -> None:
        directory = told(p0=(12,), p1=(12,))
        directory.changed("p0", (), (12,))
        assert directory.hits(PROMPT) == {"p1": 1024}

    def test_what_goes_and_comes_in_one_change_is_held(self) -> None:
        directory = told(p0=(12,))
        directory.changed("p0", (12,), (12,))
        assert directory.hits(PROMPT) == {"p0": 1024}

    def test_a_change_told_twice_counts_once(self) -> None:
        directory = told(p0=(12,))
        directory.changed("p0", (12,), ())
        directory.changed("p0", (), (12,))
        assert directory.hits(PROMPT) == {}

    def test_the_eviction_of_what_was_never_told_is_no_matter(self) -> None:
        directory = told(p1=(12,))
        directory.changed("p0", (), (12, 99))
        assert directory.hits(PROMPT) == {"p1": 1024}

    def test_a_node_that_is_gone_holds_nothing(self) -> None:
        directory = told(p0=(11, 12), p1=(11,))
        directory.forget("p0")
        assert directory.hits(PROMPT) == {"p1": 512}

    def test_a_node_nobody_knows_can_be_forgotten(self) -> None:
        directory = told(p0=(11,))
        directory.forget("x9")
        assert directory.hits(PROMPT) == {"p0": 512}

    def test_prefixes_that_nobody_holds_take_no_room(self) -> None:
        directory = told(p0=(11, 12), p1=(12, 13))
        assert len(directory) == 3
        directory.changed("p0", (), (12,))
        assert len(directory) == 3
        directory.forget("p1")
        assert len(directory) == 1


class AsPlainSets(RuleBasedStateMachine):
    """Beside a set of blocks a node: the same hits, whatever is said in whatever order."""

    nodes = st.sampled_from(["p0", "p1", "f0"])
    blocks = st.lists(st.integers(0, 7), max_size=5).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(64)
        self.plain: dict[str, set[int]] = {}

    @rule(node=nodes, added=blocks, removed=blocks)
    def changed(self, node: str, added: tuple[int, ...], removed: tuple[int, ...]) -> None:
        self.directory.changed(node, added, removed)
        self.plain[node] = (self.plain.get(node, set()) - set(removed)) | set(added)

    @rule(node=nodes)
    def forget(self, node: str) -> None:
        self.directory.forget(node)
        self.plain.pop(node, None)

    @rule(prompt=st.lists(st.integers(0, 9), unique=True, max_size=6))
    def hits(self, prompt: list[int]) -> None:
        longest = {
            node: max((i for i, b in enumerate(prompt, 1) if b in held), default=0) for node, held in self.plain.items()
        }
        assert dict(self.directory.hits(prompt)) == {node: 64 * i for node, i in longest.items() if i}

    @invariant()
    def it_holds_what_somebody_holds(self) -> None:
        assert len(self.directory) == len(set().union(*self.plain.values()))


TestAsPlainSets = AsPlainSets.TestCase
TestAsPlainSets.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
