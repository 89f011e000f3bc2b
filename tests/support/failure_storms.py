"""Scenarios of a fleet in trouble for a while: all workers refuse, workers come and go, one stands still. Each returns its figures."""

import asyncio
import random
import time
from typing import Final

from prefixmesh.client import AsyncClient
from prefixmesh.errors import OverloadedError, UnavailableError
from tests.support.failure_figures import Figure, at_least, at_most, none, percentile, told
from tests.support.failure_fleet import FailureFleet, ServerProcess, stopped, until
from tests.support.failure_kills import wrong_answers
from tests.support.failure_load import OpenLoad, Sent, Workload, run
from tests.support.scraping import scrape

MOST_ATTEMPTS: Final = 1.2
"""Of requests that all workers refuse, per request."""

RECOVERED_S: Final = 5.0
STALL_NOTICED_S: Final = 12.0
"""A router's probes take 7 s at most, a caller's connection to a worker 10 s (gRPC's ping timeout); and a machine has other things to do."""

CHURN_DEADLINE_S: Final = 20.0
LATE_S: Final = 1.0
"""What the end of a deadline may take to be seen by a loop that has many others to look after."""

DONE_TWICE_SHARE: Final = 0.1
"""Of what was left of a stalled worker's streams: a worker that wakes computes a step or two before it hears that nobody waits."""


async def refuse_under_load(
    fleet: FailureFleet,
    *,
    status: str,
    per_s: float,
    for_s: float,
    direct: bool,
    after_s: float = RECOVERED_S + 2.0,
    most: float = MOST_ATTEMPTS,
) -> list[Figure]:
    """Every worker refuses for a while, and then takes requests again, which is looked at for ``after_s``. ``most`` attempts a request
    are right: requests from just before it count for the budget, too."""
    workload = Workload(vocab_size=fleet.vocab_size, prefix_tokens=128, tail_tokens=32, max_tokens=4)
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        counted = await _calls_ended(fleet)
        warm = [workload.request(-1 - index) for index in range(20)]
        await asyncio.gather(*(run(client, one) for one in warm))
        fleet.set_faults({"kind": "refuse", "status": status})
        await asyncio.sleep(0.2)
        load = OpenLoad([client], workload, per_s)
        load.start()
        await asyncio.sleep(for_s)
        refused = await load.stop()
        attempts = await _calls_ended(fleet) - counted
        fleet.set_faults()
        over_at = time.monotonic()
        load = OpenLoad([client], workload, per_s, first_index=10**6)
        load.start()
        await asyncio.sleep(after_s)
        after = await load.stop()
    answered = [one for one in after if one.is_whole]
    late = [one for one in after if one.sent_s > over_at + RECOVERED_S]
    errors = [one.error for one in refused]
    strange = [error for error in errors if not isinstance(error, OverloadedError | UnavailableError)]
    for error in strange[:5]:
        print(repr(error))
    return [
        told("requests", len(refused)),
        at_least("attempts", attempts, 1),
        at_most("attempts a request", attempts / len([*warm, *refused]), most),
        none("that ended in another way than a refusal", len(strange)),
        told("refused within, s (99 of 100)", percentile([one.took_s for one in refused], 0.99)),
        at_most(
            "first answer after it, s",
            min((one.ended_s for one in answered), default=over_at + 99) - over_at,
            RECOVERED_S,
        ),
        none(f"errors later than {RECOVERED_S:g} s after it", sum(one.error is not None for one in late)),
    ]


async def _calls_ended(fleet: FailureFleet) -> float:
    """Calls that the workers have seen end, however."""
    total = 0.0
    for worker in fleet.workers:
        if worker.is_running:
            page = await scrape(worker.metrics_url)
            total += sum(page.by("prefixmesh_requests_total", "outcome").values())
    return total


