"""From what an index answers to what a decision reads: matched tokens, a column over the workers. Pure.

An index knows workers as *slots* and answers with sets of them (``block_index.Matches``); a decision knows *rows* (``fleet_columns``). A
slot that has no row, such as one that a snapshot is being loaded into, counts for nobody.
"""

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixmesh.router.block_index import Fall, Matches
from prefixmesh.router.measured_rates import Column

FEW_SLOTS: Final = 12
"""Up to so many slots are looked at one by one; more are unpacked as a whole, which takes as long as so many."""

_FIRST_SLOTS: Final = 128


class MatchedTokens(NamedTuple):
    """Leading prompt tokens that workers are believed to hold, by row."""

    device: Column
    total: Column
    """On either tier: the same array where nobody would have to load anything back."""

    unit: int = 1
    """All are whole multiples of this."""

    most: int = sys.maxsize
    """None is more."""

    chains: npt.NDArray[np.int8] | None = None
    """Of a request that may live in several places, under which of its chains each worker has so many; None of all others."""

    def chain(self, row: int) -> int:
        """The number of the chain under which a worker has them."""
        return 0 if self.chains is None else int(self.chains[row])


class SlotRows:
    """Which row a slot of the index belongs to. Not thread-safe."""

    def __init__(self) -> None:
        self._rows = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._by_slot: list[int] = self._rows.tolist()
        self._bound = 0
        """A bit for every slot that has a row."""

    def bind(self, slot: int, row: int) -> None:
        """A slot is a row's from now on. O(1), but for doubling."""
        while slot >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._by_slot = self._rows.tolist()
        self._rows[slot] = self._by_slot[slot] = row
        self._bound |= 1 << slot

    def unbind(self, slot: int) -> None:
        """A slot is nobody's. Not bound: nothing happens. O(1)."""
        self._bound &= ~(1 << slot)

    def spread(self, matches: Matches, block_size: int, rows: int) -> MatchedTokens:
        """Columns of ``rows`` rows; what stands in rows that have no slot means nothing. O(rows + falls + slots in them)."""
        device = self._column(matches.device, block_size, rows)
        is_same = matches.total == matches.device
        total = device if is_same else self._column(matches.total, block_size, rows)
        # Falls come in the order of depth.
        most = matches.total[-1].blocks * block_size if matches.total else 0
        return MatchedTokens(device, total, block_size, most)

    def _column(self, falls: list[Fall], block_size: int, rows: int) -> Column:
        column = np.zeros(rows)
        # Mostly many workers leave a walk together: at the end of a system prompt. All but the others is quicker than each of them.
        common, most = None, FEW_SLOTS
        for fall in falls:
            if (size := fall.slots.bit_count()) > most:
                common, most = fall, size
        if common is not None:
            column.fill(common.blocks * block_size)
            self._put(column, self._bound & ~common.slots, 0)
        for fall in falls:
            if fall is not common:
                self._put(column, fall.slots & self._bound, fall.blocks * block_size)
        return column

    def _put(self, column: Column, slots: int, tokens: int) -> None:
        if slots.bit_count() > FEW_SLOTS:
            column[self._rows[_positions(slots)]] = tokens
            return
        by_slot = self._by_slot
        while slots:
            lowest = slots & -slots
            column[by_slot[lowest.bit_length() - 1]] = tokens
            slots ^= lowest


def best_of(plain: MatchedTokens, public: Sequence[MatchedTokens]) -> MatchedTokens:
    """For each worker the chain of which it has most, on both tiers together: one of ``public``, of equal ones the first, or, where that is
    more, ``plain``, which has number 0. At least one is public. O(rows) each."""
    first = public[0]
    device, total = first.device, first.total
    chains = np.ones(len(total), dtype=np.int8)
    others = [*enumerate(public[1:], 2), (0, plain)]
    for number, other in others:
        is_more = other.total > total
        if is_more.any():
            is_same = device is total and other.device is other.total
            total = np.where(is_more, other.total, total)
            device = total if is_same else np.where(is_more, other.device, device)
            chains[is_more] = number
    most = max(plain.most, *(one.most for one in public))
    return MatchedTokens(device, total, first.unit, most, chains)


def _positions(mask: int) -> npt.NDArray[np.int64]:
    """The positions of a mask's bits."""
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
