"""Which sequences of a step attend together, and which slots they read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.worker.model.attention_groups import group_by_length, kv_lengths, segment_slots
from tests.support.plans import PagedSequence, Piece, make_plan


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_follow_the_page_table(page_size: int) -> None:
    """A sequence's slots are its tokens' places in page order, cut at its length, wherever the pages lie."""
    rng = np.random.default_rng(page_size)
    sequences = [
        PagedSequence(
            tokens=[0] * length,
            pages=rng.permutation(64)[: -(-length // page_size)].tolist(),
            computed=length - 1,
        )
        for length in (1, 4, 5, 31)
    ]
    plan = make_plan([Piece(sequence, 1) for sequence in sequences], page_size)
    lengths = kv_lengths(plan, page_size)
    assert lengths.tolist() == [1, 4, 5, 31]
    for index, sequence in enumerate(sequences):
        expected = [
            sequence.pages[position // page_size] * page_size + position % page_size
            for position in range(len(sequence.tokens))
        ]
        assert segment_slots(plan, index, int(lengths[index]), page_size).tolist() == expected


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    max_tokens=st.integers(1, 1000),
    min_slack=st.integers(0, 50),
)
def test_groups_cover_everything_within_their_bounds(
    lengths: list[int], max_tokens: int, min_slack: int
) -> None:
    """Each sequence is in one group; a group of several keeps to the token bound and pads nobody beyond the slack."""
    groups = group_by_length(lengths, max_tokens, min_slack)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = lengths[group[0]]
        assert longest == max(lengths[index] for index in group)
        if len(group) > 1:
            assert len(group) * longest <= max_tokens
            shortest = min(lengths[index] for index in group)
            assert longest - shortest <= max(min_slack, longest // 4)


def test_equal_lengths_share_one_group() -> None:
    """A decode step of 32 equal requests is one group, not 32 calls."""
    assert [len(group) for group in group_by_length([100] * 32, 4096, 128)] == [32]
