"""The router's prefix tree: true prefixes, bounds, and what is forgotten."""

import pytest

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.prefix_tree import PrefixTree

A, B, C = Endpoint("a"), Endpoint("b"), Endpoint("c")


def chain(text: str) -> list[Fingerprint]:
    """A prefix of one-letter blocks; as with real fingerprints, a name stands for the whole prefix."""
    return [Fingerprint(hash(text[: end + 1])) for end in range(len(text))]


def test_match_counts_leading_blocks_of_every_holder() -> None:
    """Each worker is credited with as many leading blocks as it holds, and with no more."""
    tree = PrefixTree(100)
    tree.record(chain("XYZ123"), A)
    tree.record(chain("XYZ4"), B)
    tree.record(chain("Q"), C)
    assert tree.find_matches(chain("XYZ129")) == {A: 5, B: 3}
    assert tree.find_matches(chain("XYZ456")) == {A: 3, B: 4}
    assert tree.find_matches(chain("nothing")) == {}
    assert tree.find_matches([]) == {}
    tree.check_invariants()


def test_middle_of_a_prompt_is_no_match() -> None:
    """F7: with P on one worker and Q on another, the prompt Q+P matches Q alone; P in the middle counts for nothing."""
    tree = PrefixTree(100)
    tree.record(chain("PPP"), A)
    tree.record(chain("QQ"), B)
    assert tree.find_matches(chain("QQPPP")) == {B: 2}


def test_record_tells_what_was_known() -> None:
    """Recording returns how many leading blocks were believed before, per worker."""
    tree = PrefixTree(100)
    assert tree.record(chain("abcd"), A) == 0
    assert tree.record(chain("abx"), A) == 2
    assert tree.record(chain("abcd"), B) == 0
    assert tree.record(chain("abcd"), B) == 4


def test_least_recently_used_blocks_leave_first_and_leaves_before_ancestors() -> None:
    """At the bound, the oldest prompt loses its end first, so that what remains is still a prefix."""
    tree = PrefixTree(6)
    tree.record(chain("aaa"), A)
    tree.record(chain("bbb"), A)
    tree.record(chain("aaa"), A)  # touched: b is the oldest now
    tree.record(chain("cc"), B)
    tree.check_invariants()
    assert len(tree) == 6
    assert tree.find_matches(chain("aaa")) == {A: 3}
    assert tree.find_matches(chain("bbb")) == {A: 1}
    assert tree.find_matches(chain("cc")) == {B: 2}


def test_prompt_longer_than_the_bound_keeps_its_beginning() -> None:
    """One prompt larger than the whole tree does not break it."""
    tree = PrefixTree(3)
    tree.record(chain("abcdef"), A)
    tree.check_invariants()
    assert tree.find_matches(chain("abcdef")) == {A: 3}


def test_removing_a_worker_keeps_what_others_hold_and_nothing_else() -> None:
    """What nobody holds any more is gone from the tree."""
    tree = PrefixTree(100)
    tree.record(chain("abc"), A)
    tree.record(chain("abd"), B)
    tree.remove_worker(A)
    tree.check_invariants()
    assert tree.find_matches(chain("abc")) == {B: 2}
    assert (len(tree), tree.count_blocks(A), tree.count_blocks(B)) == (3, 0, 3)
    tree.remove_worker(B)
    tree.remove_worker(B)
    assert len(tree) == 0
    tree.check_invariants()


def test_removed_worker_leaves_no_trace_for_the_next_in_its_place() -> None:
    """A bit that is used again credits the new worker with nothing of the old one's."""
    tree = PrefixTree(100)
    tree.record(chain("abc"), A)
    tree.record(chain("abc"), B)
    tree.remove_worker(A)
    tree.record(chain("x"), C)
    assert tree.find_matches(chain("abc")) == {B: 3}
    tree.check_invariants()


def test_forget_drops_all_that_continues_the_prefix_on_that_worker_only() -> None:
    """A wrong belief about a block is a wrong belief about everything below it."""
    tree = PrefixTree(100)
    tree.record(chain("abcd"), A)
    tree.record(chain("abxy"), A)
    tree.record(chain("abcd"), B)
    assert tree.forget(chain("abzz"), 1, A) == 5
    tree.check_invariants()
    assert tree.find_matches(chain("abxy")) == {A: 1, B: 2}
    assert tree.find_matches(chain("abcd")) == {A: 1, B: 4}
    assert tree.forget(chain("ab"), 2, A) == 0, "nothing lies beyond the end"
    assert tree.forget(chain("ab"), 0, C) == 0, "an unknown worker holds nothing"


def test_two_prefixes_of_one_name_do_not_break_the_tree() -> None:
    """A collision of fingerprints costs the later prompt its match, and the structure stays sound."""
    tree = PrefixTree(100)
    tree.record([Fingerprint(1), Fingerprint(2), Fingerprint(3)], A)
    tree.record([Fingerprint(9), Fingerprint(2), Fingerprint(4)], B)
    tree.record([Fingerprint(5), Fingerprint(5)], B)
    tree.check_invariants()
    assert tree.count_blocks(B) == 2


def test_repr_is_a_summary() -> None:
    """The state in one line."""
    tree = PrefixTree(10)
    tree.record(chain("abc"), A)
    assert repr(tree) == "PrefixTree(3/10 blocks | a: 3)"
    tree.remove_worker(A)
    assert repr(tree) == "PrefixTree(0/10 blocks | no holders)"


def test_broken_tree_is_noticed() -> None:
    """check_invariants does real work: a block without a holder is found."""
    tree = PrefixTree(10)
    tree.record(chain("ab"), A)
    next(iter(tree._blocks.values())).holders = 0
    with pytest.raises(InvariantError, match="nobody holds"):
        tree.check_invariants()


def test_memory_reaches_a_plateau() -> None:
    """F34 (scaled down): unique prompts without end keep the tree at its bound."""
    tree = PrefixTree(500)
    for number in range(2_000):
        tree.record([Fingerprint(number * 100 + block) for block in range(31)], Endpoint(f"w{number % 4}"))
    assert len(tree) == 500
    tree.check_invariants()
