"""The counter-based generator against published numbers, and what sampling needs of it."""

import numpy as np
import pytest

from prefixmesh.worker.sampling_rng import philox4x32, uniforms


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


def test_a_number_depends_on_its_seed_and_index_alone() -> None:
    seeds = np.array([1, 2**63 - 1, 2**32, 1], dtype=np.uint64)
    indices = np.array([0, 5, 2**33, 1], dtype=np.uint64)
    together = uniforms(seeds, indices)
    alone = [uniforms(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_the_numbers_are_uniform_between_0_and_1() -> None:
    numbers = uniforms(np.full(100_000, 9, dtype=np.uint64), np.arange(100_000, dtype=np.uint64))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * 70  # five standard deviations
