"""The counter-based generator against published numbers, and what sampling needs of it."""

import numpy as np
import pytest

from prefixmesh.worker.sampling_rng import (
    NoiseKeys,
    gumbels,
    noise_keys,
    noise_words,
    philox4x32,
    word_bounds,
)

GOLDEN = [[501134918, 1036470230, 1210640950], [1101918993, 1600948237, 173738088]]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Random123's known-answer vectors of philox4x32-10."""
    c = [np.array([word], dtype=np.uint64) for word in counter]
    k = [np.array([word], dtype=np.uint64) for word in key]
    words = philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert words[:, 0].tolist() == list(expected)


def keys(count: int, seed: int = 9) -> NoiseKeys:
    """Of consecutive indices."""
    return noise_keys(np.full(count, seed, dtype=np.uint64), np.arange(count, dtype=np.uint64))


def deviation(counts: np.ndarray) -> float:
    """Of counts that should be equal: chi-square, in standard deviations."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_noise_depends_on_its_seed_index_and_token_alone() -> None:
    """Whatever else is asked for, in whichever order; and on each of the three."""
    seeds = np.array([1, 2**63 - 1, 2**32, 1], dtype=np.uint64)
    indices = np.array([0, 5, 2**33, 1], dtype=np.uint64)
    ids = np.array([49_151, 0, 7, 2**31 - 1])
    together = noise_words(ids, noise_keys(seeds, indices))
    for row in range(4):
        own = noise_keys(seeds[row : row + 1], indices[row : row + 1])
        alone = [int(noise_words(ids[place : place + 1], own)[0, 0]) for place in (3, 1, 0, 2)]
        assert together[row, [3, 1, 0, 2]].tolist() == alone
    assert len(np.unique(together)) == together.size


def test_noise_is_what_it_was() -> None:
    """A promise: the same seed gives the same tokens on every version and machine."""
    assert noise_words(np.array([0, 1, 49_151]), keys(2, seed=5)).tolist() == GOLDEN


def test_no_two_tokens_have_the_same_noise() -> None:
    """So equally likely tokens never tie."""
    words = noise_words(np.arange(200_000), keys(1))[0]
    assert len(np.unique(words)) == len(words)


def test_words_are_uniform_over_tokens_and_over_indices() -> None:
    for words in (
        noise_words(np.arange(100_000), keys(1))[0],
        noise_words(np.array([77]), keys(100_000))[:, 0],
    ):
        assert abs(deviation(np.bincount(words >> np.uint32(24), minlength=256))) < 4.0


@pytest.mark.parametrize("distance", [1, 2, 7, 256, 4096, 32_768, 65_536])
def test_words_of_two_tokens_are_independent(distance: int) -> None:
    """Over indices; by their upper four bits, which decide, and by their upper bit, whose product is a matter of luck."""
    one, other = noise_words(np.array([1_000, 1_000 + distance]), keys(100_000)).T
    pairs = (one >> np.uint32(28)) * np.uint32(16) + (other >> np.uint32(28))
    assert abs(deviation(np.bincount(pairs, minlength=256))) < 4.0


@pytest.mark.parametrize("distance", [1, 2, 7, 64])
def test_words_of_neighbours_are_independent(distance: int) -> None:
    """Over the ids of one draw."""
    words = noise_words(np.arange(100_000), keys(1, seed=4))[0] >> np.uint32(28)
    pairs = words[:-distance] * np.uint32(16) + words[distance:]
    assert abs(deviation(np.bincount(pairs, minlength=256))) < 4.0


def test_the_luckiest_of_a_vocabulary_is_as_lucky_as_chance_has_it() -> None:
    """The least of 49,152 words, over 400 draws: Kolmogorov's distance from the law of the least of so many uniform numbers."""
    least = np.array(
        [noise_words(np.arange(49_152), keys(400).take(slice(i, i + 1))).min() for i in range(400)]
    )
    law = np.sort(1.0 - (1.0 - least / 2.0**32) ** 49_152)
    assert (
        np.abs(law - np.arange(1, 401) / 400).max() * np.sqrt(400) < 1.63
    )  # 1 % of all samples are farther off


def test_gumbels_are_finite_and_fall_as_words_rise() -> None:
    found = gumbels(np.array([0, 1, 2**16, 2**31, 2**32 - 1], dtype=np.uint32))
    assert (np.diff(found) < 0).all()
    assert (found[0], found[-1]) == (pytest.approx(22.87, abs=0.01), pytest.approx(-3.13, abs=0.01))
    assert found[3] == pytest.approx(-np.log(np.log(2)))


def test_bounds_of_words_leave_no_luckier_one_out() -> None:
    """And let hardly any other in."""
    words = noise_words(np.arange(200_000), keys(1))[0]
    least = np.array([-4.0, -1.0, 0.0, 5.0, 9.0, 30.0])
    for bound, limit in zip(least, word_bounds(least), strict=True):
        lucky = gumbels(words) >= bound
        assert (words[lucky] <= limit).all()
        assert np.count_nonzero(words <= limit) <= np.count_nonzero(lucky) + 1
