"""What replaying a great fleet costs this machine, by its size: time a request, a decision of the router's core, memory a worker.

    python benchmarks/replay_scale.py                               # 8 to 4,096 workers, 100 requests each: minutes
    python benchmarks/replay_scale.py --workers 1024 --requests 1000000   # the whole run: under half an hour on one core

Requests have 1,000 tokens, the first 512 of which are one of 10,000 beginnings (the n-th as frequent as 1/n), and answers of 128; eight a
second come for each worker, of profile h100-8b. Each size runs in a process of its own, so that its memory can be told.
"""

import json
import resource
import subprocess
import sys
from random import Random
from time import process_time

import click

from prefixmesh.sim.replay import replay
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


def measure(workers: int, requests: int, policy: str) -> dict[str, float]:
    made = workload(requests, workers)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spec = ReplaySpec(workers=workers, device_tokens=DEVICE_TOKENS, timing=H100_8B)
    began = process_time()
    figures = replay(made, spec, policy)
    took_s = process_time() - began
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "workers": workers,
        "requests": requests,
        "us_per_request": 1e6 * took_s / requests,
        "decision_us": figures.decision_us.p50 if figures.decision_us else 0.0,
        "kib_per_worker": (after_kib - before_kib) / workers,
        "cached": figures.cached_share,
        "ttft_p99_ms": figures.ttft_ms.p99,
        "max_over_mean": figures.max_over_mean,
        "took_s": took_s,
    }


@click.command()
@click.option("--workers", type=int, multiple=True, help="Sizes of the fleet.")
@click.option("--requests", type=int, help="Instead of so many a worker.")
@click.option("--per-worker", type=int, default=100, show_default=True)
@click.option("--policy", default="cost", show_default=True)
@click.option("--alone", is_flag=True, help="One size, in this process: prints JSON.")
def main(
    *, workers: tuple[int, ...], requests: int | None, per_worker: int, policy: str, alone: bool
) -> None:
    if alone:
        (size,) = workers
        click.echo(json.dumps(measure(size, requests or per_worker * size, policy)))
        return
    print(
        f"{'workers':>8} {'requests':>9} {'µs/request':>11} {'µs/decision':>12} {'KiB/worker':>11} {'cached':>7} {'p99 ms':>7} {'load':>5}"
    )
    for size in workers or SIZES:
        count = requests or per_worker * size
        command = [sys.executable, __file__, "--alone", "--workers", str(size), "--requests", str(count)]
        done = subprocess.run([*command, "--policy", policy], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        print(
            f"{size:8,} {count:9,} {found['us_per_request']:11,.0f} {found['decision_us']:12,.0f} {found['kib_per_worker']:11,.0f} "
            f"{found['cached']:7.1%} {found['ttft_p99_ms']:7,.0f} {found['max_over_mean']:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
