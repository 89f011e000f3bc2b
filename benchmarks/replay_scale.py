"""What replaying a great fleet costs this machine, by its size: time a request, a decision of the router's core, memory a worker.

    python benchmarks/replay_scale.py                                     # 8 to 4,096 workers, 100 requests each: minutes
    python benchmarks/replay_scale.py --workers 1024 --requests 1000000   # the whole run: under half an hour on one core
    python benchmarks/replay_scale.py --workers 16 --device-tokens 32000 --per-worker 100 --per-worker 1600   # flat in requests

Requests have 1,000 tokens, the first 512 of which are one of 10,000 beginnings (the n-th as frequent as 1/n), and answers of 128; eight a
second come for each worker, of profile h100-8b. Each size runs in a process of its own, so that its memory can be told: all of it but for
the list of requests, and of that the tables of the router's core. Times are of this process alone, whatever else the machine does; of
decisions the median.
"""

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from random import Random
from time import process_time
from types import FunctionType, ModuleType
from typing import Any, Final

import click

from prefixmesh.sim.replay_core import SeveralRouters
from prefixmesh.sim.replay_figures import figures_of
from prefixmesh.sim.replay_fleet import Fleet
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import H100_8B
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workloads.draws import Draws, Popularity

BLOCK = 64
PROMPT_TOKENS, SHARED_TOKENS, ANSWER_TOKENS = 1000, 512, 128
BEGINNINGS = 10_000
REQUESTS_PER_WORKER_S = 8.0
DEVICE_TOKENS = 427_000
SIZES = (8, 64, 256, 1024, 4096)

SHARED_BELOW: Final = 1 << 30
"""Whole numbers that stand for sets or counts are objects that many tables have; names of blocks and masks of workers are larger."""


def workload(requests: int, workers: int) -> Workload:
    draws = Draws(Random(0).random)
    popular = Popularity(BEGINNINGS, 1.0)
    shared, whole = SHARED_TOKENS // BLOCK, PROMPT_TOKENS // BLOCK
    beginnings = [tuple(range(n * shared, (n + 1) * shared)) for n in range(BEGINNINGS)]
    following, made, arrival_ms = BEGINNINGS * shared, [], 0.0
    for _ in range(requests):
        own = tuple(range(following, following + whole - shared))
        following += len(own)
        made.append(
            WorkloadRequest(
                arrival_ms=round(arrival_ms),
                input_length=PROMPT_TOKENS,
                output_length=ANSWER_TOKENS,
                block_ids=beginnings[draws.pick(popular)] + own,
            )
        )
        arrival_ms += 1e3 * draws.exponential(1.0 / (REQUESTS_PER_WORKER_S * workers))
    return Workload(name="steady", block_size=BLOCK, requests=made)


def measure(workers: int, requests: int, policy: str, device_tokens: int = DEVICE_TOKENS) -> dict[str, float]:
    """One replay, and what it took. O(requests + blocks in caches)."""
    made = workload(requests, workers)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spec = ReplaySpec(workers=workers, device_tokens=device_tokens, timing=H100_8B)
    began = process_time()
    fleet = Fleet(made, spec, policy)
    known_s = process_time() - began
    fleet.run(None)
    took_s = process_time() - began
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = figures_of(fleet.log, fleet.workers, spec.objective, fleet.decisions_s)
    router = fleet.router
    (core,) = router.cores if isinstance(router, SeveralRouters) else (None,)
    return {
        "workers": workers,
        "requests": requests,
        "known_s": known_s,
        "us_per_request": 1e6 * took_s / requests,
        "decision_us": figures.decision_us.p50 if figures.decision_us else 0.0,
        "kib_per_worker": (after_kib - before_kib) / workers,
        "core_kib_per_worker": 0.0 if core is None else bytes_of(core) / 1024 / workers,
        "blocks_per_worker": 0.0 if core is None else len(core.view.index) / workers,
        "cached": figures.cached_share,
        "ttft_p99_ms": figures.ttft_ms.p99,
        "max_over_mean": figures.max_over_mean,
        "took_s": took_s,
    }


def bytes_of(root: object) -> int:
    """Of all that an object has, and what those have, code left out. A large number counts once for each table that it is in: never too
    little. O(objects)."""
    seen: set[int] = set()
    total, waiting = 0, [root]
    while waiting:
        one: Any = waiting.pop()
        if type(one) is int:
            total += sys.getsizeof(one) if one >= SHARED_BELOW else 0
        elif id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen.add(id(one))
            total += sys.getsizeof(one)
            waiting += gc.get_referents(one)
    return total


def print_growth(rows: Sequence[dict[str, float]]) -> None:
    """Of a decision and of a worker's memory, from the least fleet to the largest."""
    least, most = (pick(rows, key=lambda row: row["workers"]) for pick in (min, max))
    if not least["decision_us"] or least is most:
        return
    times = most["workers"] / least["workers"]
    slower = most["decision_us"] / least["decision_us"]
    larger = most["core_kib_per_worker"] / least["core_kib_per_worker"]
    print(
        f"{times:,.0f} times the workers: a decision takes {slower:.2f} times as long ({times:,.0f} would be linear), "
        f"the core has {larger:.2f} times as much a worker (1 is linear)"
    )


@click.command()
@click.option("--workers", type=int, multiple=True, help="Sizes of the fleet.")
@click.option("--requests", type=int, help="Instead of so many a worker.")
@click.option("--per-worker", type=int, multiple=True, default=(100,), show_default=True)
@click.option("--device-tokens", type=int, default=DEVICE_TOKENS, show_default=True)
@click.option("--policy", default="cost", show_default=True)
@click.option("--alone", is_flag=True, help="One size, in this process: prints JSON.")
def main(
    *,
    workers: tuple[int, ...],
    requests: int | None,
    per_worker: tuple[int, ...],
    device_tokens: int,
    policy: str,
    alone: bool,
) -> None:
    if alone:
        (size,) = workers
        click.echo(json.dumps(measure(size, requests or per_worker[0] * size, policy, device_tokens)))
        return
    print(
        f"{'workers':>8} {'requests':>9} {'s, known':>9} {'µs/request':>11} {'µs/decision':>12} {'KiB/worker':>11} {'of the core':>12} "
        f"{'blocks':>7} {'cached':>7} {'p99 ms':>7} {'load':>5} {'s in all':>9}"
    )
    rows = []
    for size in workers or SIZES:
        for count in [requests] if requests else [each * size for each in per_worker]:
            command = [sys.executable, __file__, "--alone", "--workers", str(size), "--requests", str(count)]
            command += ["--policy", policy, "--device-tokens", str(device_tokens)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout)
            rows.append(found)
            print(
                f"{size:8,} {count:9,} {found['known_s']:9.2f} {found['us_per_request']:11,.0f} {found['decision_us']:12,.0f} "
                f"{found['kib_per_worker']:11,.0f} {found['core_kib_per_worker']:12,.1f} {found['blocks_per_worker']:7,.0f} "
                f"{found['cached']:7.1%} {found['ttft_p99_ms']:7,.0f} {found['max_over_mean']:5.2f} {found['took_s']:9,.0f}",
                flush=True,
            )
    print_growth(rows)


if __name__ == "__main__":
    main()
