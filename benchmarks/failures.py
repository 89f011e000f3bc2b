"""What callers meet when processes die, stall, refuse, come and go: every line that DESIGN's "Failure" promises, on real processes.

Each scenario starts a fleet of its own (fake workers, unless it says otherwise: real processes, sockets and signals, and answers that are
known beforehand), does the harm, and prints its figures with what they must be. The scenarios themselves are in ``tests/support/failure_*``,
where ordinary tests run their small forms. What takes longer than a machine should is the machine's business: the figures are of one that
does nothing else.

    python -m benchmarks.failures [--scenario NAME]... [--quick] [--check] [--json FILE]
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from prefixmesh.client import AsyncClient, GenerateOptions
from tests.support.failure_figures import Figure, failing
from tests.support.failure_fleet import REAL_WORKER, FailureFleet
from tests.support.failure_kills import kill_at_each_token, kill_router_under_load, kill_under_load
from tests.support.failure_leaks import cancel_many, history_figures
from tests.support.failure_load import Workload
from tests.support.failure_storms import churn_under_load, refuse_under_load, stall_under_streams

SLOW_STEPS: Final = ("--step-ms", "20", "--grace-s", "0")
SOME_STEPS: Final = ("--step-ms", "8", "--grace-s", "0")
QUICK_STEPS: Final = ("--step-ms", "2", "--grace-s", "0")
ANSWER_TOKENS: Final = 64
SCHEMA: Final = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"], "additionalProperties": false}'
)


class Scenario(Protocol):
    """Takes a folder of its own and whether to be quick; figures by variant."""

    __doc__: str | None

    def __call__(self, folder: Path, *, quick: bool) -> Coroutine[Any, Any, dict[str, list[Figure]]]: ...


def way(*, direct: bool) -> str:
    return "direct" if direct else "proxied"


async def kill(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """4 workers, 20 requests/s, kill -9 one."""
    shown = {}
    with FailureFleet(folder, worker_arguments=SLOW_STEPS) as fleet:
        fleet.start(4)
        for direct in (False, True):
            await start_dead(fleet)
            shown[way(direct=direct)] = await kill_under_load(
                fleet, per_s=20, before_s=3, after_s=3 if quick else 10, direct=direct
            )
        shown["history"] = history_figures(fleet)
    return shown


async def tokens(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """kill -9 at every token, 0 to 64, of an answer of 64; for one answer, and for three at once."""
    shown = {}
    points = (0, 1, 31, 63, 64) if quick else tuple(range(ANSWER_TOKENS + 1))
    with FailureFleet(folder, worker_arguments=SLOW_STEPS) as fleet:
        fleet.start(4)
        for direct in (False, True):
            for branches in (1, 3):
                workload = Workload(
                    vocab_size=fleet.vocab_size, prefix_tokens=2000, max_tokens=ANSWER_TOKENS * branches
                )
                options = GenerateOptions(max_tokens=ANSWER_TOKENS, branches=branches)
                some = points if branches == 1 else points[:: max(1, len(points) // 8)]
                await fleet.until_ready()
                async with AsyncClient(fleet.router.address, direct=direct) as client:
                    shown[f"{way(direct=direct)}, {branches} at once"] = await kill_at_each_token(
                        fleet, client, some, request=workload.request(branches), options=options
                    )
        shown["history"] = history_figures(fleet)
    return shown


async def real(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """The same with SmolLM2-135M in float32, greedy: free text, and JSON by a schema."""
    shown = {}
    arguments = ("--dtype", "float32", "--threads", "1", "--max-total-tokens", "8192", "--grace-s", "0")
    kinds: dict[str, GenerateOptions] = {
        "free": GenerateOptions(max_tokens=ANSWER_TOKENS),
        "JSON": GenerateOptions(max_tokens=ANSWER_TOKENS, json_schema=SCHEMA, ignore_eos=False),
    }
    with FailureFleet(folder, worker_module=REAL_WORKER, worker_arguments=arguments) as fleet:
        fleet.start(2)
        for direct in (False, True):
            for kind, options in kinds.items():
                points = (0, 1, 5) if quick or kind == "JSON" or direct else tuple(range(ANSWER_TOKENS + 1))
                await fleet.until_ready()
                async with AsyncClient(fleet.router.address, direct=direct) as client:
                    workload = Workload(vocab_size=fleet.vocab_size, prefix_tokens=48, tail_tokens=8)
                    request = workload.request(1)
                    request.deadline_s, request.max_tokens = 120.0, ANSWER_TOKENS
                    shown[f"{way(direct=direct)}, {kind}"] = await kill_at_each_token(
                        fleet, client, points, request=request, options=options
                    )
        shown["history"] = history_figures(fleet)
    return shown


async def router(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """kill -9 the router, which its parent starts again."""
    shown = {}
    # Pools that hold a third of all prompts each: a router that knows nothing of them finds a third.
    arguments = (*QUICK_STEPS, "--max-total-tokens", "24000")
    with FailureFleet(folder, worker_arguments=arguments) as fleet:
        fleet.start(4)
        for direct in (False, True):
            await fleet.until_ready()
            shown[way(direct=direct)] = await kill_router_under_load(
                fleet, per_s=20, before_s=6, after_s=10, direct=direct
            )
        shown["history"] = history_figures(fleet)
    return shown


async def cancel(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """1,000 requests cancelled at random points, at the client, in the router, in the worker."""
    shown = {}
    with FailureFleet(folder, worker_arguments=SOME_STEPS) as fleet:
        fleet.start(3)
        for direct in (False, True):
            await fleet.until_ready()
            shown[way(direct=direct)] = await cancel_many(fleet, 100 if quick else 1000, direct=direct)
        shown["history"] = history_figures(fleet)
    return shown


async def refuse(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """All workers refuse for 20 s at 100 requests/s."""
    shown = {}
    with FailureFleet(folder, worker_arguments=QUICK_STEPS) as fleet:
        fleet.start(3)
        await fleet.until_ready()
        for direct in (False, True):
            for status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
                shown[f"{way(direct=direct)}, {status}"] = await refuse_under_load(
                    fleet, status=status, per_s=100, for_s=5 if quick else 20, direct=direct
                )
        shown["history"] = history_figures(fleet)
    return shown


async def churn(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """A worker killed or added every 2 s for 60 s under 1,500 requests."""
    shown = {}
    for direct in (False, True):
        within = folder / way(direct=direct)
        within.mkdir()
        with FailureFleet(within, worker_arguments=SLOW_STEPS) as fleet:
            fleet.start(4)
            await fleet.until_ready()
            shown[way(direct=direct)] = await churn_under_load(
                fleet, per_s=25, for_s=12 if quick else 60, every_s=2, direct=direct
            )
            shown[f"{way(direct=direct)}, history"] = history_figures(fleet)
    return shown


async def stall(folder: Path, *, quick: bool) -> dict[str, list[Figure]]:
    """SIGSTOP one of three workers in the middle of its streams, SIGCONT once they have ended."""
    shown = {}
    with FailureFleet(folder, worker_arguments=SLOW_STEPS) as fleet:
        fleet.start(3)
        for direct in (False, True):
            await fleet.until_ready()
            shown[way(direct=direct)] = await stall_under_streams(
                fleet, streams=9, max_tokens=400, direct=direct
            )
        shown["history"] = history_figures(fleet)
    return shown


async def start_dead(fleet: FailureFleet) -> None:
    """Those that were killed live again, and get requests."""
    for worker in fleet.workers:
        if not worker.is_running:
            await asyncio.to_thread(worker.start)
    await fleet.until_ready()


SCENARIOS: Final[dict[str, Scenario]] = {
    "kill": kill,
    "tokens": tokens,
    "real": real,
    "router": router,
    "cancel": cancel,
    "refuse": refuse,
    "churn": churn,
    "stall": stall,
}


def run(name: str, *, quick: bool) -> dict[str, list[Figure]]:
    """One scenario, in a folder that is kept when it fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"failures-{name}-"))
    scenario, began = SCENARIOS[name], time.monotonic()
    print(f"{name}: {(scenario.__doc__ or '').strip()}", flush=True)
    shown = asyncio.run(scenario(folder, quick=quick))
    for variant, figures in shown.items():
        print(f"  {variant}")
        for figure in figures:
            print(f"    {figure}")
    print(f"  took {time.monotonic() - began:.0f} s; logs in {folder}", flush=True)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="all of them unless given")
    parser.add_argument("--quick", action="store_true", help="small forms, a few minutes together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a figure misses its target")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    shown = {name: run(name, quick=options.quick) for name in options.scenario or SCENARIOS}
    if options.json:
        flat = {
            name: {variant: [asdict(one) for one in figures] for variant, figures in variants.items()}
            for name, variants in shown.items()
        }
        options.json.write_text(json.dumps(flat, indent=1))
    missed = [
        f"{name}, {variant}: {problem}"
        for name, variants in shown.items()
        for variant, figures in variants.items()
        for problem in failing(figures)
    ]
    for line in missed:
        print(f"missed: {line}")
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
