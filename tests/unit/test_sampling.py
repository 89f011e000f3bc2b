"""Sampling: filters against a naive reading of their definitions, and independence of what shares the batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker import sampling_device, sampling_host
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling import margins, sample, sample_on_device, sample_on_host
from prefixmesh.worker.sampling_rng import gumbels, noise_keys, noise_words

VOCAB = 300


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
    temperature=st.sampled_from([0.0, 1e-60, 0.3, 1.0, 3.0, 100.0]),
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
    temperature = max(p.temperature, sampling_host.LEAST_TEMPERATURE)
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
    sums = {
        i: (values[i] - max(values)) / temperature + noise(p.seed, index, i)
        for i in kept
        if weights[i] >= p.min_p
    }
    return max(sums, key=lambda i: sums[i])


def noise(seed: int, index: int, token_id: int) -> float:
    """One token's, by itself."""
    keys = noise_keys(np.array([seed], np.uint64), np.array([index], np.uint64))
    return float(gumbels(noise_words(np.array([token_id]), keys))[0, 0])


ROWS = st.lists(st.tuples(PARAMS, st.integers(0, 100)), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 1000))
def test_every_row_is_what_the_definitions_say(rows: list[tuple[EngineSampling, int]], seed: int) -> None:
    """On a CPU and on other devices."""
    logits = random_logits(len(rows), seed)
    expected = [naive_choice(logits[r], *rows[r]) for r in range(len(rows))]
    for take in (sample_on_host, sample_on_device):
        sampled = take(logits, [p for p, _ in rows], [index for _, index in rows])
        assert sampled.token_ids == expected
        assert not sampled.failures


@settings(max_examples=50, deadline=None)
@given(rows=ROWS)
def test_same_seed_same_token_whatever_shares_the_batch(rows: list[tuple[EngineSampling, int]]) -> None:
    logits = random_logits(len(rows))
    together = sample(logits, [p for p, _ in rows], [index for _, index in rows]).token_ids
    alone = [sample(logits[r : r + 1], [rows[r][0]], [rows[r][1]]).token_ids[0] for r in range(len(rows))]
    assert together == alone


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, spread=st.sampled_from([0.1, 2.0]))
def test_how_candidates_are_found_changes_no_token(
    rows: list[tuple[EngineSampling, int]], spread: float
) -> None:
    """Narrow columns with a rest, a look that is too short, noise in small chunks, few rows at once."""
    logits = random_logits(len(rows), spread=spread)
    whole = sample(logits, [p for p, _ in rows], [index for _, index in rows]).token_ids
    with small_looks():
        for take in (sample_on_host, sample_on_device):
            assert take(logits, [p for p, _ in rows], [index for _, index in rows]).token_ids == whole


@contextmanager
def small_looks() -> Iterator[None]:
    """Bounds that make what is rare in a large vocabulary common in a small one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "COLUMNS": 7, "COLUMNS_PER_RANK": 2, "LOOK": 3, "CHUNK": 7, "NARROW_ROWS": 2, "WIDE_ROWS": 1, "BUCKET_SHIFT": 22
        }.items():  # fmt: skip
            patch.setattr(sampling_host, name, value)
        patch.setattr(sampling_device, "TOP_P_LOOKS", (2, 5))
        patch.setattr(sampling_device, "ROWS", 2)
        yield


@pytest.mark.parametrize(
    "kind",
    [
        params(top_k=7),
        params(top_p=0.5),
        params(min_p=0.9),
        params(top_k=30, top_p=0.5),
        params(top_p=0.9, min_p=0.9),
        params(top_k=30, min_p=0.9),
    ],
    ids=lambda p: f"k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_nothing_that_a_filter_drops_is_drawn(kind: EngineSampling) -> None:
    """Of tokens that are nearly equally likely, where candidates are found that are none."""
    logits = random_logits(1, spread=0.1)
    rows = [msgspec.structs.replace(kind, seed=seed) for seed in range(120)]
    kept = set(np.flatnonzero(probabilities(logits[0], kind)).tolist())
    with small_looks():
        for take in (sample_on_host, sample_on_device):
            chosen = set(take(logits.expand(120, VOCAB).contiguous(), rows, [0] * 120).token_ids)
            assert chosen <= kept
            assert len(chosen) >= min(7, len(kept)) > 1


def test_a_nucleus_that_the_last_bits_put_beyond_the_sum_keeps_everything() -> None:
    """``top_p`` just below 1 over a flat row: the sum of blocks and the running sum need not be the same number."""
    weights = np.linspace(0.5, 1.0, 1000, dtype=np.float32)
    beyond = float(weights.sum(dtype=np.float64)) * (1 + 1e-12)
    assert sampling_host._nucleus_of_row(weights, beyond) == np.float32(0.5)


def test_a_real_vocabulary_in_a_large_mixed_batch_gives_what_each_row_gives_alone() -> None:
    """More rows than are looked at together, of 49,157 tokens; on a CPU and on other devices the same."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.gumbel(size=(40, 49_157)).astype(np.float32) * 1.5)
    kinds = [
        params(0.7), params(0.7, top_k=50), params(0.7, 50, 0.9, 0.02), params(0.7, top_p=0.99), params(min_p=0.1),
        params(0.0), params(3.0, top_p=0.95), params(1.0, 3000, 0.999),
    ]  # fmt: skip
    rows = [msgspec.structs.replace(kinds[r % len(kinds)], seed=r) for r in range(len(logits))]
    together = sample_on_host(logits, rows, list(range(len(rows)))).token_ids
    alone = [sample(logits[r : r + 1], [rows[r]], [r]).token_ids[0] for r in range(len(rows))]
    assert together == alone
    assert sample_on_device(logits, rows, list(range(len(rows)))).token_ids == together


