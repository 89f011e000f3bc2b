"""The noise that chooses tokens: a function of (seed, index, token id) alone, vectorised over ids. Pure numpy.

Philox4x32-10 makes of (seed, index) the two words of a key, a keyed mix of 32-bit words makes of key and token id a word of noise.
There is no state to carry: a token's noise is the same whatever shares its batch, whichever other ids are looked at, after a preemption,
or on another worker. Philox alone would do, but a whole vocabulary of it in every step costs ten times as much.

The mix multiplies by an odd number of the key and then twice by fixed ones, with the high bits brought down in between. Every step of it
can be undone, so that no two ids of one key have the same noise. All multipliers are below 2^31: a product of two words then fits
into the int64 in which devices compute it.

Sources: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the two fixed multipliers are those of a
32-bit hash that was searched for the least bias (C. Wellons, "hash-prospector").
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]
WordArray = npt.NDArray[np.uint32]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)

MIX_SHIFTS: Final = (16, 15)
MIX_MULTIPLIERS: Final = (0x21F0AAAD, 0x735A2D97)
WORDS: Final = 2.0**32


class NoiseKeys(NamedTuple):
    """The keys of ``n`` draws."""

    mask: WordArray
    """[n] what each id is combined with first."""

    multiplier: WordArray
    """[n] odd and below 2^31: what that is multiplied by."""

    def take(self, rows: npt.NDArray[np.int64] | slice) -> "NoiseKeys":
        """Those of some draws."""
        return NoiseKeys(self.mask[rows], self.multiplier[rows])


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


def noise_keys(seeds: UintArray, indices: UintArray) -> NoiseKeys:
    """A key for each (seed, index). O(n)."""
    zeros = np.zeros_like(indices)
    words = philox4x32(
        (indices & _LOW, indices >> _SHIFT, zeros, zeros),
        (seeds & _LOW, seeds >> _SHIFT),
    ).astype(np.uint32)
    return NoiseKeys(words[0], words[1] >> np.uint32(1) | np.uint32(1))


def noise_words(ids: npt.NDArray[np.integer], keys: NoiseKeys) -> WordArray:
    """[n, m] words of noise for the token ids [m] or [n, m]; the smaller a word, the likelier its token."""
    words = ids.astype(np.uint32, copy=False) ^ keys.mask[:, None]
    words *= keys.multiplier[:, None]
    high = np.empty_like(words)
    for shift, multiplier in zip(MIX_SHIFTS, MIX_MULTIPLIERS, strict=True):
        np.right_shift(words, np.uint32(shift), out=high)
        np.bitwise_xor(words, high, out=words)
        np.multiply(words, np.uint32(multiplier), out=words)
    return words


def gumbels(words: WordArray) -> npt.NDArray[np.float64]:
    """The words' noise as numbers of the standard Gumbel distribution, from -3.1 to 22.9."""
    waits = (words.astype(np.float64) + 0.5) / -WORDS
    np.log1p(waits, out=waits)
    np.negative(waits, out=waits)
    np.log(waits, out=waits)
    np.negative(waits, out=waits)
    return waits


def word_bounds(least: npt.NDArray[np.float64]) -> WordArray:
    """Words that no noise of ``least`` or more is above, and hardly any other is below."""
    shares = -np.expm1(-np.exp(-least))
    return np.minimum(shares * WORDS + 1.0, WORDS - 1.0).astype(np.uint32)
