"""Random choice of tokens on a CPU, in numpy: one thread, no barrier, and only as much of a row as its filters leave.

For a few million numbers a step, torch's threads cost more than they bring: when anything else runs on their cores, each of a
dozen small operations waits for the operating system. And most filters keep few tokens, so exponentials of the whole vocabulary
are mostly thrown away. So a row is first narrowed to *candidates*, among which is all that its filters may keep, and everything
after that is about some hundred numbers.

What finds the candidates (how many columns, which look) never changes the choice: it is the one that ``sampling`` defines,
whatever shares the batch. A token's noise is the same whichever others are looked at, no sum runs from one row into another, and none
depends on how wide others make the arrays.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling_rng import (
    NoiseKeys,
    WordArray,
    gumbels,
    noise_keys,
    noise_words,
    word_bounds,
)

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

NARROW_ROWS: Final = 64
WIDE_ROWS: Final = 16
"""Rows looked at together: enough to spread what a call costs, few enough that what is computed for whole rows stays near the core
(16 rows of 49,152 weights are 3 MiB), and that a filter which keeps nearly everything takes tens of MB and no more."""

COLUMNS: Final = 768
"""A row is seen as so many columns or more, and the k-th largest of their maxima is at most the k-th largest of the row: a bound that
one pass finds, and above which hardly more than k are. Sorting so many takes less than the pass."""

COLUMNS_PER_RANK: Final = 4
"""With four columns for each of k ranks, 15 % more than k candidates are expected."""

LOOK: Final = 64
"""``top_p`` looks among so many likeliest first, which often reach it; rows where they do not are looked at whole."""

BUCKET_SHIFT: Final = 16
"""Of 32 bits: what is left is the exponent and 7 bits of the fraction, so that a bucket spans less than 1 % of its weights."""

CHUNK: Final = 65_536
"""Ids for which words of noise are made at once: 256 KiB, twice, which stay near the core."""

FARTHEST: Final = 30.0
"""Noise is between -3.1 and 22.9, so that a token whose score is 26.1 or more below the best is never chosen."""

LEAST_TEMPERATURE: Final = 1e-30
"""Anything above 0 and below this is this: float32 must not take it for 0."""

BOUND_SLACK: Final = 1e-3
"""Of a natural logarithm. ``min_p`` as a bound of logits only finds candidates, which are then held to ``min_p`` itself."""


class Filters(NamedTuple):
    """The parameters of ``n`` rows, each as an array."""

    temperature: FloatArray
    top_k: IndexArray
    """0 where it keeps everything."""

    top_p: DoubleArray
    min_p: FloatArray
    keys: NoiseKeys
    """Of each row's noise."""

    @classmethod
    def of(cls, params: Sequence[EngineSampling], indices: Sequence[int], vocab_size: int) -> "Filters":
        """Arrays of what the requests ask for; ``indices[r]`` is the token's place in its answer."""
        return cls(
            np.array([max(one.temperature, LEAST_TEMPERATURE) for one in params], dtype=np.float32),
            np.array([one.top_k if one.top_k < vocab_size else 0 for one in params], dtype=np.int64),
            np.array([one.top_p for one in params], dtype=np.float64),
            np.array([one.min_p for one in params], dtype=np.float32),
            noise_keys(
                np.array([one.seed for one in params], dtype=np.uint64), np.array(indices, dtype=np.uint64)
            ),
        )

    def take(self, rows: IndexArray | slice) -> "Filters":
        """Those of some rows."""
        return Filters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.keys.take(rows),
        )


