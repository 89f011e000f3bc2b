"""Batch plans by hand, and a driver that runs whole answers through a ``ModelRunner`` without scheduler or cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.runner import ModelRunner


@dataclass(kw_only=True, slots=True)
class PagedSequence:
    """A sequence with its page table."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the pool."""

    adapter_slot: int = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute the next ``count`` tokens of a sequence."""

    sequence: PagedSequence
    count: int
    wants_logits: bool = True


def make_plan(pieces: Sequence[Piece], page_size: int) -> BatchPlan:
    """The plan of one step; the sequences' pages must be there already."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    indices: list[int] = []
    last: list[int] = []
    wanted: list[int] = []
    qo, kv = [0], [0]
    for piece in pieces:
        sequence = piece.sequence
        end = sequence.computed + piece.count
        pages = sequence.pages[: -(-end // page_size)]
        for position in range(sequence.computed, end):
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(pages[position // page_size] * page_size + position % page_size)
        indices += pages
        qo.append(len(tokens))
        kv.append(len(indices))
        last.append((end - 1) % page_size + 1)
        if piece.wants_logits:
            wanted.append(len(tokens) - 1)
    plan = BatchPlan(
        *(np.array(x, dtype=np.int32) for x in (tokens, positions, slots, qo, kv, indices, last, wanted))
    )
    adapters = np.array([piece.sequence.adapter_slot for piece in pieces], dtype=np.int32)
    return replace(plan, adapter_slots=adapters) if (adapters >= 0).any() else plan


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer and the logits that chose each token."""

    tokens: list[int]
    logits: torch.Tensor
    """[len(tokens), vocab_size] float32"""


class GreedyDriver:
    """Runs greedy answers on pages handed out in a shuffled order, so that no test passes because pages are contiguous."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._runner = runner
        self._page_size = runner.pool.page_size
        order: npt.NDArray[np.int64] = np.random.default_rng(seed).permutation(runner.pool.num_pages)
        self._free = [int(page) for page in order]

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        chunk: int = 0,
        warm_share: float = 0.0,
        shared_tokens: int = 0,
        adapter_slots: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Answer ``prompts`` as one batch.

        ``chunk`` limits the prompt tokens of a sequence in a step (0: no limit). ``warm_share`` of each prompt, in whole pages,
        is computed first by an earlier sequence whose pages are then shared, as a prefix cache would. With ``shared_tokens`` (whole
        pages) all prompts begin with so many equal ones, and take the pages of one earlier sequence. ``adapter_slots`` says with
        which adapter each is answered; none with the base model.
        """
        slots = [-1] * len(prompts) if adapter_slots is None else adapter_slots
        sequences = [
            PagedSequence(tokens=list(prompt), adapter_slot=slot)
            for prompt, slot in zip(prompts, slots, strict=True)
        ]
        if shared_tokens:
            earlier = PagedSequence(tokens=list(prompts[0][:shared_tokens]))
            self._step([Piece(earlier, shared_tokens, wants_logits=False)])
            for sequence in sequences:
                assert sequence.tokens[:shared_tokens] == earlier.tokens
                sequence.pages, sequence.computed = list(earlier.pages), shared_tokens
        if warm_share:
            sequences = self._warmed(sequences, warm_share)
        logits = self._prefill(sequences, chunk)
        kept: list[list[torch.Tensor]] = [[] for _ in sequences]
        for step in range(new_tokens):
            for sequence, row, rows in zip(sequences, logits, kept, strict=True):
                rows.append(row)
                sequence.tokens.append(int(row.argmax()))
            if step + 1 < new_tokens:
                logits = list(self._step([Piece(sequence, 1) for sequence in sequences]))
        self._release(sequences)
        return [
            Answer(sequence.tokens[-new_tokens:], torch.stack(rows))
            for sequence, rows in zip(sequences, kept, strict=True)
        ]

    def _warmed(self, sequences: list[PagedSequence], share: float) -> list[PagedSequence]:
        """Compute the shared part as sequences of their own, then hand their pages to new ones."""
        warmed = []
        for sequence in sequences:
            pages = int((len(sequence.tokens) - 1) * share) // self._page_size
            shared = pages * self._page_size
            if shared:
                slot = sequence.adapter_slot
                earlier = PagedSequence(tokens=sequence.tokens[:shared], adapter_slot=slot)
                self._step([Piece(earlier, shared, wants_logits=False)])
                sequence = PagedSequence(
                    tokens=sequence.tokens, pages=list(earlier.pages), computed=shared, adapter_slot=slot
                )
            warmed.append(sequence)
        return warmed

    def _prefill(self, sequences: list[PagedSequence], chunk: int) -> list[torch.Tensor]:
        """Compute all prompts; sequences that are done early wait. Returns each one's last logits."""
        logits: dict[int, torch.Tensor] = {}
        while len(logits) < len(sequences):
            pieces, owners = [], []
            for index, sequence in enumerate(sequences):
                left = len(sequence.tokens) - sequence.computed
                count = min(left, chunk) if chunk else left
                if count:
                    pieces.append(Piece(sequence, count, wants_logits=count == left))
                    if count == left:
                        owners.append(index)
            logits |= dict(zip(owners, self._step(pieces), strict=True))
        return [logits[index] for index in range(len(sequences))]

    def _step(self, pieces: list[Piece]) -> torch.Tensor:
        for piece in pieces:
            sequence = piece.sequence
            needed = -(-(sequence.computed + piece.count) // self._page_size)
            while len(sequence.pages) < needed:
                sequence.pages.append(self._free.pop())
        logits = self._runner.forward(make_plan(pieces, self._page_size)).clone()  # valid until the next step
        for piece in pieces:
            piece.sequence.computed += piece.count
        return logits

    def _release(self, sequences: list[PagedSequence]) -> None:
        self._free += dict.fromkeys(page for sequence in sequences for page in sequence.pages)
