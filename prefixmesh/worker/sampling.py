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

TOP_P_FIRST_LOOK: Final = 1024
"""``top_p`` first looks among so many likeliest tokens, which nearly always reach it; only rows where they do not are sorted
whole."""

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
    chosen = logits.argmax(dim=-1)
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


def _sample_random(
    logits: torch.Tensor, params: Sequence[EngineSampling], indices: Sequence[int]
) -> torch.Tensor:
    """[n] token ids by inverting the cumulative distribution in vocabulary order, summed in float64."""
    device, vocab_size = logits.device, logits.shape[1]
    temperature = torch.tensor(
        [max(param.temperature, LEAST_TEMPERATURE) for param in params], dtype=torch.float32, device=device
    )
    largest = logits.max(dim=-1, keepdim=True).values
    # Subtracted before the division, so that a tiny temperature underflows to 0 and never overflows.
    weights = ((logits - largest) / temperature.unsqueeze(1)).exp_()
    threshold = torch.tensor([param.min_p for param in params], dtype=torch.float32, device=device)
    _raise_by_top_k(threshold, weights, [_limited(param.top_k, vocab_size) for param in params])
    _raise_by_top_p(threshold, weights, params)
    cumulative = weights.where(weights >= threshold.unsqueeze(1), 0.0).cumsum(dim=-1, dtype=torch.float64)
    chance = torch.from_numpy(
        uniforms(
            np.array([param.seed for param in params], dtype=np.uint64),
            np.array(indices, dtype=np.uint64),
        )
    ).to(device)
    total = cumulative[:, -1]
    # Strictly below the sum: the first place where the sum exceeds the target then exists, and its own weight is not 0.
    target = torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=vocab_size - 1)  # rows of NaN find nothing


def _raise_by_top_k(threshold: torch.Tensor, weights: torch.Tensor, top_k: Sequence[int]) -> None:
    rows = [row for row, k in enumerate(top_k) if k]
    if not rows:
        return
    selected = torch.tensor(rows, device=weights.device)
    ranks = torch.tensor([top_k[row] - 1 for row in rows], device=weights.device)
    likeliest = weights.index_select(0, selected).topk(max(top_k[row] for row in rows), dim=-1).values
    kth = likeliest.gather(1, ranks.unsqueeze(1)).squeeze(1)
    threshold[selected] = torch.maximum(threshold[selected], kth)


def _raise_by_top_p(threshold: torch.Tensor, weights: torch.Tensor, params: Sequence[EngineSampling]) -> None:
    """Raise each row's threshold to the least weight of the smallest set of likeliest tokens that reaches ``top_p``."""
    rows = [row for row, param in enumerate(params) if param.top_p < 1.0]
    if not rows:
        return
    device, vocab_size = weights.device, weights.shape[1]
    selected = torch.tensor(rows, device=device)
    # What top_k left; min_p comes after top_p, so it does not shrink the sum that top_p is a share of.
    kept = weights.index_select(0, selected)
    top_k = [_limited(params[row].top_k, vocab_size) for row in rows]
    by_top_k = torch.zeros(len(rows), dtype=torch.float32, device=device)
    _raise_by_top_k(by_top_k, kept, top_k)
    kept = kept.where(kept >= by_top_k.unsqueeze(1), 0.0)
    share = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=device)
    wanted = kept.sum(dim=-1, dtype=torch.float64) * share
    least, reached = _nucleus_threshold(kept, wanted, min(TOP_P_FIRST_LOOK, vocab_size))
    if not bool(reached.all()):
        again = (~reached).nonzero().flatten()
        least[again], _ = _nucleus_threshold(kept[again], wanted[again], vocab_size)
    threshold[selected] = torch.maximum(threshold[selected], least)


def _nucleus_threshold(
    weights: torch.Tensor, wanted: torch.Tensor, look: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight at which the ``look`` largest of each row first sum to ``wanted``, and whether they do."""
    likeliest = weights.topk(look, dim=-1).values
    sums = likeliest.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(sums, wanted.unsqueeze(1)).clamp_(max=look - 1)
    return likeliest.gather(1, place).squeeze(1), sums[:, -1] >= wanted


def _limited(top_k: int, vocab_size: int) -> int:
    """``top_k``, or 0 where it keeps everything."""
    return top_k if top_k < vocab_size else 0
