"""Prompts that share what a workload's blocks say, for ``prefixmesh bench serve``. Pure.

Each id becomes its own tokens, always the same for one seed, so that equal blocks are equal tokens and another seed finds nothing cached of
the one before. An answer is whatever the model says: once it is there, the blocks that a workload calls an answer's are made of its
tokens, so that the next turn is found as a real one is. A block that was asked for before its answer came stays what it was made of.
"""

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixmesh.errors import ConfigError
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.tokens import TOKEN_BYTES, pack

FIRST_ID: Final = 100
"""Below stand the special tokens of most vocabularies."""

DEFAULT_IDS: Final = 500
"""Ids are below this, unless said otherwise: every vocabulary has so many."""

MAX_ANSWER_BLOCKS: Final = 1 << 16
"""Blocks of answers that are kept for turns to come, some 20 MB at 64 tokens; the oldest is made up where it is asked for later."""

_UNNAMED: Final = 1 << 62
"""The rest of a prompt that fills no block has no id of the workload's: it gets one beyond them all, by the request's number."""


class PromptMaker:
    """Makes the prompts of one run."""

    def __init__(
        self,
        block_size: int,
        seed: int,
        ids: int = DEFAULT_IDS,
        *,
        most_answer_blocks: int = MAX_ANSWER_BLOCKS,
    ) -> None:
        """Raises ConfigError for a vocabulary that is too small to tell blocks apart."""
        if not FIRST_ID + 2 <= ids <= 1 << 32:
            raise ConfigError(f"ids must be from {FIRST_ID + 2} to {1 << 32}, got {ids}")
        self._block_size = block_size
        self._salt = _scramble(np.array([seed & (1 << 64) - 1], dtype=np.uint64))[0]
        self._span = np.uint64(ids - FIRST_ID)
        self._most = most_answer_blocks
        self._answers: OrderedDict[int, bytes] = OrderedDict()
        self._made: set[int] = set()

    def prompt(self, number: int, request: WorkloadRequest) -> bytes:
        """Packed ids of a request, as many as its ``input_length``. O(input_length)."""
        named = list(request.block_ids)
        if len(named) * self._block_size < request.input_length:
            named.append(_UNNAMED + number)
        return b"".join(map(self._block, named))[: request.input_length * TOKEN_BYTES]

    def answered(self, request: WorkloadRequest, prompt: bytes, answer: bytes) -> None:
        """A request has its answer: the blocks that it fills beyond the prompt's are known from now on. O(answer)."""
        size = self._block_size * TOKEN_BYTES
        told = prompt + answer
        start = request.input_length // self._block_size * size
        for place, block in enumerate(request.answer_ids):
            tokens = told[start + place * size : start + (place + 1) * size]
            if len(tokens) == size and block not in self._made:
                self._answers[block] = tokens
        while len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def _block(self, block: int) -> bytes:
        known = self._answers.get(block)
        if known is not None:
            return known
        if block < _UNNAMED:
            self._made.add(block)
        places = np.arange(self._block_size, dtype=np.uint64)
        start = _scramble(np.array([block], dtype=np.uint64) + self._salt)
        return pack(_scramble(start + places) % self._span + np.uint64(FIRST_ID))


def first_of(workload: Workload, requests: int) -> Workload:
    """Its first so many: whoever comes after another comes after one of them. O(requests)."""
    return Workload(name=workload.name, block_size=workload.block_size, requests=workload.requests[:requests])


def shortened(workload: Workload, block_tokens: int) -> Workload:
    """The same workload with blocks of fewer tokens: shares stay as they are, lengths shrink with the blocks. For models and machines that
    cannot take prompts as long as a trace's. O(requests). Raises ConfigError where blocks would not become smaller."""
    before = workload.block_size
    if not 2 <= block_tokens < before:
        raise ConfigError(f"block_tokens must be from 2 to {before - 1}, got {block_tokens}")

    def length(tokens: int) -> int:
        whole, rest = divmod(tokens, before)
        return whole * block_tokens + (max(1, rest * block_tokens // before) if rest else 0)

    def shorter(one: WorkloadRequest) -> WorkloadRequest:
        asked, together = length(one.input_length), length(one.input_length + one.output_length)
        return WorkloadRequest(
            arrival_ms=one.arrival_ms,
            after=one.after,
            pause_ms=one.pause_ms,
            input_length=asked,
            output_length=together - asked,
            block_ids=one.block_ids,
            answer_ids=one.answer_ids,
            tenant=one.tenant,
            adapter=one.adapter,
            pin_tokens=min(asked, length(one.pin_tokens)),
            pin_replicas=one.pin_replicas,
        )

    return Workload(
        name=workload.name, block_size=block_tokens, requests=[shorter(one) for one in workload.requests]
    )


def _scramble(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele and others, 2014), as the traces' prompts use it."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