async def churn_under_load(
    fleet: FailureFleet, *, per_s: float, for_s: float, every_s: float, direct: bool, seed: int = 7
) -> list[Figure]:
    """Workers are killed and come back, or new ones join, in turns, under an open load."""
    workload = Workload(vocab_size=fleet.vocab_size, deadline_s=CHURN_DEADLINE_S)
    rng = random.Random(seed)
    kills = 0
    joining: list[asyncio.Task[None]] = []
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        load = OpenLoad([client], workload, per_s)
        load.start()
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            await asyncio.sleep(every_s)
            alive = [worker for worker in fleet.workers if worker.is_running]
            if (kills + len(joining)) % 2 == 0 and len(alive) > 2:
                rng.choice(alive).kill()
                kills += 1
            else:
                joining.append(asyncio.create_task(_join(fleet, rng)))
        requests = await load.stop()
        await asyncio.gather(*joining)
    errors = [one for one in requests if one.error is not None]
    for one in errors[:5]:
        print(one)
    late = [one for one in requests if one.took_s > one.deadline_s + LATE_S]
    return [
        told("requests", len(requests)),
        told("workers killed", kills),
        told("workers that joined", len(joining)),
        none("requests that did not end within their deadline", len(late)),
        told("requests that ended in an error", len(errors)),
        at_least("share answered", 1 - len(errors) / len(requests), 0.99),
        at_least("interrupted and carried on", sum(bool(one.interruptions) for one in requests), 1),
        none("answers that differ from the undisturbed", len(wrong_answers(fleet, requests))),
        told("longest request, s", max(one.took_s for one in requests)),
    ]


async def _join(fleet: FailureFleet, rng: random.Random) -> None:
    """One that died comes back at its address, or a new one joins."""
    dead = [worker for worker in fleet.workers if worker.address and not worker.is_running]
    worker = rng.choice(dead) if dead and rng.random() < 0.5 else fleet.add_worker()
    is_new = not worker.address
    worker.launch()
    await asyncio.to_thread(worker.wait_listening)
    if is_new:
        await fleet.tell_router_of(worker)


async def stall_under_streams(
    fleet: FailureFleet, *, streams: int, max_tokens: int, direct: bool
) -> list[Figure]:
    """SIGSTOP one worker in the middle of its streams, SIGCONT when they have ended elsewhere."""
    workload = Workload(vocab_size=fleet.vocab_size, max_tokens=max_tokens, deadline_s=60.0)
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        requests = [workload.request(index) for index in range(streams)]
        running = [asyncio.create_task(run(client, one)) for one in requests]
        victim = await _one_that_streams(fleet, requests)
        stuck = [one for one in requests if one.worker == victim.name]
        left = sum(max_tokens - len(one.tokens) for one in stuck)
        computed = await _computed(victim)
        with stopped(victim):
            await asyncio.wait(running)
        back_s = await until(lambda: _is_ready(fleet, victim), "the worker is back")
        await until(lambda: _is_idle(victim), "the woken worker has nothing to do")
        twice = await _computed(victim) - computed
    return [
        at_least("streams on the worker that stood still", len(stuck), 1),
        none("streams that did not end whole", sum(not one.is_whole for one in requests)),
        none("answers that differ from the undisturbed", len(wrong_answers(fleet, requests))),
        at_most("longest gap in a stream, s", max(one.longest_gap_s for one in requests), STALL_NOTICED_S),
        at_most("computed by the woken worker, of what was left", twice / max(left, 1), DONE_TWICE_SHARE),
        told("until the woken worker gets requests again, s", back_s),
    ]


async def _one_that_streams(fleet: FailureFleet, requests: list[Sent]) -> ServerProcess:
    """A worker with streams, once every stream has some tokens."""
    await until(lambda: all(len(one.tokens) > 4 for one in requests), "all streams have begun")
    return fleet.worker(requests[0].worker)


async def _computed(worker: ServerProcess) -> float:
    return (await scrape(worker.metrics_url)).value("prefixmesh_completion_tokens_total")


async def _is_ready(fleet: FailureFleet, worker: ServerProcess) -> bool:
    return bool((await fleet.views())[worker.name].ready)


async def _is_idle(worker: ServerProcess) -> bool:
    page = await scrape(worker.metrics_url)
    return (
        page.value("prefixmesh_requests_in_flight") == page.value("prefixmesh_engine_running_requests") == 0
    )
