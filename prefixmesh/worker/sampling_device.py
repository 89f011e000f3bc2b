"""Random choice of tokens where the logits are, in torch: for GPUs, from which whole rows are not worth fetching.

The definitions are those of ``sampling``; on a CPU ``sampling_host`` takes the same choices in less time.
"""

from typing import Final

import numpy as np
import torch

from prefixmesh.worker.sampling_host import BLOCK, Filters

TOP_P_LOOKS: Final = (64, 1024)
"""``top_p`` looks among so many likeliest tokens first, which nearly always reach it; only rows where they do not are looked at
again, and at last sorted whole."""


def choose_on_device(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[n] token ids for ``logits`` [n, vocab]. Rows that are not numbers get any id."""
    device = logits.device
    temperature = torch.from_numpy(filters.temperature).to(device)
    largest = logits.amax(dim=-1, keepdim=True)
    # Subtracted before the division, so that a tiny temperature underflows to 0 and never overflows.
    weights = (logits - largest).div_(temperature.unsqueeze(1)).exp_()
    threshold = torch.from_numpy(filters.min_p).to(device)
    limited = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1.0))
    if len(limited):
        rows = torch.from_numpy(limited).to(device)
        least = _least_by_rank(weights.index_select(0, rows), filters.take(limited))
        threshold = threshold.index_copy(0, rows, torch.maximum(threshold[rows], least))
    if len(limited) or bool((filters.min_p > 0).any()):
        weights = weights.where(weights >= threshold.unsqueeze(1), 0.0)
    return _invert(weights, torch.from_numpy(filters.chance).to(device))


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


def _least_by_rank(candidates: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[m] the least weight of ``candidates`` [m, vocab] that ``top_k``, then ``top_p``, keeps."""
    look = min(max(TOP_P_LOOKS[0], int(filters.top_k.max())), candidates.shape[1])
    likeliest = candidates.topk(look, dim=-1).values
    ranks = torch.from_numpy(filters.top_k).to(candidates.device)
    least = likeliest.gather(1, (ranks - 1).clamp_(min=0).unsqueeze(1)).squeeze(1).where(ranks > 0, 0.0)
    if bool((filters.top_p < 1.0).any()):
        top_p = torch.from_numpy(filters.top_p).to(candidates.device)
        _raise_by_top_p(least, candidates, likeliest, top_p)
    return least


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
