"""The mover for the device that a pool is on, and what it is measured to do there."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind
from prefixmesh.worker.tiers.cuda_mover import STAGING_BYTES, CudaCopies
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.row_copies import BLOCK_BYTES, RowCopies
from prefixmesh.worker.tiers.thread_mover import ThreadMover

PROFILE_TOKENS: Final = 512
"""Brought back to measure the rate: long enough that a job's own cost is a small part, short enough to take milliseconds."""

PROFILE_COPIES: Final = 3
"""The quickest of so many counts, as for the model's own rates: others on the machine can only make one slower."""

PROFILE_WAIT_S: Final = 30.0
"""For one of them. More is no speed to serve with."""


def staging_bytes(device: torch.device) -> int:
    """What copies take of the device's memory for themselves."""
    return 2 * BLOCK_BYTES if device.type == "cpu" else STAGING_BYTES


def open_mover(pool: KVPool, host: HostPool, clock: Callable[[], float] = time.perf_counter) -> ThreadMover:
    """A mover between the two, its thread running. ``clock`` is what outcomes are timed by, on that thread."""
    copies = RowCopies(pool, host) if pool.device.type == "cpu" else CudaCopies(pool, host)
    return ThreadMover(copies, clock=clock)


def load_back_ms_per_token(mover: ThreadMover, pool: KVPool, host: HostPool) -> float:
    """Milliseconds to bring a token's KV from the host to the device: a copy alone, nothing else being done. Milliseconds; overwrites the
    first pages of both pools, so only before they are used. ConfigError when nothing can be copied."""
    count = max(1, min(PROFILE_TOKENS // pool.page_size, pool.num_pages, host.num_pages))
    pages = np.arange(count, dtype=np.int32)
    # First there, so that the host's pages have memory behind them: those that nobody wrote are all read from one page of zeros.
    kinds: tuple[CopyKind, ...] = ("offload", *("restore",) * PROFILE_COPIES)
    elapsed_s = [_timed(mover, number, kind, pages) for number, kind in enumerate(kinds)]
    return min(elapsed_s[1:]) * 1e3 / (count * pool.page_size)


def _timed(mover: ThreadMover, number: int, kind: CopyKind, pages: PageIndices) -> float:
    mover.start(CopyJob(number=-1 - number, kind=kind, device_pages=pages, host_pages=pages))
    mover.wait_done(PROFILE_WAIT_S)
    outcome = next(iter(mover.take_done()), None)
    if outcome is None or outcome.error:
        mover.close()
        raise ConfigError(
            f"the host tier cannot be used: copying {len(pages)} pages "
            + ("took too long" if outcome is None else f"failed: {outcome.error}")
        )
    return outcome.elapsed_s
