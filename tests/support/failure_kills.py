"""Scenarios of killing: a worker under load, a worker at every token of an answer, a router under load. Each returns its figures."""

import asyncio
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Final

from prefixmesh.client import AsyncClient, GenerateOptions
from tests.support.failure_figures import Figure, at_least, at_most, cached_share, none, told
from tests.support.failure_fleet import FailureFleet, RestartingParent, ServerProcess, until
from tests.support.failure_load import OpenLoad, Sent, Workload, run

NOTICED_S: Final = 1.0
"""After a worker's death, until no request is sent to it."""

SERVING_AGAIN_S: Final = 2.0
CACHE_BACK_S: Final = 5.0
CACHE_BACK_SHARE: Final = 0.9

COMPARED_S: Final = 4.0
"""Of requests before and after, whose cached shares are compared."""


def wrong_answers(fleet: FailureFleet, requests: Iterable[Sent]) -> list[Sent]:
    """Those whose tokens are not what an undisturbed answer begins with, or that are called whole and are not."""
    wrong = []
    for request in requests:
        expected = fleet.expected(request.prompt, request.max_tokens)
        tokens = request.tokens
        if tokens != expected[: len(tokens)] or (request.is_whole and len(tokens) != len(expected)):
            wrong.append(request)
    return wrong


async def kill_under_load(
    fleet: FailureFleet, *, per_s: float, before_s: float, after_s: float, direct: bool
) -> list[Figure]:
    """kill -9 the worker with the most streams in the middle of an open load."""
    workload = Workload(vocab_size=fleet.vocab_size)
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        load = OpenLoad([client], workload, per_s)
        load.start()
        await asyncio.sleep(before_s)
        victim = await _busiest(fleet, load)
        streaming = [one for one in load.requests if _streams_on(one, victim)]
        victim.kill()
        killed_at = time.monotonic()
        await asyncio.sleep(NOTICED_S)
        routed = (await fleet.views())[victim.name].routed
        await asyncio.sleep(after_s - NOTICED_S)
        late = (await fleet.views())[victim.name].routed - routed
        requests = await load.stop()
    errors = _print_errors(requests, killed_at)
    later = [one for one in requests if one.sent_s > killed_at]
    return [
        told("requests", len(requests)),
        at_least("streams that the kill interrupted", len(streaming), 1),
        none(f"sent to the dead worker later than {NOTICED_S:g} s", late),
        none("errors of requests that had no token", sum(not one.tokens for one in errors)),
        none("errors of streams that had begun", sum(bool(one.tokens) for one in errors)),
        none("interrupted streams that did not end whole", sum(not one.is_whole for one in streaming)),
        none("answers that differ from the undisturbed", len(wrong_answers(fleet, requests))),
        told("longest request, s", max(one.took_s for one in requests)),
        told("longest sent after the kill, s", max((one.took_s for one in later), default=0.0)),
    ]


async def kill_at_each_token(
    fleet: FailureFleet,
    client: AsyncClient,
    points: Sequence[int],
    *,
    request: Sent,
    options: GenerateOptions | None = None,
) -> list[Figure]:
    """For each of ``points`` kill the worker when its caller has so many tokens; the dead one comes back while the next is killed."""
    whole = await run(client, Sent(request.prompt, request.max_tokens, request.deadline_s), options=options)
    assert whole.is_whole, whole
    unequal: list[int] = []
    interruptions, restarting = 0, asyncio.create_task(asyncio.sleep(0))
    for point in points:
        await _until_one_can_be_spared(fleet)
        answer, victim = await _killed_at(fleet, client, point, request, options)
        if answer.outputs != whole.outputs:
            unequal.append(point)
            print(f"killed at token {point}: {answer}", flush=True)
        interruptions += answer.interruptions
        await restarting
        restarting = asyncio.create_task(_bring_back(fleet, victim))
    await restarting
    return [
        Figure("equal to the undisturbed output", len(points) - len(unequal), f"{len(points)}", not unequal),
        told("interruptions told", interruptions),
    ]


async def _until_one_can_be_spared(fleet: FailureFleet) -> None:
    async def two_are_ready() -> bool:
        views = await fleet.views()
        running = {worker.name for worker in fleet.workers if worker.is_running}
        ready = [name for name, view in views.items() if view.ready and name in running]
        return len(ready) > 1

    await until(two_are_ready, "two workers are ready")


