"""Random numbers that are a function of (seed, index) alone: Philox4x32-10, vectorised over a batch. Pure numpy.

A counter-based generator has no state to carry: token *i* of an answer gets the same number whatever shares its batch, after a
preemption, or on another worker. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)
_TO_UNIT: Final = 2.0**-53


def philox4x32(
    counter: tuple[UintArray, UintArray, UintArray, UintArray], key: tuple[UintArray, UintArray]
) -> UintArray:
    """[4, n] 32-bit words (held in uint64) for ``n`` counters and keys of 32-bit words. O(n)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: UintArray, indices: UintArray) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), one for each (seed, index), with all 53 bits that a double holds."""
    zeros = np.zeros_like(indices)
    words = philox4x32(
        (indices & _LOW, indices >> _SHIFT, zeros, zeros),
        (seeds & _LOW, seeds >> _SHIFT),
    )
    bits = ((words[0] << _SHIFT) | words[1]) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * _TO_UNIT
    return numbers
