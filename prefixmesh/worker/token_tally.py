"""Which ids stand in a request's tokens, and how often in its answer: what penalties ask in every step. Pure.

Looking through a prompt of thousands of tokens for every token of the answer would cost more than the choice itself. A tally looks at
each token once, when it is first asked after that token came. It keeps nothing that the tokens do not say: a request that is
preempted goes on with it, one that is resumed elsewhere makes another, and both give the same penalties.
"""

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from prefixmesh.worker.batch_plan import IntArray

_Array = TypeVar("_Array", IntArray, npt.NDArray[np.float32])

_FIRST_ROOM: Final = 64
"""Ids of an answer for which there is room at first; doubled when it is full."""


class TokenTally:
    """Counts ``ids``, a request's own array that grows in place; its first ``prompt_tokens`` are the prompt."""

    def __init__(self, ids: IntArray, prompt_tokens: int) -> None:
        self._ids = ids
        self._prompt_tokens = prompt_tokens
        self._counted = prompt_tokens
        self._prompt_ids: IntArray | None = None
        """Each id of the prompt once, rising; only made when it is asked for."""

        self._answer_ids = np.empty(_FIRST_ROOM, dtype=np.int32)
        self._answer_counts = np.zeros(_FIRST_ROOM, dtype=np.float32)
        self._place: dict[int, int] = {}

    def catch_up(self, length: int) -> None:
        """Count the tokens up to ``length``, which never falls. O(new tokens)."""
        for token_id in self._ids[self._counted : length].tolist():
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._answer_ids):
                self._answer_ids = _doubled(self._answer_ids)
                self._answer_counts = _doubled(self._answer_counts)
            self._answer_ids[place] = token_id
            self._answer_counts[place] += 1.0
        self._counted = length

    @property
    def answer_ids(self) -> IntArray:
        """Each id of the answer once, in the order of their coming."""
        return self._answer_ids[: len(self._place)]

    @property
    def answer_counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``answer_ids`` stands in the answer."""
        return self._answer_counts[: len(self._place)]

    def prompt_ids(self) -> IntArray:
        """Each id of the prompt once. O(prompt) the first time."""
        if self._prompt_ids is None:
            self._prompt_ids = np.unique(self._ids[: self._prompt_tokens])
        return self._prompt_ids


def _doubled(array: _Array) -> _Array:
    return np.concatenate((array, np.zeros_like(array)))