async def _killed_at(
    fleet: FailureFleet,
    client: AsyncClient,
    point: int,
    request: Sent,
    options: GenerateOptions | None = None,
) -> tuple[Sent, ServerProcess]:
    victims: list[ServerProcess] = []

    def kill_when_due(seen: Sent) -> None:
        if seen.worker and len(seen.tokens) >= point and not victims:
            victims.append(fleet.worker(seen.worker))
            victims[0].kill()

    sent = Sent(request.prompt, request.max_tokens, request.deadline_s)
    answer = await run(client, sent, kill_when_due, options)
    assert victims, f"it ended before token {point}: {answer}"
    return answer, victims[0]


async def _bring_back(fleet: FailureFleet, worker: ServerProcess) -> None:
    worker.launch()
    await asyncio.to_thread(worker.wait_listening)
    await fleet.until_ready([worker])


async def kill_router_under_load(
    fleet: FailureFleet, *, per_s: float, before_s: float, after_s: float, direct: bool
) -> list[Figure]:
    """kill -9 the router, whose parent starts it again, under prompts that only some of the workers have cached."""
    workload = Workload(vocab_size=fleet.vocab_size, prefixes=48, prefix_tokens=1024, max_tokens=16)
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        for index in range(2 * workload.prefixes):
            await run(client, workload.request(-index))
        load = OpenLoad([client], workload, per_s)
        with RestartingParent(fleet.router) as parent:
            load.start()
            await asyncio.sleep(before_s)
            fleet.router.send(signal.SIGKILL)
            killed_at = time.monotonic()
            serving_s = await _until_serving(fleet, workload)
            await asyncio.sleep(max(0.0, killed_at + after_s - time.monotonic()))
            requests = await load.stop()
            restarts = parent.restarts
        await asyncio.to_thread(fleet.router.start)
    _print_errors(requests, killed_at)
    before = [one for one in requests if killed_at - COMPARED_S < one.sent_s < killed_at - 0.5]
    back_at = killed_at + CACHE_BACK_S
    after = [one for one in requests if back_at < one.sent_s < back_at + COMPARED_S]
    share_before, share_after = cached_share(before), cached_share(after)
    return [
        told("requests", len(requests)),
        Figure("restarts", restarts, "1", restarts == 1),
        at_most("until a new client is answered, s", serving_s, SERVING_AGAIN_S),
        none("errors of a client that was there before", sum(one.error is not None for one in requests)),
        none("answers that differ from the undisturbed", len(wrong_answers(fleet, requests))),
        told("cached share before", share_before),
        at_least(
            f"cached share {CACHE_BACK_S:g} s later, of that before",
            share_after / share_before if share_before else 0.0,
            CACHE_BACK_SHARE,
        ),
        told("longest request, s", max(one.took_s for one in requests)),
    ]


def _print_errors(requests: Iterable[Sent], killed_at: float) -> list[Sent]:
    """Those that ended in an error; the first of them are shown."""
    errors = [one for one in requests if one.error is not None]
    for one in errors[:5]:
        print(f"sent {one.sent_s - killed_at:+.2f} s from the kill: {one}")
    return errors


async def _until_serving(fleet: FailureFleet, workload: Workload) -> float:
    """Seconds until somebody who knows nothing of the restart is answered."""
    numbers = iter(range(10**6, 2 * 10**6))

    async def is_answered() -> bool:
        async with AsyncClient(fleet.router.address, timeout_s=5.0) as client:
            return (await run(client, workload.request(next(numbers)))).is_whole

    return await until(is_answered, "the router answers again", interval_s=0.02)


async def _busiest(fleet: FailureFleet, load: OpenLoad) -> ServerProcess:
    """The worker with the most streams that have tokens; waits until there is one."""
    found: list[ServerProcess] = []

    def some_stream() -> bool:
        counts = {
            worker.name: sum(_streams_on(one, worker) for one in load.requests) for worker in fleet.workers
        }
        name = max(counts, key=lambda one: counts[one])
        found[:] = [fleet.worker(name)]
        return counts[name] > 0

    await until(some_stream, "a worker streams", interval_s=0.002)
    return found[0]


def _streams_on(request: Sent, worker: ServerProcess) -> bool:
    return bool(request.tokens) and not request.ended_s and request.worker == worker.name
