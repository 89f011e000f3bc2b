"""How far the logits of one position depend on how it was computed: alone or among others, in chunks, behind a hit, in a cascade.

Products round by their shapes, and attention by its order, so the same token's logits are the same only up to the arithmetic. Each
*way* of computing is a list of steps over the same sequences; the reference computes every sequence whole, alone. In float32 the
difference does not show; in bfloat16 it is what ``BFLOAT16_MARGIN`` bounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.worker.batch_plan import BatchPlan, IntArray

FloatArray = npt.NDArray[np.float32]

BFLOAT16_MARGIN: Final = 0.75
"""Where the best two logits of SmolLM2-135M in bfloat16 differ by more, the best is the same however it was computed. Half as much again
as any distance of best two was seen to change (0.5); the measurement is in ``docs/sampling.md``. The same for what is drawn from all
tokens, and the distance that ``worker.sampling.margins`` tells."""

FLOAT32_MARGIN: Final = 1e-3
"""As ``BFLOAT16_MARGIN``, in float32."""


class Run(NamedTuple):
    """Tokens ``seen`` to ``seen + new`` of one sequence, computed in a step."""

    sequence: int
    seen: int
    new: int


Way = Iterator[list[Run]]
"""The steps, in order."""


class Runner(Protocol):
    """What computes a plan."""

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Logits of the plan's ``logit_rows``."""
        ...


@dataclass(frozen=True, slots=True)
class Texts:
    """``n`` sequences of the same length and the slots of a pool (of page size 1) that are theirs."""

    ids: IntArray
    """[n, length]"""

    slots: IntArray
    """[n, length]; equal where sequences share their KV."""

    last: int
    """How many positions at the end are compared."""

    @property
    def length(self) -> int:
        """Tokens of each."""
        return int(self.ids.shape[1])

    @classmethod
    def of(cls, ids: IntArray, last: int, shared: int = 0) -> "Texts":
        """Slots of their own for all, but the first ``shared``, which are the first sequence's; so must be the tokens."""
        slots = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
        slots[:, :shared] = slots[0, :shared]
        return cls(ids, slots, last)


def whole(texts: Texts) -> Way:
    """Every sequence alone, in one step: the reference."""
    for sequence in range(len(texts.ids)):
        yield [Run(sequence, 0, texts.length)]


def chunked(texts: Texts, chunk: int = 96) -> Way:
    """Every sequence alone, in chunks."""
    for sequence in range(len(texts.ids)):
        for seen in range(0, texts.length, chunk):
            yield [Run(sequence, seen, min(chunk, texts.length - seen))]


def behind_a_hit(texts: Texts) -> Way:
    """Every sequence alone, behind a prefix that was computed before."""
    cut = texts.length - 2 * texts.last
    for sequence in range(len(texts.ids)):
        yield [Run(sequence, 0, cut)]
        yield [Run(sequence, cut, texts.length - cut)]


def decoded_alone(texts: Texts) -> Way:
    """Every sequence alone, its last positions one by one."""
    start = texts.length - texts.last
    for sequence in range(len(texts.ids)):
        yield [Run(sequence, 0, start)]
        for seen in range(start, texts.length):
            yield [Run(sequence, seen, 1)]


def decoded_together(texts: Texts) -> Way:
    """All sequences' last positions one by one, in one batch."""
    start = texts.length - texts.last
    for sequence in range(len(texts.ids)):
        yield [Run(sequence, 0, start)]
    for seen in range(start, texts.length):
        yield [Run(sequence, seen, 1) for sequence in range(len(texts.ids))]


def shared_prefix(texts: Texts) -> Way:
    """As ``decoded_together``, and what sequences share is computed once: with slots in common, a cascade reads it once too."""
    start = texts.length - texts.last
    shared = int((texts.slots == texts.slots[0]).all(axis=0).sum())
    yield [Run(0, 0, shared)]
    yield [Run(sequence, shared, start - shared) for sequence in range(len(texts.ids))]
    for seen in range(start, texts.length):
        yield [Run(sequence, seen, 1) for sequence in range(len(texts.ids))]


WAYS: Final[Mapping[str, Callable[[Texts], Way]]] = {
    "chunked": chunked,
    "behind a hit": behind_a_hit,
    "decoded alone": decoded_alone,
    "decoded together": decoded_together,
}


def logits_of(runner: Runner, texts: Texts, way: Way) -> FloatArray:
    """[n, last, vocab] logits of the compared positions, computed that way."""
    start = texts.length - texts.last
    found: FloatArray | None = None
    for step in way:
        wanted = [
            (run.sequence, p) for run in step for p in range(run.seen, run.seen + run.new) if p >= start
        ]
        logits = runner.forward(plan_of(texts, step)).float().cpu().numpy()
        if found is None:
            found = np.full((len(texts.ids), texts.last, logits.shape[-1]), np.nan, dtype=np.float32)
        for (sequence, position), row in zip(wanted, logits, strict=True):
            found[sequence, position - start] = row
    assert found is not None
    assert not np.isnan(found).any(), "a position was not computed"
    return found


def plan_of(texts: Texts, step: Sequence[Run]) -> BatchPlan:
    """A step's plan over pages of one token; logits are wanted of all compared positions in it."""
    start = texts.length - texts.last
    positions = np.concatenate([np.arange(run.seen, run.seen + run.new) for run in step])
    sequences = np.repeat([run.sequence for run in step], [run.new for run in step])
    slots = texts.slots[sequences, positions]
    return BatchPlan(
        token_ids=texts.ids[sequences, positions],
        positions=positions.astype(np.int32),
        out_slots=slots,
        qo_indptr=_indptr([run.new for run in step]),
        kv_indptr=_indptr([run.seen + run.new for run in step]),
        kv_indices=np.concatenate([texts.slots[run.sequence, : run.seen + run.new] for run in step]),
        last_page_len=np.ones(len(step), dtype=np.int32),
        logit_rows=np.flatnonzero(positions >= start).astype(np.int32),
    )


def _indptr(counts: Sequence[int]) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What one way of computing changed, over all compared positions."""

    positions: int
    change_median: float
    change_q99: float
    change_most: float
    """Of each position's largest change of a logit."""

    margin_change_q99: float
    margin_change_most: float
    """By how much the distance of the reference's best two changed."""

    differing_share: float
    """Of positions at which another candidate is best."""

    widest_margin: float
    """The largest distance of the best two, by the reference, at which that happened; 0 where it did not."""


def compare(reference: FloatArray, other: FloatArray) -> Agreement:
    """How ``other`` differs from ``reference``; both [n, last, vocab]. Pure."""
    first, second = best_two(reference)
    change = np.abs(other - reference).max(axis=-1)
    margin = _at(reference, first) - _at(reference, second)
    shift = np.abs(_at(other, first) - _at(other, second) - margin)
    differs = other.argmax(axis=-1) != first
    return Agreement(
        positions=change.size,
        change_median=float(np.median(change)),
        change_q99=float(np.quantile(change, 0.99)),
        change_most=float(change.max()),
        margin_change_q99=float(np.quantile(shift, 0.99)),
        margin_change_most=float(shift.max()),
        differing_share=float(differs.mean()),
        widest_margin=float(margin[differs].max(initial=0.0)),
    )


def best_two(logits: FloatArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids of the largest and of the second largest."""
    first = logits.argmax(axis=-1)
    rest = logits.copy()
    np.put_along_axis(rest, first[..., None], -np.inf, axis=-1)
    return first, rest.argmax(axis=-1)


def _at(logits: FloatArray, ids: npt.NDArray[np.int64]) -> FloatArray:
    return np.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
