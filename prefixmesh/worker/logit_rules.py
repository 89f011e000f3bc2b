"""What a request's sampling does to its logits before a token is chosen: penalties, biases, ids that may not come yet.

Every rule is a scatter at the places it changes, computed from the request's tokens as they stand: there is no state to carry,
so a preempted or resumed request is treated as if nothing had happened, and rows without rules are not looked at. In this order:

1. the repetition penalty, over prompt and answer (as Hugging Face does): positive logits are divided, negative multiplied;
2. frequency and presence penalties, over the answer alone (as OpenAI and vLLM do); ``resumed_output`` is answer;
3. ``logit_bias``, which so always shifts by what it says;
4. ``min_tokens``: ids that would end the answer are minus infinity;
5. the grammar: so is what it does not allow. Where it allows nothing but the end, the answer ends, whatever ``min_tokens`` says.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.batch_plan import IntArray
from prefixmesh.worker.messages import EngineSampling


class RuledRow(NamedTuple):
    """One row of the logits that a rule changes."""

    row: int
    sampling: EngineSampling
    ids: IntArray
    """Prompt and answer so far."""

    prompt_tokens: int
    grammar: AnswerGrammar | None = None

    @property
    def may_not_stop(self) -> bool:
        """Whether ids that end the answer may not come yet."""
        return len(self.ids) - self.prompt_tokens < self.sampling.min_tokens

    @property
    def answer(self) -> IntArray:
        """The ids of the answer so far."""
        return self.ids[self.prompt_tokens :]


@torch.inference_mode()
def apply_rules(logits: torch.Tensor, rows: Sequence[RuledRow]) -> dict[int, str]:
    """Change ``logits`` [R, vocab] in place; by row, what went wrong with its grammar.

    O(tokens of the rows), and O(vocab) for each row with a grammar or a penalty over the answer.
    """
    _penalise_repetition(logits, [row for row in rows if row.sampling.repetition_penalty != 1.0])
    _penalise_answer(
        logits, [row for row in rows if row.sampling.frequency_penalty or row.sampling.presence_penalty]
    )
    _add_bias(logits, [row for row in rows if row.sampling.bias_ids])
    _forbid_stops(logits, [row for row in rows if row.may_not_stop and row.grammar is None])
    return _follow_grammars(logits, [row for row in rows if row.grammar is not None])


class _Places:
    """(row, id) pairs to change: ``sizes[i]`` ids for the i-th row. An id may occur again: it is given the same value."""

    def __init__(
        self, rows: Sequence[RuledRow], ids: Sequence[npt.NDArray[np.integer]], device: torch.device
    ) -> None:
        self._sizes = [len(some) for some in ids]
        self._device = device
        self.rows = self.spread(np.array([row.row for row in rows], dtype=np.int64))
        self.order = self.spread(np.arange(len(rows), dtype=np.int64))
        """The row's place among ``rows``."""

        self.ids = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)

    def spread(self, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
        """One value of each row, at each of its places."""
        return torch.from_numpy(np.repeat(values, self._sizes)).to(self._device)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    places = _Places(rows, [row.ids for row in rows], logits.device)
    penalty = places.spread(_floats(row.sampling.repetition_penalty for row in rows))
    values = logits[places.rows, places.ids]
    logits[places.rows, places.ids] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_answer(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    places = _Places(rows, [row.answer for row in rows], logits.device)
    counts = logits.new_zeros((len(rows), logits.shape[1]))
    ones = counts.new_ones(len(places.ids))
    counts.index_put_((places.order, places.ids), ones, accumulate=True)
    often = places.spread(_floats(row.sampling.frequency_penalty for row in rows))
    once = places.spread(_floats(row.sampling.presence_penalty for row in rows))
    values = logits[places.rows, places.ids]
    logits[places.rows, places.ids] = values - (often * counts[places.order, places.ids] + once)


def _add_bias(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    places = _Places(rows, [np.array(row.sampling.bias_ids) for row in rows], logits.device)
    biases = np.concatenate([np.array(row.sampling.biases, dtype=np.float32) for row in rows])
    logits[places.rows, places.ids] += torch.from_numpy(biases).to(logits.device)


def _forbid_stops(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    stops = [np.array(row.sampling.stop_token_ids, dtype=np.int64) for row in rows]
    places = _Places(rows, [some[some < logits.shape[1]] for some in stops], logits.device)
    logits[places.rows, places.ids] = -math.inf


def _follow_grammars(logits: torch.Tensor, rows: Sequence[RuledRow]) -> dict[int, str]:
    if not rows:
        return {}
    failures = {}
    allowed = np.zeros((len(rows), logits.shape[1]), dtype=np.bool_)
    for place, row in enumerate(rows):
        assert row.grammar is not None
        mask = np.zeros(row.grammar.mask_words, dtype=np.int32)
        row.grammar.fill(mask)
        if row.grammar.error:
            failures[row.row] = f"the grammar cannot go on: {row.grammar.error}"
        bits = np.unpackbits(mask.astype("<i4", copy=False).view(np.uint8), bitorder="little")
        allowed[place, : len(bits)] = bits[: logits.shape[1]]
        if row.may_not_stop:
            _clear_stops(allowed[place], row.sampling.stop_token_ids)
    places = torch.tensor([row.row for row in rows], device=logits.device)
    forbidden = torch.from_numpy(~allowed).to(logits.device)
    logits[places] = logits[places].masked_fill_(forbidden, -math.inf)
    return failures


def _clear_stops(allowed: npt.NDArray[np.bool_], stop_token_ids: Sequence[int]) -> None:
    """Take the stops out of what is allowed, unless nothing else is."""
    stops = np.array(stop_token_ids, dtype=np.int64)
    stops = stops[stops < len(allowed)]
    if np.count_nonzero(allowed) > np.count_nonzero(allowed[np.unique(stops)]):
        allowed[stops] = False


def _floats(values: Iterable[float]) -> npt.NDArray[np.float32]:
    return np.array(list(values), dtype=np.float32)
