"""What fails before its first token: made again elsewhere, within a budget and a deadline, and only where that can help."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prefixmesh.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
    UnavailableError,
)
from prefixmesh.router.attempts import Attempts
from prefixmesh.router.passage import Passage
from prefixmesh.router.retry_budget import LEAST_RETRIES, RETRY_SHARE
from prefixmesh.tokens import pack
from tests.support.fake_worker import FakeWorker, Script, deterministic_answer
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

PROMPT = range(200)
FULL = OverloadedError("the queue is full", 3.0)


def received(router: Router) -> int:
    return sum(len(worker.received) for worker in router.workers)


def busy(router: Router) -> FakeWorker:
    """The worker that has a request."""
    return next(worker for worker in router.workers if worker.running)


def open_for_others(router: Router, home: FakeWorker) -> None:
    for worker in router.workers:
        if worker is not home:
            worker.script.before_start.open()


async def is_clean(router: Router) -> None:
    await eventually(lambda: not any(router.loads()) and not any(w.running for w in router.workers))
    router.server.core.check_invariants()


async def test_a_worker_that_dies_before_the_first_token_is_replaced_unseen() -> None:
    """F29, F68: after Started, too; and the second worker draws with the seed that the caller was told."""
    async with running_router(3, script=Script(dies_before=0)) as router:
        answer = await router.generate(token_request(PROMPT))
        assert answer.token_ids == deterministic_answer(pack(PROMPT))
        assert answer.finished.usage.interruptions == 0, "nothing of it was told"
        assert received(router) == 2
        (second,) = [
            w.received[0] for w in router.workers if w.received and w.worker_id != answer.started.worker_id
        ]
        assert second.message.sampling.seed == answer.started.seed
        assert second.ticket.request_id == f"{answer.started.request_id}.2"
        assert not second.message.resumed_output
        await is_clean(router)


@pytest.mark.parametrize("error", [FULL, UnavailableError("it is draining")], ids=lambda error: error.reason)
async def test_the_first_worker_refuses_and_the_second_serves(error: PrefixmeshError) -> None:
    """F68, with the settings that are the default."""
    async with running_router(2) as router:
        refusing = router.workers[0]
        for number in range(6):
            refusing.script.error = error
            answer = await router.generate(token_request([number] * 200))
            assert answer.started.worker_id == "w1"
            refusing.script.error = None
        await is_clean(router)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("sampling.top_k", "too odd"),
        QueueTimeoutError("it waited as long as it may"),
        InternalError("a bug"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_callers_error_and_a_bug_are_never_tried_again(error: PrefixmeshError) -> None:
    async with running_router(3, script=Script(error=error)) as router:
        with pytest.raises(type(error), match=str(error)):
            await router.generate(token_request(PROMPT))
        assert received(router) == 1
        await is_clean(router)


async def test_oversized_prompts_open_no_breaker() -> None:
    """F63: 100 requests that a worker finds too long → every worker is still ready, and the next good request is served."""
    error = InvalidRequestError("prompt", "too long for this worker")
    async with running_router(2, script=Script(error=error)) as router:
        for _ in range(100):
            with pytest.raises(InvalidRequestError, match="too long"):
                await router.generate(token_request(PROMPT))
        assert len(router.server.core.registry.ready) == 2
        assert received(router) == 100
        for worker in router.workers:
            worker.script.error = None
        assert (await router.generate(token_request(PROMPT))).token_ids


async def test_attempts_are_at_most_a_fifth_more_than_requests_while_all_refuse() -> None:
    """F69: and the caller learns when to come back."""
    requests = 200
    async with running_router(3, script=Script(error=FULL)) as router:

        async def ask(number: int) -> None:
            with pytest.raises(OverloadedError) as caught:
                await router.generate(token_request([number] * 70))
            assert caught.value.retry_after_s == 3.0

        for start in range(0, requests, 20):
            await asyncio.gather(*(ask(start + number) for number in range(20)))
        assert requests < received(router) <= requests * (1 + RETRY_SHARE)
        assert len(router.server.core.registry.ready) == 3, "busy is not dead"
        router.workers[0].script.error = None
        assert (await router.generate(token_request(PROMPT))).token_ids
        await is_clean(router)


async def test_requests_of_a_dead_worker_wait_in_order_and_are_all_served() -> None:
    """More of them than may be tried again at once: none is lost, and a few at a time they go on."""
    count = 12
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.before_start.shut()
        answers = [asyncio.create_task(router.generate(token_request([n] * 70))) for n in range(count)]
        await eventually(lambda: sum(worker.running for worker in router.workers) == count)
        dead, alive = router.workers
        moved = dead.running
        assert moved > LEAST_RETRIES
        await dead.kill()
        await eventually(lambda: len(alive.received) == count - moved + LEAST_RETRIES)
        assert router.loads() == [0, count - moved + LEAST_RETRIES]
        alive.script.before_start.open()
        told = await asyncio.gather(*answers)
        assert {answer.started.worker_id for answer in told} == {alive.worker_id}
        assert [a.token_ids for a in told] == [deterministic_answer(pack([n] * 70)) for n in range(count)]
        await is_clean(router)


async def test_who_waits_for_a_place_is_held_to_its_deadline() -> None:
    """One deadline over all attempts; and a caller that leaves meanwhile leaves nothing behind."""
    async with running_router(2, max_wait_s=0.0) as router:  # nobody is refused for want of time
        for worker in router.workers:
            worker.script.before_start.shut()
        patient = [_ask(router, [n] * 70, timeout_s=60.0) for n in range(10)]
        await eventually(lambda: sum(worker.running for worker in router.workers) == 10)
        home = router.workers[0]
        late = [_ask(router, [50 + n] * 70, timeout_s=1.5) for n in range(10)]
        await eventually(lambda: sum(worker.running for worker in router.workers) == 20)
        await home.kill()
        with pytest.raises(DeadlineError):
            await late[0]
        await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(task.exception(), DeadlineError) for task in late)
        for task in patient:
            task.cancel()
        await asyncio.gather(*patient, return_exceptions=True)
        await is_clean(router)


def _ask(router: Router, ids: list[int], timeout_s: float) -> "asyncio.Task[Any]":
    return asyncio.create_task(router.generate(token_request(ids), timeout_s=timeout_s))


async def test_a_silent_worker_that_is_put_out_loses_its_request_to_another() -> None:
    """It accepted and says nothing: whoever finds it dead gives its calls up, and the work is not done twice."""
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.before_start.shut()
        answer = asyncio.create_task(router.generate(token_request(PROMPT)))
        await eventually(lambda: any(worker.running for worker in router.workers))
        home = busy(router)
        open_for_others(router, home)
        _link(router, home).give_up_calls("it was put out")
        assert (await answer).started.worker_id != home.worker_id
        await eventually(lambda: not home.running)
        assert home.cancelled == 1
        await is_clean(router)


async def test_with_more_than_half_down_the_rest_serves() -> None:
    async with running_router(3) as router:
        for worker in router.workers[:2]:
            await worker.kill()
        for number in range(10):
            answer = await router.generate(token_request([number] * 100))
            assert answer.started.worker_id == "w2"
        await is_clean(router)


def _link(router: Router, worker: FakeWorker) -> Any:
    pool: Any = router.server._pool
    return pool.link(worker.address)


Reach = Callable[[Router, Any], Any]


async def _nothing(router: Router, call: Any) -> None:
    """The request is queued at its first worker."""


async def _retried(router: Router, call: Any) -> None:
    home = busy(router)
    await home.kill()
    await eventually(lambda: any(w.running for w in router.workers if w is not home))


async def _streaming(router: Router, call: Any) -> None:
    for worker in router.workers:
        worker.script.before_start.open()
    await call.read()
    await call.read()


async def _resumed(router: Router, call: Any) -> None:
    await _streaming(router, call)
    await _retried(router, call)


@pytest.mark.parametrize("reach", [_nothing, _retried, _streaming, _resumed])
async def test_a_caller_that_leaves_in_any_state_leaves_nothing(reach: Reach) -> None:
    """Every call at a worker ended, every reservation settled, the retry's place given back."""
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.before_start.shut()
            worker.script.before_delta.shut()
        call = router.inference.Generate(token_request(PROMPT))
        await eventually(lambda: any(worker.running for worker in router.workers))
        await reach(router, call)
        call.cancel()
        await is_clean(router)


async def test_a_request_that_kills_who_takes_it_does_not_go_round() -> None:
    async with running_router(4) as router:
        for worker in router.workers:
            worker.script = replace(worker.script, dies_before=0)
        with pytest.raises(UnavailableError, match="failed this request"):
            await router.generate(token_request(PROMPT))
        assert received(router) == 2
        await eventually(lambda: len(router.server.core.registry.ready) == 2)
        await is_clean(router)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("text", "too long"), FULL], ids=lambda error: error.reason
)
async def test_a_refused_request_is_freed_at_once(error: PrefixmeshError) -> None:
    """Its prompt, of up to 64 MB, is not kept until the garbage collector happens to run."""
    async with running_router(2, script=Script(error=error)) as router:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(type(error)):
                    await router.generate(token_request(PROMPT))
            await router.list_workers()  # the router has let go of the others
            assert not [kept for kept in gc.get_objects() if type(kept) in (Passage, Attempts)]
        finally:
            gc.enable()
