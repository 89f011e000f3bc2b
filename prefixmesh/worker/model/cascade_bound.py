"""From how much shared reading on a cascade pays: a documented figure for CPUs, a measurement elsewhere.

A cascade saves reading the shared KV again for each further sequence, and costs a fixed number of operations more per layer (a
product for each segment, log-sum-exps, a merge). So the bound is on sequences times shared tokens, and it is inversely
proportional to the KV heads, which every token's reading is.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool

CPU_HEAD_READS: Final = 12_288
"""On a CPU a cascade is used from so many sequences x shared tokens x KV heads on. It breaks even near 8,192, measured for groups
of 2, 8 and 32 and for 1, 2, 3 and 8 KV heads (``docs/engine.md``); half as much again leaves noise no chance."""

MEASURED_SEQUENCES: Final = 8
"""Sequences of the group that is measured; the bound, a product, then holds for larger and smaller ones within a factor of 2."""

MEASURED_TOKENS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""Shared tokens that are tried, as far as the pool holds them."""

OWN_TOKENS: Final = 16
"""Tokens of each sequence's own while measuring."""

REPEATS: Final = 5
"""The quickest of so many counts: others on the machine can only make one slower."""

GAIN: Final = 0.95
"""A cascade must take at most this share of the plain time, so that noise alone never switches it on."""

MakeBackend = Callable[[CascadeRule | None], AttentionBackend]


def cpu_rule(num_kv_heads: int) -> CascadeRule:
    """The documented bound for CPUs."""
    return CascadeRule(min_reads=-(-CPU_HEAD_READS // num_kv_heads))


def measured_rule(make: MakeBackend, pool: KVPool, num_heads: int, lost_s: float = 0.0) -> CascadeRule | None:
    """Measure the bound of a backend on this device; None when a cascade never paid. A fraction of a second.

    Reads the pool's first pages and writes nothing. The bound is the least that paid and above which everything paid.
    ``lost_s`` is what a cascade costs besides, in each layer: what a step gives up that could have been replayed.
    """
    never, always = make(None), make(CascadeRule(min_reads=1))
    q = torch.zeros(
        MEASURED_SEQUENCES, num_heads, pool.keys(0).shape[-1], dtype=pool.dtype, device=pool.device
    )
    least: int | None = None
    for tokens in reversed(MEASURED_TOKENS):
        shared_pages = tokens // pool.page_size
        plan = sharing_plan(MEASURED_SEQUENCES, shared_pages, OWN_TOKENS, pool.page_size)
        if not shared_pages or int(plan.kv_indices.max()) >= pool.num_pages:
            continue
        plain_s, cascade_s = (
            min(_timed(backend, plan, q) for _ in range(REPEATS)) for backend in (never, always)
        )
        if cascade_s + lost_s > GAIN * plain_s:
            break
        least = MEASURED_SEQUENCES * shared_pages * pool.page_size
    return None if least is None else CascadeRule(min_reads=least)


def sharing_plan(sequences: int, shared_pages: int, own_tokens: int, page_size: int) -> BatchPlan:
    """A decode step of sequences that share their first pages and have ``own_tokens`` after them, the new one included."""
    own_pages = -(-own_tokens // page_size)
    length = shared_pages * page_size + own_tokens
    pages = np.tile(np.arange(shared_pages + own_pages, dtype=np.int32), (sequences, 1))
    pages[:, shared_pages:] += np.arange(sequences, dtype=np.int32)[:, None] * np.int32(own_pages)
    each = np.arange(sequences + 1, dtype=np.int32)
    last = (own_tokens - 1) % page_size
    return BatchPlan(
        token_ids=np.zeros(sequences, dtype=np.int32),
        positions=np.full(sequences, length - 1, dtype=np.int32),
        out_slots=pages[:, -1] * np.int32(page_size) + np.int32(last),
        qo_indptr=each,
        kv_indptr=each * np.int32(pages.shape[1]),
        kv_indices=pages.reshape(-1),
        last_page_len=np.full(sequences, last + 1, dtype=np.int32),
        logit_rows=each[:-1],
    )


@torch.inference_mode()
def _timed(backend: AttentionBackend, plan: BatchPlan, q: torch.Tensor) -> float:
    """One layer; what is prepared once a step for all layers does not count."""
    backend.prepare(plan)
    backend.forward(0, q)
    _synchronize(q.device)
    started = time.perf_counter()
    backend.forward(0, q)
    _synchronize(q.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
