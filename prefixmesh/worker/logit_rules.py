"""What a request's sampling does to its logits before a token is chosen: penalties, biases, ids that may not come yet.

Every rule is a scatter at the places it changes, and rows without rules are not looked at. What penalties must know of the tokens
so far is in a ``TokenTally``, which says what the tokens say: a preempted or resumed request is treated as if nothing had happened.
In this order:

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
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.token_tally import TokenTally


class RuledRow(NamedTuple):
    """One row of the logits that a rule changes."""

    row: int
    sampling: EngineSampling
    answer_tokens: int
    """Tokens of the answer so far."""

    tally: TokenTally | None = None
    """Of all tokens so far; needed where ``sampling.has_penalties``."""

    grammar: AnswerGrammar | None = None

    @property
    def may_not_stop(self) -> bool:
        """Whether ids that end the answer may not come yet."""
        return self.answer_tokens < self.sampling.min_tokens

    @property
    def counted(self) -> TokenTally:
        """``tally``, which must be there."""
        assert self.tally is not None
        return self.tally


@torch.inference_mode()
def apply_rules(logits: torch.Tensor, rows: Sequence[RuledRow]) -> dict[int, str]:
    """Change contiguous ``logits`` [R, vocab] in place; by row, what went wrong with its grammar.

    O(different ids of the rows' tokens), and O(vocab) for each row with a grammar.
    """
    _penalise_repetition(logits, [row for row in rows if row.sampling.repetition_penalty != 1.0])
    _penalise_answer(
        logits, [row for row in rows if row.sampling.frequency_penalty or row.sampling.presence_penalty]
    )
    _add_bias(logits, [row for row in rows if row.sampling.bias_ids])
    _forbid_stops(logits, [row for row in rows if row.may_not_stop and row.grammar is None])
    return _follow_grammars(logits, [row for row in rows if row.grammar is not None])


class _Places:
    """Places of the logits to read and write: ``ids[i]`` in the i-th row. An id may occur again with the same value."""

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[RuledRow], ids: Sequence[npt.NDArray[np.integer]]
    ) -> None:
        self._sizes = [len(some) for some in ids]
        self._flat = logits.view(-1)
        starts = np.repeat(np.array([row.row for row in rows], dtype=np.int64) * logits.shape[1], self._sizes)
        self._places = torch.from_numpy(starts + np.concatenate(ids)).to(logits.device)

    def spread(self, values: Iterable[float]) -> torch.Tensor:
        """One value of each row, at each of its places."""
        return self.tensor(np.repeat(np.array(list(values), dtype=np.float32), self._sizes))

    def tensor(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        """A value for each place, on the logits' device."""
        return torch.from_numpy(values).to(self._flat.device)

    def read(self) -> torch.Tensor:
        """What stands at the places."""
        return self._flat.index_select(0, self._places)

    def write(self, values: torch.Tensor) -> None:
        """Put a value at each place."""
        self._flat.index_copy_(0, self._places, values)

    def fill(self, value: float) -> None:
        """Put one value at all places."""
        self._flat.index_fill_(0, self._places, value)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    # Prompt and answer, one after the other: what stands in both is computed twice, to the same value.
    ids = [some for row in rows for some in (row.counted.prompt_ids(), row.counted.answer_ids)]
    places = _Places(logits, [row for row in rows for _ in range(2)], ids)
    penalty = places.spread(row.sampling.repetition_penalty for row in rows for _ in range(2))
    values = places.read()
    places.write(torch.where(values > 0, values / penalty, values * penalty))


def _penalise_answer(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    places = _Places(logits, rows, [row.counted.answer_ids for row in rows])
    counts = places.tensor(np.concatenate([row.counted.answer_counts for row in rows]))
    often = places.spread(row.sampling.frequency_penalty for row in rows)
    once = places.spread(row.sampling.presence_penalty for row in rows)
    places.write(places.read() - (often * counts + once))


def _add_bias(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    places = _Places(logits, rows, [np.array(row.sampling.bias_ids) for row in rows])
    biases = np.concatenate([np.array(row.sampling.biases, dtype=np.float32) for row in rows])
    places.write(places.read() + places.tensor(biases))


def _forbid_stops(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    if not rows:
        return
    stops = [np.array(row.sampling.stop_token_ids, dtype=np.int64) for row in rows]
    _Places(logits, rows, [some[some < logits.shape[1]] for some in stops]).fill(-math.inf)


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
