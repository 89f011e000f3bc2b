"""How fast a pair of workers is, as a profile that ``prefixmesh replay --profile FILE`` takes: measured by what a caller sees, both busy.

A replay's worker is a sum (``sim/timing``): a step's own time, a curve over a prompt's tokens, and what each sequence and its KV add to a step
that decodes. So prompts of three lengths are asked for one token each, and answers are decoded alone, behind a long prompt, and four
at a time; every request is asked of all workers in the same moment, since they share a machine's memory.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.bench.serve_prompts import PromptMaker
from prefixmesh.client import AsyncClient, TokenPrompt
from prefixmesh.errors import InternalError
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import WorkloadRequest

TIMEOUT_S: Final = 600.0

_MS_PER_S: Final = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Which prompts and how often."""

    prompts: Sequence[int] = (128, 384, 768)
    short: int = 128
    long: int = 768
    together: int = 4
    answer: int = 16
    repeats: int = 3
    """Of each; the first round is not counted beyond these."""


class PrefillPoint(NamedTuple):
    """First tokens of prompts of one length."""

    tokens: int
    first_token_ms: float


class DecodePoint(NamedTuple):
    """Answers decoded so many at a time."""

    sequences: int
    kv_tokens: float
    """Of all of them together, on the mean."""

    token_ms: float


@dataclass(slots=True)
class Points:
    """What was measured: medians."""

    prefill: list[PrefillPoint] = field(default_factory=list)
    decode: list[DecodePoint] = field(default_factory=list)


def fit(points: Points) -> TimingModel:
    """The timing model by these points: decoding's three unknowns by least squares, then the prefill's curve over what a step takes by itself.
    What would be negative is noise, and 0; the rest is then fitted without it. O(points)."""
    step_ms, per_sequence, per_kv = _non_negative(
        [[1.0, float(one.sequences), one.kv_tokens] for one in points.decode],
        [one.token_ms for one in points.decode],
    )
    linear, quadratic = _non_negative(
        [[float(one.tokens), float(one.tokens) * (one.tokens - 1)] for one in points.prefill],
        [one.first_token_ms - step_ms for one in points.prefill],
    )
    return TimingModel(
        step_ms=step_ms,
        prefill_ms_per_token=linear,
        prefill_ms_per_token2=quadratic,
        decode_ms_per_sequence=per_sequence,
        decode_ms_per_kv_token=per_kv,
    )


def _non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares in which no coefficient is negative: the most negative is left out until none is. Enough for three of them."""
    matrix, wanted = np.array(rows), np.array(values)
    kept = list(range(matrix.shape[1]))
    while kept:
        found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if found.min() >= 0.0:
            break
        kept.pop(int(found.argmin()))
    whole = np.zeros(matrix.shape[1])
    if kept:
        whole[kept] = found
    return [float(one) for one in whole]


class Calibration:
    """Measures workers that are asked for themselves, without their router."""

    def __init__(
        self, workers: Sequence[str], effort: Effort, seed: int, ids: int, progress: Callable[[str], None]
    ) -> None:
        self._effort = effort
        self._prompts = PromptMaker(max(*effort.prompts, effort.short, effort.long) + 1, seed, ids)
        self._workers = workers
        self._progress = progress
        self._asked = 0

    async def measure(self) -> Points:
        """All points; some minutes at most. Raises what a request ends in."""
        effort, points = self._effort, Points()
        clients = [AsyncClient(address, timeout_s=TIMEOUT_S) for address in self._workers]
        try:
            await self._round(clients, 1, effort.short, 2)  # whatever is done once
            for tokens in effort.prompts:
                self._progress(f"first tokens of prompts of {tokens:,}")
                rounds = [await self._round(clients, 1, tokens, 1) for _ in range(effort.repeats)]
                points.prefill.append(
                    PrefillPoint(tokens, _median([first for one in rounds for first, _ in one]))
                )
            for together, tokens in ((1, effort.short), (1, effort.long), (effort.together, effort.short)):
                self._progress(f"decoding, {together} at a time behind {tokens:,} tokens")
                rounds = [
                    await self._round(clients, together, tokens, effort.answer) for _ in range(effort.repeats)
                ]
                kv_tokens = together * (tokens + effort.answer / 2)
                points.decode.append(
                    DecodePoint(together, kv_tokens, _median([token for one in rounds for _, token in one]))
                )
        finally:
            for client in clients:
                await client.close()
        return points

    async def _round(
        self, clients: Sequence[AsyncClient], together: int, tokens: int, answer: int
    ) -> list[tuple[float, float]]:
        """So many requests of every worker at one moment: milliseconds to the first token of each, and from token to token."""
        return await asyncio.gather(
            *(self._ask(client, tokens, answer) for client in clients for _ in range(together))
        )

    async def _ask(self, client: AsyncClient, tokens: int, answer: int) -> tuple[float, float]:
        self._asked += 1
        # Less than a block, and so like no other: nothing is found cached.
        request = WorkloadRequest(arrival_ms=0, input_length=tokens, output_length=answer, block_ids=())
        told = await client.generate(
            TokenPrompt(self._prompts.prompt(self._asked, request)),
            temperature=0.0,
            ignore_eos=True,
            max_tokens=answer,
        )
        if told.first_token_s is None:
            raise InternalError("an answer without a token cannot be measured")
        rest = max(1, told.completion_tokens - 1)
        return _MS_PER_S * told.first_token_s, _MS_PER_S * (told.total_s - told.first_token_s) / rest


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
