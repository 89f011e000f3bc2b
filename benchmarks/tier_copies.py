"""What it takes to copy KV between the device's pool and the host's, on a CPU, and what a step notices of it.

    python benchmarks/tier_copies.py [--tokens 2048] [--repeats 15] [--page-size 1 --page-size 16] [--no-model] [--json FILE]

`copies` are jobs of SmolLM2-135M's KV in float32 through the mover, pages that are neighbours and pages that are scattered, beside one memcpy
of as many bytes (by one core, as the mover has). `beside` are a model's steps on one core (random weights of the same shape) alone and with backups
under way all the time on another. Times are those that the core gave, so that others on the machine change little. `asking` is what `await_layer` costs the model in a step: without a host tier, and with one where nothing is
expected. Medians.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefixmesh.bench.gpu_copies import copy_rates
from prefixmesh.bench.gpu_model import SMALL, config_of, random_weights
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.runner import ModelRunner, single_sequence_plan
from prefixmesh.worker.model.torch_attention import TorchAttention
from prefixmesh.worker.tiers.copies import CopyJob
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.open_mover import open_mover
from prefixmesh.worker.tiers.thread_mover import ThreadMover

CPU = torch.device("cpu")
PROMPT_TOKENS = 256
JOB_TOKENS = 512
"""Of a backup that runs beside steps."""


class Backups:
    """One after the other without a pause, as long as it is on."""

    def __init__(self, mover: ThreadMover, page_size: int) -> None:
        self._mover = mover
        self._pages = np.arange(JOB_TOKENS // page_size, dtype=np.int32)
        self._on = False
        self._idle = threading.Event()
        self.done = 0
        mover.on_done = self._next

    def begin(self) -> None:
        self._on = True
        self._idle.clear()
        self._start()

    def end(self) -> None:
        self._on = False
        self._idle.wait()

    def _next(self) -> None:
        self.done += len(self._mover.take_done())
        if self._on:
            self._start()
        else:
            self._idle.set()

    def _start(self) -> None:
        self._mover.start(
            CopyJob(number=self.done, kind="offload", device_pages=self._pages, host_pages=self._pages)
        )


def beside(page_size: int, repeats: int) -> list[dict[str, Any]]:
    config = config_of(SMALL, 2 * PROMPT_TOKENS)
    pool = KVPool(config, 2048 // page_size, page_size, torch.float32, CPU)
    runner = ModelRunner(
        config, random_weights(config, torch.float32, CPU), pool, TorchAttention(config, pool)
    )
    host = HostPool(pool, JOB_TOKENS // page_size)
    mover = open_mover(pool, host)
    backups = Backups(mover, page_size)
    rows = []
    for name, plan in {
        f"prefill {PROMPT_TOKENS}": single_sequence_plan(0, PROMPT_TOKENS, page_size),
        "decode 1": single_sequence_plan(PROMPT_TOKENS, 1, page_size),
    }.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        copied, spent = 0, 0.0
        runner.forward(plan)
        for _ in range(repeats):
            for copying in (False, True):  # in turns, so that others on the machine hit both
                if copying:
                    backups.begin()
                done, began, started = backups.done, time.perf_counter(), time.thread_time()
                runner.forward(plan)
                times[copying].append(time.thread_time() - started)
                if copying:
                    copied, spent = copied + backups.done - done, spent + time.perf_counter() - began
                    backups.end()
        alone_s, beside_s = statistics.median(times[False]), statistics.median(times[True])
        rows.append(
            {
                "step": name,
                "page size": page_size,
                "alone ms": alone_s * 1e3,
                "beside backups ms": beside_s * 1e3,
                "ratio": beside_s / alone_s,
                "GB/s meanwhile": copied * len(host.storage) * host.page_bytes / spent / 1e9,
            }
        )
    mover.close()
    return rows


def asking(repeats: int) -> list[dict[str, Any]]:
    pool = KVPool(config_of(SMALL, PROMPT_TOKENS), 4, 16, torch.float32, CPU)
    rows = []
    mover = open_mover(pool, HostPool(pool, 1))
    for name, arrivals in (("no host tier", None), ("nothing expected", mover)):
        pool.arrivals = arrivals
        seconds = timed(partial(ask_all, pool), 20 * repeats)
        rows.append({"await_layer in a step": name, "us": seconds * 1e6})
    mover.close()
    return rows


def ask_all(pool: KVPool) -> None:
    for layer in range(pool.num_layers):
        pool.await_layer(layer)


def timed(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print("  ".join(f"{key:>18}" for key in rows[0]))
    for row in rows:
        print(
            "  ".join(
                f"{value:>18.2f}" if isinstance(value, float) else f"{value:>18}" for value in row.values()
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--page-size", type=int, action="append")
    parser.add_argument("--no-model", dest="model", action="store_false")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = options.page_size or [1, 16]
    found: dict[str, list[dict[str, Any]]] = {}
    for size in sizes:
        rows = copy_rates(SMALL, size, torch.float32, CPU, tokens=options.tokens, repeats=options.repeats)
        found[f"copies, page size {size}"] = rows
    found["asking"] = asking(options.repeats)
    torch.set_num_threads(1)
    for size in sizes if options.model else ():
        found[f"beside, page size {size}"] = beside(size, options.repeats)
    for title, rows in found.items():
        show(title, rows)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