DRAWS = 8_000


@pytest.mark.parametrize(
    "kind",
    [
        params(1.0),
        params(0.7),
        params(3.0),
        params(0.7, top_k=20),
        params(0.7, top_p=0.8),
        params(3.0, top_p=0.95),
        params(1.5, min_p=0.05),
        params(1.5, 40, 0.9, 0.02),
        params(1.5, top_p=0.9, min_p=0.02),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_frequencies_follow_the_probabilities(kind: EngineSampling) -> None:
    """Chi-square over 8,000 draws: 100 consecutive indices of answers with 80 consecutive seeds; rare tokens together."""
    logits = random_logits(1)
    rows = [msgspec.structs.replace(kind, seed=number // 100) for number in range(DRAWS)]
    indices = [number % 100 for number in range(DRAWS)]
    chosen = sample(logits.expand(DRAWS, VOCAB).contiguous(), rows, indices).token_ids
    expected = DRAWS * probabilities(logits[0], kind)
    found = np.bincount(chosen, minlength=VOCAB)
    assert not found[expected == 0.0].any()
    often = expected >= 10.0
    observed, wanted = found[often].astype(float), expected[often]
    if (rare := expected[~often].sum()) >= 10.0:
        observed, wanted = np.append(observed, found[~often].sum()), np.append(wanted, rare)
    freedom = len(wanted) - 1
    deviation = (((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom)
    assert deviation < 4.0  # standard deviations


def probabilities(logits: torch.Tensor, p: EngineSampling) -> np.ndarray:
    """[vocab] what one row with such parameters draws by, as the definitions say."""
    weights = torch.softmax(logits.double() / p.temperature, 0).numpy()
    falling = np.sort(weights)[::-1]
    if p.top_k:
        weights = np.where(weights >= falling[p.top_k - 1], weights, 0.0)
        falling = np.sort(weights)[::-1]
    if p.top_p < 1.0:
        last = int(np.searchsorted(falling.cumsum(), p.top_p * weights.sum()))
        weights = np.where(weights >= falling[last], weights, 0.0)
    weights = np.where(weights >= p.min_p * weights.max(), weights, 0.0)
    share: np.ndarray = weights / weights.sum()
    return share


def test_neighbours_in_an_answer_are_drawn_independently() -> None:
    """Chi-square of pairs of draws from eight equal tokens: at consecutive indices, and with consecutive seeds."""
    logits = torch.zeros((DRAWS, 8))
    for rows, indices in (
        ([params(seed=7)] * DRAWS, list(range(DRAWS))),
        ([params(seed=number) for number in range(DRAWS)], [5] * DRAWS),
    ):
        chosen = np.array(sample(logits, rows, indices).token_ids)
        counts = np.bincount(chosen[:-1] * 8 + chosen[1:], minlength=64)
        expected = (DRAWS - 1) / 64
        assert (((counts - expected) ** 2 / expected).sum() - 63) / math.sqrt(126) < 4.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=ROWS, seed=st.integers(0, 1000), scale=st.sampled_from([0.02, 0.3]))
def test_a_draw_changes_only_where_logits_change_by_half_its_margin(
    rows: list[tuple[EngineSampling, int]], seed: int, scale: float
) -> None:
    """Among what filters keep: without them, no change below the margin changes a token, whatever the temperature."""
    free = [(msgspec.structs.replace(p, top_k=0, top_p=1.0, min_p=0.0), index) for p, index in rows]
    kinds, indices = [p for p, _ in free], [index for _, index in free]
    logits = random_logits(len(free), seed)
    found = margins(logits, kinds, indices)
    noise = np.random.default_rng(seed).uniform(-scale, scale, logits.shape).astype(np.float32)
    before = sample(logits, kinds, indices).token_ids
    after = sample(logits + torch.from_numpy(noise), kinds, indices).token_ids
    for margin, one, other in zip(found, before, after, strict=True):
        assert one == other or margin <= 2 * scale + 1e-6


def test_the_margin_is_what_the_second_best_lacks() -> None:
    """Greedy, and drawn: with so much more, and no less, the second is chosen; alone, a token has no rival."""
    logits = random_logits(1)
    for kind in (params(0.0), params(1.7, seed=8), params(0.4, 30, 0.95, 0.001, 2)):
        [chosen] = sample(logits, [kind], [4]).token_ids
        [margin] = margins(logits, [kind], [4])
        less, more = logits.clone(), logits.clone()
        less[0, chosen] -= margin * 0.99
        more[0, chosen] -= margin * 1.01
        assert sample(less, [kind], [4]).token_ids == [chosen]
        assert sample(more, [kind], [4]).token_ids != [chosen]
    assert margins(logits, [params(top_k=1)], [0]) == [math.inf]


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
