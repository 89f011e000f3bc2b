"""When a worker lacks what another one holds: copying that instead of computing it, where it is quicker. Pure.

For a worker that would find ``m`` tokens of a prompt cached, and the best of those whose KV lies alike, which holds ``h`` of them::

    least(prefill(m .. n), COPY_BEGIN_MS + copy_ms_per_token * (h - m) + prefill(h .. n))

The copy is the request's own time: it is spared the worker's arithmetic, and so the others there. What it costs the holder, a part of some
MiB between two of its steps, is not counted.
"""

from typing import Final, NamedTuple

import numpy as np

from prefixmesh.router.copy_columns import CopyColumns
from prefixmesh.router.measured_rates import Column, RateColumns

COPY_BEGIN_MS: Final = 10.0
"""What a copy takes however small it is: a call to another worker, a match there and one here, and the wait for a step's end on both
sides. A prefix that is computed in less is not worth a copy."""

_NOTHING: Final = np.array(0.0)
_BEGIN_MS: Final = np.array(COPY_BEGIN_MS)


class Copying(NamedTuple):
    """Copies that are quicker than to compute, by row; at least one is."""

    tokens: Column
    """What is copied; 0 in rows where nothing is."""

    copy_ms: Column
    prefill_ms: Column
    """Of what is left to compute then; of everything, in the other rows."""


def by_copying(
    copies: CopyColumns,
    rates: RateColumns,
    held: Column,
    counted: Column,
    prefill_ms: Column,
    prompt_tokens: int,
) -> Copying | None:
    """Where a copy is quicker; None where it nowhere is. O(rows), for each layout.

    Args:
        copies: who can copy from whom.
        rates: of prefill.
        held: tokens of the prompt that a worker can give, on whatever tier.
        counted: those that it finds cached itself.
        prefill_ms: of the rest of the prompt.
        prompt_tokens: of the whole prompt.
    """
    best = _best_held(copies, held)
    missing = best - counted
    if missing.max() <= _NOTHING:
        return None
    np.maximum(missing, _NOTHING, out=missing)
    rest_ms = best + prompt_tokens
    rest_ms *= rates.quadratic
    rest_ms += rates.linear
    rest_ms *= prompt_tokens - best
    copy_ms = copies.cost_per_token * missing
    copy_ms += _BEGIN_MS
    is_quicker = copy_ms + rest_ms < prefill_ms
    if not is_quicker.any():
        return None
    return Copying(missing * is_quicker, copy_ms * is_quicker, np.where(is_quicker, rest_ms, prefill_ms))


def _best_held(copies: CopyColumns, held: Column) -> Column:
    """The most that anybody can give whose KV lies like a row's own; of no dimension where that is one for all. O(rows), for each layout."""
    given = held * copies.given_share
    if copies.has_one_layout:
        most: Column = np.array(given.max())
        return most
    best = np.zeros(len(held))
    for layout in np.unique(copies.layout):
        alike = copies.layout == layout
        best[alike] = given[alike].max()
    return best
