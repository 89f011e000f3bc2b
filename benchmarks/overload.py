"""A fleet under three times the load that it can bear: how much of its work is still in time, how soon the rest is told no, what it costs.

One router and some fake workers as processes of their own (``prefixmesh.sim.fake_worker``: all is real but for the model, whose steps take
the time that they are told to). From a client, over gRPC, one phase after the other, each request with a deadline:

- *capacity*: as many outstanding requests as fill every place twice, each followed by the next: what the fleet can do;
- *before*: Poisson arrivals at 0.7 of that, which a queue bears with little waiting;
- *overload*: three times the capacity, some of it urgent and some of it in the background;
- *after*: as before, from the moment on at which the last deadline of the overload is over.

*Goodput* is what has ended before its deadline, by time; a refusal's latency is from the call to its RESOURCE_EXHAUSTED. Memory is what the
processes have resident, each second. Steps are long on purpose: two cores shall not be what is measured.

    python benchmarks/overload.py [--workers 4] [--overload-s 60] [--direct] [--json FILE] [--check]
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from prefixmesh.client import AsyncClient
from prefixmesh.errors import DeadlineError, OverloadedError, PrefixmeshError

STEP_MS, DECODE_MS, PREFILL_MS = 50.0, 2.0, 0.1
"""Of a step, for each answer in it, and for each prompt token."""

PLACES, PROMPT_TOKENS, ANSWER_TOKENS = 8, 256, 16
VOCABULARY: Final = range(1000, 40000)
LOAD_SHARE, OVERLOAD = 0.7, 3.0
PRIORITIES: Final = {"urgent": (5, 0.2), "normal": (0, 0.6), "background": (-5, 0.2)}
"""Each with its share of the overload."""

LEAST_GOODPUT, MOST_REFUSAL_MS, MOST_CHANGE, MOST_GROWTH = 0.9, 50.0, 0.1, 0.05
"""What ``--check`` holds a run to: by issue, and memory flat to a twentieth."""

REPORT_S: Final = 3.0
"""For workers to be seen, and for a phase to show in what routers know."""


@dataclass
class Outcome:
    """One request."""

    kind: str
    began: float
    ended: float = 0.0
    status: str = ""
    """``ok``, ``refused``, ``late``, or an error's reason."""

    retry_after_s: float | None = None
    predicted_ms: float | None = None
    """Until the first token, by the router's decision; and what came true."""

    first_token_ms: float | None = None

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1e3


@dataclass
class Phase:
    """What has become of all requests of one phase."""

    name: str
    began: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)

    def of(self, status: str, kind: str | None = None) -> list[Outcome]:
        return [one for one in self.outcomes if one.status == status and kind in (None, one.kind)]

    def per_s(self, seconds: float, kind: str | None = None) -> float:
        """Requests that ended well within so many seconds of the phase's beginning, by second."""
        return sum(one.ended - self.began <= seconds for one in self.of("ok", kind)) / seconds


