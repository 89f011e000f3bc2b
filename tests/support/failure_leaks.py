"""Nothing stuck: what a fleet of processes holds, and a thousand requests cancelled by whoever can, after which it must hold what it did."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final

import psutil

from prefixmesh.client import AsyncClient
from prefixmesh.errors import CancelledError
from prefixmesh.history_check import HistoryChecker
from prefixmesh.history_file import read_history
from prefixmesh.history_report import HistoryReport
from tests.support.failure_cancelling import cancel_somehow
from tests.support.failure_figures import Figure, at_least, none, told
from tests.support.failure_fleet import FailureFleet, until
from tests.support.failure_kills import wrong_answers
from tests.support.failure_load import Sent, Workload, run
from tests.support.scraping import scrape

Gauges = dict[str, float]

QUIET_WITHIN_S: Final = 20.0
_VIEW: Final = ("in_flight", "work_ms", "running_requests", "queued_requests", "uncached_tokens")
_METRICS: Final = (
    "prefixmesh_requests_in_flight",
    "prefixmesh_engine_running_requests",
    "prefixmesh_engine_queued_requests",
    "prefixmesh_engine_double_releases_total",
)


async def gauges(fleet: FailureFleet) -> Gauges:
    """Everything that a request holds while it is under way: what the router counts of each worker, what each worker counts itself, pages
    that are locked, but for those of pins, or some request's own, and the open files of every process, connections among them."""
    held: Gauges = {}
    for name, view in (await fleet.views()).items():
        held |= {f"{name} {field}": getattr(view, field) for field in _VIEW}
    for worker in fleet.workers:
        if not worker.is_running:
            continue
        page = await scrape(worker.metrics_url)
        held |= {f"{worker.name} {metric}": page.value(metric) for metric in _METRICS}
        pages = page.by("prefixmesh_kv_pages", "state")
        held[f"{worker.name} pages private"] = pages["private"]
        # Pages of pins are protected, too: hot prefixes are pinned while requests come, and stay so for a while.
        pinned = page.by("prefixmesh_pinned_pages", "tier")["device"]
        held[f"{worker.name} pages protected"] = max(0.0, pages["protected"] - pinned)
        lost = page.value("prefixmesh_kv_pool_pages") - sum(pages.values())
        held[f"{worker.name} pages of nobody"] = lost
    workers = [worker for worker in fleet.workers if worker.is_running]
    between = _kept_between([worker.pid for worker in workers])
    for server in (fleet.router, *workers):
        kept = between.get(server.pid, 0)
        held[f"{server.name} open files"] = psutil.Process(server.pid).num_fds() - kept
    return held


def _kept_between(pids: Sequence[int]) -> dict[int, int]:
    """By process, its connections to others of these: workers keep one that has copied, which no request holds."""
    ends = {pid: psutil.Process(pid).net_connections("tcp") for pid in pids}
    owner = {end.laddr: pid for pid, found in ends.items() for end in found if end.raddr}
    return {pid: sum(owner.get(end.raddr, pid) != pid for end in found) for pid, found in ends.items()}


async def not_given_back(fleet: FailureFleet, before: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Gauges that have not come back to what they were, after a while in which they must: what they were and are."""
    different: dict[str, tuple[float, float]] = {}

    async def is_back() -> bool:
        now = await gauges(fleet)
        different.clear()
        different.update({name: (before[name], now[name]) for name in before if now[name] > before[name]})
        return not different

    with suppress(AssertionError):
        await until(is_back, "every gauge is back", QUIET_WITHIN_S, interval_s=0.2)
    return different


async def cancel_many(
    fleet: FailureFleet, requests: int, *, direct: bool, at_once: int = 40, seed: int = 12
) -> list[Figure]:
    """So many requests, each cancelled at a random point by one of the three."""
    workload = Workload(vocab_size=fleet.vocab_size, prefix_tokens=256, max_tokens=24)
    rng = random.Random(seed)
    ended: list[Sent] = []
    numbers = iter(range(requests))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(fleet.router.address, direct=direct))
        at_worker = {
            worker.name: await stack.enter_async_context(AsyncClient(worker.address))
            for worker in fleet.workers
        }
        await asyncio.gather(*(one.list_models() for one in at_worker.values()))
        # A process that has served once has its threads and connections: what it holds then is what it holds.
        warm = [workload.request(-1 - index) for index in range(4 * len(fleet.workers))]
        await asyncio.gather(*(run(client, one) for one in warm))
        before = await _quiet_gauges(fleet)

        async def go_on() -> None:
            for number in numbers:
                request = workload.request(number)
                ended.append(request)
                await cancel_somehow(client, lambda sent: at_worker[sent.worker], request, rng)

        await asyncio.gather(*(go_on() for _ in range(at_once)))
        left = await not_given_back(fleet, before)
    for name, (was, now) in left.items():
        print(f"not given back: {name} was {was:g}, is {now:g}")
    strange = [one for one in ended if one.error and not isinstance(one.error, CancelledError)]
    for one in strange[:5]:
        print(one)
    return [
        told("requests", len(ended)),
        at_least("cancelled before their end", sum(not one.is_whole for one in ended), requests // 2),
        none("other errors", len(strange)),
        none("that outlived their deadline", sum(one.took_s > one.deadline_s for one in ended)),
        none("answers that differ from the undisturbed", len(wrong_answers(fleet, ended))),
        none("gauges that did not come back", len(left)),
    ]


async def _quiet_gauges(fleet: FailureFleet) -> Gauges:
    found: Gauges = {}

    async def is_idle() -> bool:
        found.clear()
        found.update(await gauges(fleet))
        return not any(value for name, value in found.items() if not name.endswith("open files"))

    await until(is_idle, "nothing runs")
    return found


def check_history(fleet: FailureFleet) -> HistoryReport:
    """What the router noted of all its requests: each ended once, each token told once, each reservation given back."""
    checker = HistoryChecker()
    for line in read_history(fleet.history_file):
        checker.take(*line)
    return checker.finish()


def history_figures(fleet: FailureFleet) -> list[Figure]:
    """Of everything since the fleet began."""
    report = check_history(fleet)
    for violation in report.violations[:5]:
        print(violation)
    return [
        told("requests in the history", report.requests),
        none("violations in it", report.violations_in_all),
    ]
