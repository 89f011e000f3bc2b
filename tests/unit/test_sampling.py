"""Sampling: filters against a naive reading of their definitions, and independence of what shares the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker import sampling
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling import sample
from prefixmesh.worker.sampling_rng import uniforms

VOCAB = 300  # more than a block, and no multiple of one


def params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> EngineSampling:
    return EngineSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=1,
        stop_token_ids=(),
    )


PARAMS = st.builds(
    params,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 299, 300, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def random_logits(rows: int, seed: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * spread


def naive_choice(logits: torch.Tensor, p: EngineSampling, index: int) -> int:
    """The definitions, one row, in Python."""
    values = logits.tolist()
    if p.temperature == 0:
        return int(np.argmax(values))
    temperature = max(p.temperature, sampling.LEAST_TEMPERATURE)
    weights = {i: math.exp((value - max(values)) / temperature) for i, value in enumerate(values)}
    kept = sorted(weights, key=lambda i: -weights[i])
    if 0 < p.top_k < VOCAB:
        kept = kept[: p.top_k]
    if p.top_p < 1.0:
        total, reached, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            reached += weights[i]
            if reached >= p.top_p * total:
                break
        kept = nucleus
    kept = sorted(i for i in kept if weights[i] >= p.min_p)
    chance = uniforms(np.array([p.seed], np.uint64), np.array([index], np.uint64))[0]
    target, reached = chance * sum(weights[i] for i in kept), 0.0
    for i in kept:
        reached += weights[i]
        if reached > target:
            return i
    return kept[-1]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(PARAMS, st.integers(0, 100)), min_size=1, max_size=6), seed=st.integers(0, 1000)
)
def test_every_row_is_what_the_definitions_say(rows: list[tuple[EngineSampling, int]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    sampled = sample(logits, [p for p, _ in rows], [index for _, index in rows])
    assert sampled.token_ids == [naive_choice(logits[r], *rows[r]) for r in range(len(rows))]
    assert not sampled.failures


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(PARAMS, st.integers(0, 100)), min_size=2, max_size=6))
def test_same_seed_same_token_whatever_shares_the_batch(rows: list[tuple[EngineSampling, int]]) -> None:
    logits = random_logits(len(rows))
    together = sample(logits, [p for p, _ in rows], [index for _, index in rows]).token_ids
    alone = [sample(logits[r : r + 1], [rows[r][0]], [rows[r][1]]).token_ids[0] for r in range(len(rows))]
    assert together == alone


def test_the_nucleus_is_right_when_the_first_look_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that need more than the first looks are sorted whole, and get the same token; whatever the blocks."""
    logits = random_logits(16, spread=0.1)
    rows = [params(top_p=0.8, seed=i) for i in range(16)]
    whole = sample(logits, rows, [0] * 16).token_ids
    monkeypatch.setattr(sampling, "TOP_P_LOOKS", (2, 5))
    monkeypatch.setattr(sampling, "BLOCK", 7)
    assert sample(logits, rows, [0] * 16).token_ids == whole


def test_frequencies_follow_the_probabilities() -> None:
    """20,000 draws at temperature 0.7: within five standard deviations, each token."""
    draws = 20_000
    logits = random_logits(1)
    chosen = sample(
        logits.expand(draws, VOCAB).contiguous(), [params(0.7, seed=3)] * draws, list(range(draws))
    ).token_ids
    expected = torch.softmax(logits[0].double() / 0.7, 0).numpy()
    found = np.bincount(chosen, minlength=VOCAB) / draws
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-4).all()


def test_equal_logits_at_a_threshold_are_all_kept() -> None:
    """So no hidden order decides; ``top_k=1`` over two equal best chooses either."""
    logits = torch.zeros((200, VOCAB))
    logits[:, [4, 9]] = 5.0
    chosen = sample(logits, [params(top_k=1, seed=i) for i in range(200)], [0] * 200).token_ids
    assert set(chosen) == {4, 9}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_row_and_no_other(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    expected = sample(logits, [params(temperature, seed=i) for i in range(3)], [0, 0, 0]).token_ids
    logits[1, 17] = bad
    sampled = sample(logits, [params(temperature, top_p=0.9, top_k=5, seed=i) for i in range(3)], [0, 0, 0])
    assert list(sampled.failures) == [1]
    good = sample(logits[[0, 2]], [params(temperature, top_p=0.9, top_k=5, seed=i) for i in (0, 2)], [0, 0])
    assert [sampled.token_ids[0], sampled.token_ids[2]] == good.token_ids
    assert len(expected) == 3


def test_masked_logits_are_never_chosen() -> None:
    """Minus infinity is a number here: a probability of 0."""
    logits = torch.full((50, VOCAB), -math.inf)
    logits[:, 3] = 1.0
    logits[:, 5] = 1.0
    chosen = sample(logits, [params(temperature=100.0, seed=i) for i in range(50)], [0] * 50)
    assert set(chosen.token_ids) == {3, 5}
    assert not chosen.failures


def test_an_empty_batch_samples_nothing() -> None:
    """A step of prompt chunks alone wants no token."""
    assert sample(torch.empty((0, VOCAB)), [], []).token_ids == []