def choose(logits: FloatArray, largest: FloatArray, filters: Filters) -> IndexArray:
    """[n] token ids for ``logits`` [n, vocab], whose row maxima are ``largest`` [n] and finite.

    One pass over rows with ``top_k``, or with ``min_p`` and no ``top_p``; words of noise for the whole row where nothing is left out;
    exponentials of the whole row for ``top_p`` alone, both where it keeps many.
    """
    chosen = np.zeros(len(logits), dtype=np.int64)
    is_narrow = (filters.top_k > 0) | ((filters.min_p > 0.0) & (filters.top_p >= 1.0))
    is_summed = ~is_narrow & (filters.top_p < 1.0)
    for choose_some, mask, size in (
        (_choose_narrow, is_narrow, NARROW_ROWS),
        (_choose_by_sum, is_summed, WIDE_ROWS),
        (_choose_from_all, ~(is_narrow | is_summed), WIDE_ROWS),
    ):
        rows = np.flatnonzero(mask)
        for start in range(0, len(rows), size):
            some = _contiguous(rows[start : start + size])
            chosen[some] = choose_some(logits[some], largest[some], filters.take(some))
    return chosen


def likeliest(values: FloatArray, count: int) -> tuple[IndexArray, FloatArray]:
    """[n, count] places and values of each row's largest, the largest first, of equals the first. Of rows that are not numbers,
    anything."""
    if not count:
        return np.zeros((len(values), 0), dtype=np.int64), np.zeros((len(values), 0), dtype=np.float32)
    bound = _rank_bound(values, np.full(len(values), count))
    ids, found = _gather(values, np.where(np.isnan(bound), np.float32(-np.inf), bound), padding=-np.inf)
    order = np.argsort(-found, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(found, order, axis=-1)


def _contiguous(rows: IndexArray) -> IndexArray | slice:
    """The rows as a slice where they are neighbours, since that copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _choose_narrow(logits: FloatArray, largest: FloatArray, filters: Filters) -> IndexArray:
    """Rows whose logits alone say which few tokens may be kept."""
    bound = np.maximum(_rank_bound(logits, filters.top_k), _min_p_bound(largest, filters))
    ids, values = _gather(logits, bound, padding=-np.inf)
    kth = _ranked(np.sort(values, axis=-1), filters.top_k)
    scores = _scores(values, largest, filters.temperature)
    weights = np.exp(scores)
    weights[values < kth[:, None]] = 0.0
    falling = np.sort(weights, axis=-1)[:, ::-1]
    sums = falling.cumsum(axis=-1, dtype=np.float64)
    least, _ = _nucleus(falling, sums, sums[:, -1] * filters.top_p)
    least[filters.top_p >= 1.0] = 0.0
    least = np.maximum(least, filters.min_p)
    return _best_of_few(ids, scores, (weights > 0.0) & (weights >= least[:, None]), filters.keys)


def _choose_by_sum(logits: FloatArray, largest: FloatArray, filters: Filters) -> IndexArray:
    """Rows with ``top_p`` and no ``top_k``, for which the weights of the whole vocabulary must be summed."""
    weights = _scores(logits, largest, filters.temperature)
    np.exp(weights, out=weights)
    wanted = weights.sum(axis=-1, dtype=np.float64) * filters.top_p
    look = np.full(len(weights), min(LOOK, weights.shape[1]))
    ids, candidates = _gather(weights, _rank_bound(weights, look), padding=0.0)
    falling = np.sort(candidates, axis=-1)[:, ::-1]
    least, reached = _nucleus(falling, falling.cumsum(axis=-1, dtype=np.float64), wanted)
    kept = candidates >= np.maximum(least, filters.min_p)[:, None]
    scores = _scores(np.take_along_axis(logits, ids, axis=-1), largest, filters.temperature)
    chosen = _best_of_few(ids, scores, kept, filters.keys)
    left = np.flatnonzero(~reached)
    if len(left):
        rows = _contiguous(left)
        chosen[rows] = _choose_from_most(
            logits[rows], largest[rows], weights[rows], wanted[rows], filters.take(rows)
        )
    return chosen


def _choose_from_most(
    logits: FloatArray, largest: FloatArray, weights: FloatArray, wanted: DoubleArray, filters: Filters
) -> IndexArray:
    """Rows of which ``top_p`` keeps much. The best of all is nearly always kept, and is then the best of what is kept: where the
    nucleus ends must only be found when it is not."""
    chosen = _choose_from_all(logits, largest, filters)
    for row, best in enumerate(chosen.tolist()):
        some, own, min_p = weights[row], weights[row, best], filters.min_p[row]
        if own >= min_p and np.where(some > own, some, np.float32(0.0)).sum(dtype=np.float64) < wanted[row]:
            continue
        least = np.maximum(_nucleus_of_row(some, wanted[row]), min_p)
        one = slice(row, row + 1)
        kept = np.where(some >= least, logits[one], np.float32(-np.inf))
        chosen[row] = _choose_from_all(kept, largest[one], filters.take(one))[0]
    return chosen


def _choose_from_all(logits: FloatArray, largest: FloatArray, filters: Filters) -> IndexArray:
    """Rows without filters; logits of minus infinity are left out.

    The likeliest tokens' sums of score and noise come first. All others have a lower score than these, so that only few of them, those
    of the largest noise, can still be above the best sum: words of noise are made for all, numbers of noise for these.
    """
    bound = _rank_bound(logits, np.full(len(logits), math.isqrt(logits.shape[1])))
    farthest = largest - np.float32(FARTHEST) * filters.temperature
    ids, values = _gather(logits, np.maximum(bound, farthest), padding=-np.inf)
    sums = _scores(values, largest, filters.temperature) + gumbels(noise_words(ids, filters.keys))
    each, place = np.arange(len(ids)), sums.argmax(axis=-1)
    chosen: IndexArray = ids[each, place]
    best: DoubleArray = sums[each, place]
    left = np.flatnonzero(bound > farthest)
    if len(left):
        least = best[left] - (bound[left] - largest[left]) / filters.temperature[left]
        _look_at_lucky(chosen, best, left, least, logits, largest, filters)
    return chosen


def _look_at_lucky(
    chosen: IndexArray,
    best: DoubleArray,
    rows: IndexArray,
    least: DoubleArray,
    logits: FloatArray,
    largest: FloatArray,
    filters: Filters,
) -> None:
    """Put into ``chosen`` the tokens of ``rows`` with noise of ``least`` [len(rows)] or more whose sum is above the row's ``best``."""
    limits = word_bounds(least)
    found = [
        _lucky(logits.shape[1], filters.keys.take(slice(row, row + 1)), limit)
        for row, limit in zip(rows.tolist(), limits, strict=True)
    ]
    ids, words = (np.concatenate(parts) for parts in zip(*found, strict=True))
    row = np.repeat(rows, [len(some) for some, _ in found])
    scores = _scores(logits[row, ids][:, None], largest[row], filters.temperature[row])[:, 0]
    sums = scores + gumbels(words)
    better = np.flatnonzero(sums > best[row])
    for place in better[np.argsort(sums[better])].tolist():  # the best of a row comes last
        chosen[row[place]] = ids[place]


def _lucky(size: int, keys: NoiseKeys, limit: np.uint32) -> tuple[IndexArray, WordArray]:
    """Ids below ``size`` whose words are at most ``limit``, and those words."""
    ids, found = [], []
    for start in range(0, size, CHUNK):
        words = noise_words(np.arange(start, min(start + CHUNK, size), dtype=np.uint32), keys)[0]
        places = np.flatnonzero(words <= limit)
        ids.append(places + start)
        found.append(words[places])
    return np.concatenate(ids), np.concatenate(found)


def _best_of_few(
    ids: IndexArray, scores: FloatArray, kept: npt.NDArray[np.bool_], keys: NoiseKeys
) -> IndexArray:
    """[n] of the ids [n, m] that are kept, those with the largest sum of score and noise."""
    sums = np.where(kept, scores + gumbels(noise_words(ids, keys)), -np.inf)
    chosen: IndexArray = ids[np.arange(len(ids)), sums.argmax(axis=-1)]
    return chosen


def _nucleus_of_row(weights: FloatArray, wanted: float) -> np.float32:
    """As ``_nucleus``, without sorting the row: sums of buckets of nearly equal weights first, then only the bucket in which the
    nucleus ends is sorted. The upper bits of a positive float are such a bucket, and rise with it."""
    buckets = weights.view(np.uint32) >> BUCKET_SHIFT
    sums = np.bincount(buckets, weights=weights)[::-1].cumsum()
    place = int(np.searchsorted(sums, wanted))
    if place == len(sums):  # by the last bits of a sum, all is not enough
        return np.float32(weights.min())
    before = sums[place - 1] if place else 0.0
    inside = np.sort(weights[buckets == len(sums) - 1 - place])[::-1]
    reached = before + inside.cumsum(dtype=np.float64)
    last: np.float32 = inside[min(int(np.searchsorted(reached, wanted)), len(inside) - 1)]
    return last


def _rank_bound(values: FloatArray, ranks: IndexArray) -> FloatArray:
    """[n] bounds that at least ``ranks[r]`` values of row ``r`` reach, and hardly more; minus infinity for rank 0."""
    rows, size = values.shape
    depth = max(1, size // max(COLUMNS, COLUMNS_PER_RANK * int(ranks.max())))
    columns = size // depth
    maxima = values[:, : columns * depth].reshape(rows, depth, columns).max(axis=1)
    if columns * depth < size:
        maxima = np.concatenate((maxima, values[:, columns * depth :]), axis=1)
    return _ranked(np.sort(maxima, axis=-1), ranks)


def _min_p_bound(largest: FloatArray, filters: Filters) -> FloatArray:
    """[n] logits below which ``min_p`` keeps nothing; minus infinity where ``top_p`` must see those as well."""
    bound = np.full(len(largest), -np.inf, dtype=np.float32)
    rows = np.flatnonzero((filters.min_p > 0.0) & (filters.top_p >= 1.0))
    distance = filters.temperature[rows] * (np.log(filters.min_p[rows]) - np.float32(BOUND_SLACK))
    bound[rows] = largest[rows] + distance
    return bound


def _ranked(rising: FloatArray, ranks: IndexArray) -> FloatArray:
    """[n] the ``ranks[r]``-th largest of row ``r`` of ``rising``; minus infinity for rank 0 and beyond the row's length."""
    width = rising.shape[1]
    found: FloatArray = rising[np.arange(len(rising)), np.clip(width - ranks, 0, width - 1)]
    found[(ranks == 0) | (ranks > width)] = -np.inf
    return found


def _gather(values: FloatArray, bound: FloatArray, padding: float) -> tuple[IndexArray, FloatArray]:
    """Places and values of what reaches its row's bound, [n, most], in the rows' order; shorter rows end in ``padding``."""
    rows, size = values.shape
    flat = np.flatnonzero(values >= bound[:, None])
    row = flat // size
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.zeros((rows, int(counts.max())), dtype=np.int64)
    ids[row, place] = flat - row * size
    found = np.full(ids.shape, padding, dtype=np.float32)
    found[row, place] = values.reshape(-1)[flat]
    return ids, found


def _scores(values: FloatArray, largest: FloatArray, temperature: FloatArray) -> FloatArray:
    """Natural logarithms of the tokens' weights, the likeliest's being 0. Subtracted before the division, so that a tiny temperature
    gives minus infinity and never infinity."""
    scores: FloatArray = values - largest[:, None]
    with np.errstate(over="ignore"):
        scores /= temperature[:, None]
    return scores


def _nucleus(
    falling: FloatArray, sums: DoubleArray, wanted: DoubleArray
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """[n] the least weight of the smallest set of likeliest whose sum reaches ``wanted``, and whether these are enough for it.

    ``sums`` are the running sums of ``falling``, so that how many smaller ones follow changes nothing.
    """
    place = (sums < wanted[:, None]).sum(axis=-1)
    reached = place < falling.shape[1]
    return falling[np.arange(len(falling)), np.minimum(place, falling.shape[1] - 1)], reached
