"""Branches' seeds are a promise: the same for ever, and apart from each other."""

import json
from pathlib import Path

from prefixmesh.branch_seed import branch_seed
from prefixmesh.requests import MAX_BRANCHES, MAX_SEED

GOLDEN = Path(__file__).parents[1] / "golden" / "branch_seeds.json"


def test_seeds_are_those_that_were_published() -> None:
    """A branch can be asked for again, alone, on any version: the file never changes."""
    for seed, branch, expected in json.loads(GOLDEN.read_text()):
        assert branch_seed(seed, branch) == expected


def test_branch_0_draws_with_the_seed_itself() -> None:
    """So that asking for more branches does not change the first."""
    assert [branch_seed(seed, 0) for seed in (0, 7, MAX_SEED)] == [0, 7, MAX_SEED]


def test_all_branches_of_close_seeds_differ_and_can_be_sent() -> None:
    """Neighbouring seeds do not share shifted branches, and every derived seed is a seed."""
    seeds = [branch_seed(seed, branch) for seed in range(50) for branch in range(MAX_BRANCHES)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