@contextmanager
def server(name: str, module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Run ``python -m module``; yields the address it says it listens on and its process's id, and ends it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if " listening on " in line:
                yield line.rsplit(" ", 1)[1].strip(), process.pid
                break
        else:
            raise SystemExit(f"{name} ended before it was listening")
    finally:
        process.terminate()
        process.wait()


class Load:
    """Requests at one router, and the memory of its fleet meanwhile."""

    def __init__(self, client: AsyncClient, deadline_s: float, pids: dict[str, int], seed: int) -> None:
        self._client = client
        self._deadline_s = deadline_s
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._rng = random.Random(seed)
        self.memory: list[tuple[float, dict[str, int]]] = []
        """Bytes of each process, by the second."""

    async def capacity(self, outstanding: int, warm_s: float, seconds: float) -> float:
        """Answers by the second while so many requests are always under way."""
        phase, ends = Phase("capacity"), time.monotonic() + warm_s + seconds

        async def one_after_the_other() -> None:
            while time.monotonic() < ends:
                await self._ask(phase, "normal", timeout_s=60.0)

        await asyncio.gather(*(one_after_the_other() for _ in range(outstanding)))
        failed = [one.status for one in phase.outcomes if one.status != "ok"]
        assert not failed, f"requests without a deadline failed: {Counter(failed)}"
        counted = [one for one in phase.of("ok") if warm_s <= one.ended - phase.began <= warm_s + seconds]
        return len(counted) / seconds

    async def poisson(self, name: str, rate: float, seconds: float, mix: Sequence[str]) -> Phase:
        """Open loop: arrivals come whatever becomes of those before them. Returns when the last has ended."""
        phase = Phase(name)
        tasks = set()
        due = phase.began
        while (due := due + self._rng.expovariate(rate)) < phase.began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.add(
                asyncio.create_task(self._ask(phase, self._rng.choice(mix), timeout_s=self._deadline_s))
            )
        if tasks:
            await asyncio.wait(tasks)
        return phase

    async def watch_memory(self) -> None:
        for second in itertools.count():
            rss = {name: process.memory_info().rss for name, process in self._processes.items()}
            self.memory.append((time.monotonic(), rss))
            del second
            await asyncio.sleep(1.0)

    async def _ask(self, phase: Phase, kind: str, timeout_s: float) -> None:
        outcome = Outcome(kind, time.monotonic())
        try:
            answer = await self._client.generate(
                self._rng.choices(VOCABULARY, k=PROMPT_TOKENS),
                max_tokens=ANSWER_TOKENS,
                ignore_eos=True,
                temperature=0.0,
                priority=PRIORITIES[kind][0],
                timeout_s=timeout_s,
            )
            outcome.status = "ok"
            outcome.first_token_ms = (answer.first_token_s or 0.0) * 1e3
            if answer.started.routing is not None:
                outcome.predicted_ms = answer.started.routing.predicted_first_token_ms
        except OverloadedError as error:
            outcome.status, outcome.retry_after_s = "refused", error.retry_after_s
        except DeadlineError:
            outcome.status = "late"
        except PrefixmeshError as error:
            outcome.status = error.reason
        outcome.ended = time.monotonic()
        phase.outcomes.append(outcome)


async def measure(address: str, pids: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    mix = [kind for kind, (_, share) in PRIORITIES.items() for _ in range(round(share * 100))]
    async with AsyncClient(address, direct=options.direct) as client:
        load = Load(client, options.deadline_s, pids, options.seed)
        await asyncio.sleep(REPORT_S)
        watching = asyncio.create_task(load.watch_memory())
        capacity = await load.capacity(2 * PLACES * options.workers, 5.0, options.calm_s)
        before = await load.poisson("before", LOAD_SHARE * capacity, options.calm_s, ["normal"])
        overload = await load.poisson("overload", OVERLOAD * capacity, options.overload_s, mix)
        after = await load.poisson("after", LOAD_SHARE * capacity, options.calm_s, ["normal"])
        watching.cancel()
    return figures(capacity, before, overload, after, load, options)


def figures(
    capacity: float, before: Phase, overload: Phase, after: Phase, load: Load, options: argparse.Namespace
) -> dict[str, Any]:
    refusals = sorted(one.ms for one in overload.of("refused"))
    told = [one.retry_after_s for one in overload.of("refused") if one.retry_after_s is not None]
    p50_before, p50_after = (statistics.median(one.ms for one in phase.of("ok")) for phase in (before, after))
    return {
        "capacity_per_s": round(capacity, 2),
        "goodput": round(overload.per_s(options.overload_s) / capacity, 3),
        "goodput_by_priority": {
            kind: round(overload.per_s(options.overload_s, kind) / (OVERLOAD * share * capacity), 3)
            for kind, (_, share) in PRIORITIES.items()
        },
        "outcomes": {
            phase.name: dict(Counter(one.status for one in phase.outcomes))
            for phase in (before, overload, after)
        },
        "refusal_ms": {"p50": _at(refusals, 0.5), "p99": _at(refusals, 0.99), "max": _at(refusals, 1.0)},
        "retry_after_s": {"told": len(told), "p50": _at(sorted(told), 0.5)},
        "answer_ms": {
            "before_p50": round(p50_before, 1),
            "overload_p50": round(statistics.median(one.ms for one in overload.of("ok")), 1),
            "after_p50": round(p50_after, 1),
        },
        "first_token_error_ms": {phase.name: _errors(phase) for phase in (before, overload, after)},
        "after_over_before": round(p50_after / p50_before, 3),
        "memory_mib": _memory(load.memory, overload.began, options.overload_s),
    }


def _at(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def _errors(phase: Phase) -> dict[str, float | None]:
    """What came true, less what was predicted: at the 10th, 50th and 90th hundredth."""
    errors = sorted(
        one.first_token_ms - one.predicted_ms
        for one in phase.of("ok")
        if one.first_token_ms is not None and one.predicted_ms is not None
    )
    return {f"p{share}": _at(errors, share / 100) for share in (10, 50, 90)}


def _memory(
    samples: Sequence[tuple[float, dict[str, int]]], began: float, seconds: float
) -> dict[str, list[float]]:
    """The most that each process had in each third of the overload."""
    thirds: list[dict[str, float]] = [{}, {}, {}]
    for when, rss in samples:
        third = int(3 * (when - began) / seconds)
        if when >= began and third < len(thirds):
            for name, size in rss.items():
                thirds[third][name] = max(thirds[third].get(name, 0.0), size / 2**20)
    return {name: [round(third.get(name, 0.0), 1) for third in thirds] for name in samples[0][1]}


def failures(found: dict[str, Any]) -> list[str]:
    """What of a run is not as it should be."""
    grown = {
        name: thirds
        for name, thirds in found["memory_mib"].items()
        if thirds[-1] > thirds[0] * (1.0 + MOST_GROWTH)
    }
    wrong = {
        f"goodput at least {LEAST_GOODPUT:.0%} of capacity": found["goodput"] >= LEAST_GOODPUT,
        f"refusals within {MOST_REFUSAL_MS:.0f} ms": (found["refusal_ms"]["p99"] or 0.0) <= MOST_REFUSAL_MS,
        f"afterwards within {MOST_CHANGE:.0%} of before": found["after_over_before"] <= 1.0 + MOST_CHANGE,
        f"memory flat (grown: {grown})": not grown,
    }
    return [claim for claim, holds in wrong.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=4.0)
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--calm-s", type=float, default=20.0)
    parser.add_argument(
        "--max-wait-s", type=float, default=300.0, help="the router's; 0 refuses nobody, to compare"
    )
    parser.add_argument("--direct", action="store_true", help="stream from the workers themselves")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a figure is not as it should be"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shared = ("--fleet-secret-file", f"{folder}/secret")
        times = (
            "--step-ms",
            f"{STEP_MS}",
            "--decode-ms-per-sequence",
            f"{DECODE_MS}",
            "--prefill-ms-per-token",
            f"{PREFILL_MS}",
        )
        workers = {
            name: stack.enter_context(
                server(
                    name,
                    "prefixmesh.sim.fake_worker",
                    "--worker-id",
                    name,
                    "--max-running-requests",
                    f"{PLACES}",
                    *times,
                    *shared,
                )
            )
            for name in (f"worker-{number}" for number in range(options.workers))
        }
        flags = [flag for address, _ in workers.values() for flag in ("--worker", address)]
        address, pid = stack.enter_context(
            server("router", "prefixmesh.router", "--max-wait-s", f"{options.max_wait_s}", *flags, *shared)
        )
        pids = {"router": pid} | {name: pid for name, (_, pid) in workers.items()}
        found = asyncio.run(measure(address, pids, options))
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found))
    wrong = failures(found)
    for claim in wrong:
        print(f"not so: {claim}", file=sys.stderr)
    if options.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
