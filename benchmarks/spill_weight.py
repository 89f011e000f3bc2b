"""Which lambda: the cost's `--spill-weight` by what a trace and a burst make of it, and the policies beside it on the same fleet.

Workers are fake ones in simulated time (real cache, scheduler and news; a timing model in the model's place) behind the real router's core,
which knows of them what they tell over a simulated network. So a run is exact, repeats to the microsecond, and says nothing about this
machine. The trace is in the public Mooncake format; its prompts are made up, and share what its block ids say they share.

    python benchmarks/spill_weight.py --trace PATH [--requests 2000] [--workers 8] [--routers 1] [--pool-tokens 2000000] [--speed 1.0]
        [--weight 0 --weight 1 ...] [--policy round_robin ...] [--no-burst] [--seed 0] [--json FILE]

`first token` is from the question to its first token at the router. `hits` is the share of prompt tokens that were cached. `load` is the
most prompt tokens that a worker was sent, by the mean; `busy` the same of the time it computed. Answers are as long as in the trace, and
their KV takes its place in the pool. A thousand requests take about half a minute for each line.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefixmesh.config import EngineConfig
from prefixmesh.router.policy import PICKS, PolicyConfig
from prefixmesh.router_config import DEFAULT_SPILL_WEIGHT
from prefixmesh.sim.fleet_run import TENANT, FleetFigures, FleetSpec, SimulatedFleet, run_trace
from prefixmesh.sim.simulated_router import Question
from prefixmesh.sim.timing import H100_8B, H100X2_70B
from prefixmesh.sim.traces import TraceRequest, read_trace
from prefixmesh.tokens import pack

WEIGHTS = (0.0, 0.25, 0.5, 1.0, DEFAULT_SPILL_WEIGHT, 2.0, 4.0)
POLICIES = tuple(policy for policy in PICKS if policy != "cost")
PROFILES = {"h100-8b": H100_8B, "h100x2-70b": H100X2_70B}

BURST_REQUESTS = 32
BURST_PREFIX_TOKENS = 4096
BURST_TAIL_TOKENS = 64
BURST_ANSWER_TOKENS = 128

HEADER = f"{'':>14} {'hits':>7} {'first token ms: p50':>20} {'p90':>8} {'p99':>8} {'load':>6} {'busy':>6} {'computing':>10} {'failed':>7}"
BURST_HEADER = f"{'lambda':>14} {'workers':>8} {'most on one':>12} {'prefixes computed':>18} {'first token ms: p50':>20} {'last':>8}"


def configs(options: argparse.Namespace) -> Iterator[tuple[str, PolicyConfig]]:
    for weight in WEIGHTS if options.weight is None else options.weight:
        yield f"lambda {weight:g}", PolicyConfig(policy="cost", spill_weight=weight)
    for policy in POLICIES if options.policy is None else options.policy:
        yield policy, PolicyConfig(policy=policy)


def show_progress(name: str, total: int) -> Callable[[int], None]:
    started = time.monotonic()

    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {done}/{total} in {time.monotonic() - started:.0f} s ", end="", file=sys.stderr)

    return show


def row(name: str, figures: FleetFigures) -> str:
    p50, p90, p99 = figures.first_token_ms
    return (
        f"{name:>14} {figures.cached_share:7.2%} {p50:20,.0f} {p90:8,.0f} {p99:8,.0f} {figures.max_over_mean:6.2f} "
        f"{figures.busy_max_over_mean:6.2f} {figures.busy_share:10.0%} {figures.failed:7}"
    )


def burst(spec: FleetSpec, weight: float) -> dict[str, Any]:
    """32 requests with one new prefix at one moment, on a fleet that is idle and has served others before."""
    fleet = SimulatedFleet(spec, PolicyConfig(spill_weight=weight))
    rng = random.Random(spec.seed)
    vocab = spec.identity.vocab_size

    def ask(when: float, prompt: Sequence[int]) -> None:
        fleet.ask_at(
            when, lambda: Question(namespace=TENANT, prompt=pack(prompt), max_tokens=BURST_ANSWER_TOKENS)
        )

    # Everybody has measured itself, and holds something.
    for index in range(4 * spec.workers):
        ask(fleet.sim.now + 0.5 * index, rng.choices(range(vocab), k=2048))
    fleet.run()
    fleet.answered.clear()
    began = fleet.sim.now + 10.0
    prefix = rng.choices(range(vocab), k=BURST_PREFIX_TOKENS)
    for _ in range(BURST_REQUESTS):
        ask(began, prefix + rng.choices(range(vocab), k=BURST_TAIL_TOKENS))
    fleet.run()
    figures = fleet.figures(began)
    on = Counter(one.worker for one in fleet.answered)
    waits_ms = [1e3 * ((one.first_token_at or one.asked_at) - one.asked_at) for one in fleet.answered]
    return {
        "workers": len(on),
        "most_on_one": max(on.values()),
        "prefixes_computed": sum(one.cached_tokens < BURST_PREFIX_TOKENS // 2 for one in fleet.answered),
        "first_token_p50_ms": figures.first_token_ms[0],
        "first_token_last_ms": max(waits_ms),
    }


def show_bursts(spec: FleetSpec, options: argparse.Namespace) -> dict[str, Any]:
    print(
        f"\nA burst: {BURST_REQUESTS} requests at one moment with one new prefix of {BURST_PREFIX_TOKENS} tokens, {BURST_TAIL_TOKENS} "
        f"tokens of their own each, {BURST_ANSWER_TOKENS} to answer, {spec.workers} idle workers.\n{BURST_HEADER}"
    )
    found = {}
    for weight in WEIGHTS if options.weight is None else options.weight:
        one = found[f"{weight:g}"] = burst(spec, weight)
        print(
            f"{weight:14g} {one['workers']:8} {one['most_on_one']:12} {one['prefixes_computed']:18} "
            f"{one['first_token_p50_ms']:20,.0f} {one['first_token_last_ms']:8,.0f}",
            flush=True,
        )
    return found


def show_trace(requests: list[TraceRequest], spec: FleetSpec, options: argparse.Namespace) -> dict[str, Any]:
    tokens = sum(request.input_length for request in requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    print(
        f"{len(requests)} requests, {tokens:,} prompt tokens in {span_s / spec.speed:,.0f} s of simulated time; {spec.workers} workers of "
        f"{spec.engine.max_total_tokens:,} tokens ({options.profile}), {spec.routers} routers\n{HEADER}",
        flush=True,
    )
    found = {}
    for name, config in configs(options):
        figures = run_trace(requests, spec, config, show_progress(name, len(requests)))
        found[name] = asdict(figures) | {"cached_share": figures.cached_share}
        print(("\r" if sys.stderr.isatty() else "") + row(name, figures), flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="a file in the Mooncake format")
    parser.add_argument("--requests", type=int, default=2000, help="the first so many of it")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--pool-tokens", type=int, default=2_000_000, help="of each worker")
    parser.add_argument("--profile", choices=PROFILES, default="h100x2-70b", help="prefixmesh/sim/timing.py")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="arrivals so many times faster than in the trace"
    )
    parser.add_argument("--weight", type=float, action="append", help=f"default: {WEIGHTS}")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--no-weights", dest="weight", action="store_const", const=[], help="policies only")
    parser.add_argument("--no-policies", dest="policy", action="store_const", const=[], help="weights only")
    parser.add_argument("--no-burst", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    engine: EngineConfig = replace(FleetSpec().engine, max_total_tokens=options.pool_tokens)
    spec = FleetSpec(
        workers=options.workers,
        routers=options.routers,
        engine=engine,
        timing=PROFILES[options.profile],
        speed=options.speed,
        seed=options.seed,
    )
    found = {"trace": show_trace(read_trace(options.trace, options.requests), spec, options)}
    if not options.no_burst:
        found["burst"] = show_bursts(spec, options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
