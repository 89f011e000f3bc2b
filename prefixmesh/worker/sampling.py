"""Choosing the next token of every sequence in a batch from its logits.

Each row's choice depends on that row alone: a filter is a threshold on the row's own weights (no order among equals is ever
used), and the one random number comes from (seed, index). So the batch a request shares never changes its tokens, beyond the
arithmetic that made the logits. Equal weights at a threshold are all kept.

Filters apply in the customary order: temperature, ``top_k``, ``top_p`` of what ``top_k`` left, ``min_p`` of the likeliest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling_rng import uniforms

TOP_P_LOOKS: Final = (64, 1024)
"""``top_p`` looks among so many likeliest tokens first, which nearly always reach it; only rows where they do not are looked at
again, and at last sorted whole. Finding the 64 largest of 49,152 takes a fiftieth of sorting them."""

BLOCK: Final = 256
"""Inverting the cumulative distribution first finds a block by the blocks' sums, then the place in it: a running sum over the
whole vocabulary would take ten times as long as sums of blocks."""

LEAST_TEMPERATURE: Final = 1e-30
"""Anything above 0 and below this is this: float32 must not take it for 0."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row."""

    token_ids: list[int]
    failures: dict[int, str]
    """Rows whose logits were not numbers; their token means nothing."""


def sample(logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]) -> Sampled:
    """The next token for each row of ``logits`` [R, vocab] float32; ``indices[r]`` is the token's place in its answer.

    Greedy rows cost one argmax; others O(vocab), and a partial sort for ``top_k`` and ``top_p``.
    """
    if not params:
        return Sampled([], {})
    chosen = _argmax(logits)
    # An argmax takes a NaN for the largest, so one look at the largest finds any.
    finite = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
    random_rows = [row for row, param in enumerate(params) if param.temperature > 0.0]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        picked = _sample_random(
            logits if len(random_rows) == len(params) else logits.index_select(0, rows),
            [params[row] for row in random_rows],
            [indices[row] for row in random_rows],
        )
        chosen.index_copy_(0, rows, picked)
    failures = {}
    if not bool(finite.all()):
        bad_rows = (~finite).nonzero().flatten().tolist()
        failures = dict.fromkeys(bad_rows, "the model's logits are not numbers")
    return Sampled(chosen.tolist(), failures)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] places of the largest. On a CPU by numpy, which is ten times as fast at it."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _sample_random(
    logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]
) -> torch.Tensor:
    """[n] token ids by inverting each row's cumulative distribution, in vocabulary order."""
    device = logits.device
    temperature = torch.tensor(
        [max(param.temperature, LEAST_TEMPERATURE) for param in params], dtype=torch.float32, device=device
    )
    largest = logits.amax(dim=-1, keepdim=True)
    # Subtracted before the division, so that a tiny temperature underflows to 0 and never overflows.
    weights = (logits - largest).div_(temperature.unsqueeze(1)).exp_()
    threshold = torch.tensor([param.min_p for param in params], dtype=torch.float32, device=device)
    _raise_by_rank(threshold, weights, params)
    if bool((threshold > 0).any()):
        weights = weights.where(weights >= threshold.unsqueeze(1), 0.0)
    chance = torch.from_numpy(
        uniforms(
            np.array([param.seed for param in params], dtype=np.uint64),
            np.array(indices, dtype=np.uint64),
        )
    ).to(device)
    return _invert(weights, chance)


def _invert(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """[n] places where the running sum of each row of ``weights`` [n, vocab] first exceeds ``chance`` [n] of the whole sum.

    Sums are in float64. A place of weight 0 is never chosen: a target is strictly below the sum that it is sought in.
    """
    rows, vocab_size = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab_size % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = _below(chance * sums[:, -1], sums[:, -1])
    block = _first_above(sums, target)
    before = sums.gather(1, (block - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    target = target - before.where(block > 0, 0.0)
    inside = blocks[torch.arange(rows, device=weights.device), block].cumsum(dim=-1, dtype=torch.float64)
    place = _first_above(inside, _below(target, inside[:, -1]))
    return (block * BLOCK + place).clamp_(max=vocab_size - 1)  # a row of NaN finds nothing


def _below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(sums, target.unsqueeze(1), right=True).squeeze(1).clamp_(max=sums.shape[1] - 1)


def _raise_by_rank(threshold: torch.Tensor, weights: torch.Tensor, params: Sequence[EngineSampling]) -> None:
    """Raise the thresholds of rows that limit by rank to the least weight that ``top_k``, then ``top_p``, keeps."""
    vocab_size, device = weights.shape[1], weights.device
    top_k = [_limited(param.top_k, vocab_size) for param in params]
    rows = [row for row, param in enumerate(params) if top_k[row] or param.top_p < 1.0]
    if not rows:
        return
    selected = torch.tensor(rows, device=device)
    candidates = weights.index_select(0, selected)
    look = min(max(TOP_P_LOOKS[0], *(top_k[row] for row in rows)), vocab_size)
    likeliest = candidates.topk(look, dim=-1).values
    ranks = torch.tensor([top_k[row] for row in rows], device=device)
    least = likeliest.gather(1, (ranks - 1).clamp_(min=0).unsqueeze(1)).squeeze(1).where(ranks > 0, 0.0)
    top_p = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=device)
    if bool((top_p < 1.0).any()):
        _raise_by_top_p(least, candidates, likeliest, top_p)
    threshold[selected] = torch.maximum(threshold[selected], least)


def _raise_by_top_p(
    least: torch.Tensor, candidates: torch.Tensor, likeliest: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Raise ``least`` [m] to the least weight of the smallest set of likeliest tokens whose sum reaches ``top_p`` of what is at
    least ``least`` already. ``likeliest`` are the largest of ``candidates`` [m, vocab], in falling order."""
    vocab_size = candidates.shape[1]
    total = candidates.where(candidates >= least.unsqueeze(1), 0.0).sum(dim=-1, dtype=torch.float64)
    wanted = total * top_p
    left = (top_p < 1.0).nonzero().flatten()
    for look in (likeliest.shape[1], *TOP_P_LOOKS[1:], vocab_size):
        # A larger look has the same falling order and so the same sums: which look finds the place changes nothing.
        if look > likeliest.shape[1]:
            likeliest = candidates[left].topk(min(look, vocab_size), dim=-1).values
        elif len(likeliest) != len(left):
            likeliest = likeliest[left]
        sums = likeliest.cumsum(dim=-1, dtype=torch.float64)
        place = torch.searchsorted(sums, wanted[left].unsqueeze(1)).clamp_(max=likeliest.shape[1] - 1)
        reached = (sums[:, -1] >= wanted[left]) | (likeliest.shape[1] == vocab_size)
        found = left[reached]
        least[found] = torch.maximum(least[found], likeliest.gather(1, place).squeeze(1)[reached])
        left, likeliest = left[~reached], likeliest[~reached]
        if not len(left):
            return


def _limited(top_k: int, vocab_size: int) -> int:
    """``top_k``, or 0 where it keeps everything."""
    return top_k if top_k < vocab_size else 0
