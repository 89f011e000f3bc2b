"""Random choice of tokens where the logits are, in torch: for GPUs, from which whole rows are not worth fetching.

The definitions are those of ``sampling``; on a CPU ``sampling_host`` takes the same choices in less time.
"""

from typing import Final

import numpy as np
import torch

from prefixmesh.worker.sampling_host import Filters
from prefixmesh.worker.sampling_rng import MIX_MULTIPLIERS, MIX_SHIFTS, WORDS, NoiseKeys

TOP_P_LOOKS: Final = (64, 1024)
"""``top_p`` looks among so many likeliest tokens first, which nearly always reach it; only rows where they do not are looked at
again, and at last sorted whole."""


ROWS: Final = 32
"""Rows chosen at once: noise takes 8 bytes a number, some three times over; 32 rows of 150,000 are 38 MB."""

_WORD: Final = 0xFFFFFFFF


def choose_on_device(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[n] token ids for ``logits`` [n, vocab]. Rows that are not numbers get any id."""
    chosen = [
        noisy_scores(logits[start : start + ROWS], filters.take(slice(start, start + ROWS))).argmax(dim=-1)
        for start in range(0, len(logits), ROWS)
    ]
    return torch.cat(chosen)


def noisy_scores(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[n, vocab] float64: score and noise of each token that the filters keep, minus infinity for others."""
    device = logits.device
    temperature = torch.from_numpy(filters.temperature).to(device)
    largest = logits.amax(dim=-1, keepdim=True)
    # Subtracted before the division, so that a tiny temperature gives minus infinity and never infinity.
    scores = (logits - largest).div_(temperature.unsqueeze(1))
    noisy = _gumbels(logits.shape[1], filters.keys, device).add_(scores)
    weights = scores.exp_()
    threshold = torch.from_numpy(filters.min_p).to(device)
    limited = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1.0))
    if len(limited):
        rows = torch.from_numpy(limited).to(device)
        least = _least_by_rank(weights.index_select(0, rows), filters.take(limited))
        threshold = threshold.index_copy(0, rows, torch.maximum(threshold[rows], least))
    return noisy.masked_fill_(weights < threshold.unsqueeze(1), -torch.inf)


def _gumbels(size: int, keys: NoiseKeys, device: torch.device) -> torch.Tensor:
    """[n, size] the noise of ``sampling_rng``: words of 32 bits are held in int64, where no product overflows."""
    mask, multiplier = (torch.from_numpy(one.astype(np.int64)).to(device).unsqueeze(1) for one in keys)
    words = torch.arange(size, device=device) ^ mask
    words.mul_(multiplier).bitwise_and_(_WORD)
    for shift, fixed in zip(MIX_SHIFTS, MIX_MULTIPLIERS, strict=True):
        words.bitwise_xor_(words >> shift).mul_(fixed).bitwise_and_(_WORD)
    return words.double().add_(0.5).div_(-WORDS).log1p_().neg_().log_().neg_()


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
