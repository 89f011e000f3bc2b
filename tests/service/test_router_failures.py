"""What a router does when callers leave, workers die, and time runs out: nothing is left behind, nothing ends silently."""

import asyncio
import random
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.errors import DeadlineError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.support.fake_worker import ANSWER_TOKENS, FakeWorker, Script
from tests.support.router_kit import Router, headers, running_router, token_request
from tests.support.servers import eventually

PROMPT = range(200)


async def started(call: Any) -> pb.Started:
    message = await call.read()
    assert message.HasField("started")
    return message.started  # type: ignore[no-any-return]


def held_script() -> Script:
    """Answers stop after the first delta, until the gate is opened."""
    script = Script()
    script.before_delta.shut()
    return script


async def test_load_is_exactly_one_from_decision_to_end() -> None:
    """F3: a worker blocked before its first byte has a load of 1; so at every chunk; 0 after the stream closes."""
    script = held_script()
    script.before_start.shut()
    async with running_router(1, script=script) as router:
        (entry,) = router.server.core.registry
        call = router.inference.Generate(token_request(PROMPT))
        await eventually(lambda: script.before_start.waiting == 1)
        assert router.loads() == [1]
        view = (await router.list_workers())[0]
        assert (view.in_flight, view.work_ms) == (1, entry.load.work_ms)
        assert entry.load.prefill_ms == pytest.approx(100.0)
        script.before_start.open()
        await started(call)
        for _ in range(ANSWER_TOKENS - 1):
            assert (await call.read()).HasField("delta")
            assert router.loads() == [1]
            assert entry.load.prefill_ms == 0.0
            script.before_delta.let_one()
        assert (await call.read()).HasField("delta")
        assert (await call.read()).HasField("finished")
        assert router.loads() == [0]
        assert await call.read() is grpc.aio.EOF
        view = (await router.list_workers())[0]
        assert (view.in_flight, view.work_ms, view.routed) == (0, 0.0, 1)


@pytest.mark.slow
async def test_three_hundred_slow_requests_are_all_under_way_at_their_worker() -> None:
    """F8: nothing between caller and worker holds some of them back, unseen."""
    script = held_script()
    async with running_router(1, script=script) as router:
        calls = [
            asyncio.create_task(router.generate(token_request([seed % 256, seed // 256]), timeout_s=600.0))
            for seed in range(300)
        ]
        await eventually(lambda: script.before_delta.waiting == 300, timeout_s=30.0)
        assert (router.loads(), router.workers[0].running) == ([300], 300)
        script.before_delta.open()
        answers = await asyncio.gather(*calls)
        assert all(answer.finished for answer in answers)
        assert router.loads() == [0]


async def test_silent_worker_is_told_when_the_client_leaves() -> None:
    """F13: a worker goes silent after its first delta, the client leaves → within 1 s the load is 0 and the worker was told."""
    async with running_router(1, script=held_script()) as router:
        call = router.inference.Generate(token_request(PROMPT))
        await started(call)
        await call.read()
        assert router.loads() == [1]
        left = time.monotonic()
        call.cancel()
        await eventually(lambda: router.loads() == [0] and router.workers[0].cancelled == 1)
        assert time.monotonic() - left < 1.0
        assert router.workers[0].running == 0


async def test_disconnect_before_the_first_message_stops_the_worker() -> None:
    """F17: a client that leaves while its request is queued stops it there, through the router."""
    script = Script()
    script.before_start.shut()
    async with running_router(1, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT))
        await eventually(lambda: script.before_start.waiting == 1)
        call.cancel()
        await eventually(lambda: router.loads() == [0] and router.workers[0].running == 0)
        assert len(router.server.core.view.predictions) == 0


async def test_reader_that_stops_reading_and_leaves_is_noticed() -> None:
    """A client that lets its window fill and then leaves does not hold its worker for ever."""
    script = Script(answer=lambda tokens: [1] * 2_000, decode=lambda ids: "x" * 20_000)
    async with running_router(1, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT))
        await started(call)
        await eventually(lambda: router.loads() == [1])
        call.cancel()
        await eventually(lambda: router.loads() == [0] and router.workers[0].running == 0)


async def test_many_cancels_leave_nothing_behind() -> None:
    """F12 (200 of them): requests cancelled at random points → loads back at exactly zero, no call left on a worker, invariants hold."""
    rng = random.Random(1)
    async with running_router(2) as router:
        for _ in range(10):
            calls = [
                router.inference.Generate(token_request([rng.randrange(3)] * 200 + [i] * 70))
                for i in range(20)
            ]
            for call in calls:
                for _ in range(rng.randrange(4)):
                    await call.read()
                call.cancel()
        await eventually(lambda: router.loads() == [0, 0])
        await eventually(lambda: all(worker.running == 0 for worker in router.workers))
        router.server.core.check_invariants()
        assert [entry.load.work_ms for entry in router.server.core.registry] == [0.0, 0.0]


async def test_deadline_passes_through_both_hops() -> None:
    """F22: with a deadline of 200 ms and a worker that needs longer, the worker is stopped by 300 ms."""
    async with running_router(1, script=held_script()) as router:
        await router.generate(token_request([1], sampling=pb.Sampling(max_tokens=1)))  # connections are warm
        begun = time.monotonic()
        with pytest.raises(DeadlineError):
            await router.generate(token_request(PROMPT), timeout_s=0.2)
        await eventually(lambda: router.workers[0].running == 0)
        assert time.monotonic() - begun < 0.3
        told = router.workers[0].received[-1].time_left_s
        assert told is not None
        assert 0 < told < 0.21  # gRPC rounds deadlines up
        await eventually(lambda: router.loads() == [0])


async def test_abort_stops_the_callers_own_request_and_no_other() -> None:
    """F18: abort by the id that Started told ends the stream in CANCELLED; other tenants' ids, unknown ids, a second time: nothing."""
    script = held_script()
    async with running_router(1, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT), metadata=headers("mine"))
        request_id = (await started(call)).request_id
        await call.read()
        abort = router.inference.Abort
        await abort(pb.AbortRequest(request_id="unknown"), metadata=headers("mine"))
        await abort(pb.AbortRequest(request_id=request_id), metadata=headers("other"))
        assert router.loads() == [1]
        await abort(pb.AbortRequest(request_id=request_id), metadata=headers("mine"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "aborted" in (caught.value.details() or "")
        await abort(pb.AbortRequest(request_id=request_id), metadata=headers("mine"))
        assert router.loads() == [0]
        await eventually(lambda: router.workers[0].running == 0)


async def test_dead_worker_is_replaced_before_the_first_message() -> None:
    """F68: the first worker is gone → the second serves, the first is not ready at once, and comes back by itself."""
    async with running_router(2) as router:
        first = await router.generate(token_request(PROMPT))
        home = worker_named(router, first.started.worker_id)
        await home.kill()
        again = await router.generate(token_request(PROMPT))
        assert again.started.worker_id != home.worker_id
        await eventually(lambda: len(router.server.core.registry.ready) == 1)
        await home.restart()
        await router.until_ready(2)
        assert router.loads() == [0, 0]


async def test_request_waiting_on_a_worker_that_dies_moves_on() -> None:
    """A worker killed before it answered anything: the caller notices nothing but the other worker's name."""
    async with running_router(2) as router:
        for worker in router.workers:
            worker.script.before_start.shut()
        answer = asyncio.create_task(router.generate(token_request(PROMPT)))
        await eventually(lambda: any(worker.running for worker in router.workers))
        home = next(worker for worker in router.workers if worker.running)
        for worker in router.workers:
            if worker is not home:
                worker.script.before_start.open()
        await home.kill()
        assert (await answer).started.worker_id != home.worker_id


async def test_worker_that_dies_in_the_middle_ends_the_stream_in_an_error() -> None:
    """F67 (first form): after the first message nothing is tried again; the caller gets UNAVAILABLE that names the worker."""
    script = held_script()
    async with running_router(1, script=script) as router:
        call = router.inference.Generate(token_request(PROMPT))
        await started(call)
        await call.read()
        await router.workers[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "w0" in (caught.value.details() or "")
        assert router.loads() == [0]
        with pytest.raises(UnavailableError, match="w0 cannot be reached"):
            await router.generate(token_request(PROMPT))


async def test_stream_without_an_end_is_an_error() -> None:
    """A worker that ends its stream with OK and no Finished does not make an answer end silently."""
    async with running_router(1, script=Script(ends_early=True)) as router:
        with pytest.raises(UnavailableError, match="ended the stream before"):
            await router.generate(token_request(PROMPT))
        assert router.loads() == [0]


async def test_busy_fleet_is_not_flooded() -> None:
    """F69 (first form): workers that refuse with UNAVAILABLE are tried at most twice for one request."""
    script = Script(error=UnavailableError("this worker is stopping"))
    async with running_router(3, script=script) as router:
        with pytest.raises(UnavailableError, match="stopping"):
            await router.generate(token_request(PROMPT))
        assert sum(len(worker.received) for worker in router.workers) == 2
        assert len(router.server.core.registry.ready) == 1, "the two are out from that moment"
        await router.until_ready(3)


async def test_restart_between_decision_and_call_is_not_the_callers_fault() -> None:
    """F23: a worker that restarted at its address refuses the old ticket; the router asks who is there and tries once more."""
    async with running_router(1) as router:
        await router.generate(token_request(PROMPT))
        worker = router.workers[0]
        worker.incarnation = type(worker.incarnation)(worker.incarnation ^ 1)
        worker._seen.clear()
        answer = await router.generate(token_request(PROMPT))
        assert answer.started.routing.predicted_cached_tokens == 0
        assert answer.started.cached_tokens.device == 0


async def test_worker_that_never_takes_our_tickets_is_unavailable() -> None:
    """A worker of another fleet secret for tickets: the caller is told that the worker failed, not that its own key is wrong."""
    async with running_router(1) as router:
        worker = router.workers[0]
        real, worker.secret = worker.secret, type(worker.secret)(b"x" * 32)
        with pytest.raises(UnavailableError, match="w0"):
            await router.generate(token_request(PROMPT))
        worker.secret = real


async def test_stopping_worker_gets_nothing_new() -> None:
    """F66: a worker whose health turns NOT_SERVING is left out, and is back when it serves."""
    async with running_router(2) as router:
        await router.workers[0].set_serving(serving=False)
        await eventually(lambda: len(router.server.core.registry.ready) == 1)
        for i in range(4):
            assert (await router.generate(token_request([i] * 100))).started.worker_id == "w1"
        views = {view.worker_id: view for view in await router.list_workers()}
        assert (views["w0"].ready, views["w0"].problem) == (False, "says that it is not serving")
        await router.workers[0].set_serving(serving=True)
        await router.until_ready(2)


async def test_wrong_belief_is_corrected_by_what_the_worker_says() -> None:
    """A worker whose cache tells nothing is believed half, and one that evicted a prompt is not believed to hold what continued it."""
    async with running_router(1, script=Script(prefix_cache="hash")) as router:
        ((_, followed),) = router.server.core.view
        await eventually(lambda: not followed.lingering.tells)
        prompt = list(range(192))
        await router.generate(token_request(prompt + [1] * 80))
        await router.generate(token_request(prompt + [2] * 80))
        router.workers[0].script.cached_tokens = 0
        wrong = await router.generate(token_request(prompt + [1] * 80))
        assert wrong.started.routing.predicted_cached_tokens == 256 // 2
        right = await router.generate(token_request(prompt + [2] * 80))
        assert right.started.routing.predicted_cached_tokens == 192 // 2


async def test_adding_and_removing_workers_while_they_stream() -> None:
    """F31 (first form): twice added is once added; removed while being added is removed; removed with 10 streams, nothing is harmed."""
    script = held_script()
    async with running_router(2, script=script) as router:
        server, (kept, removed) = router.server, router.workers
        assert server.add_worker(removed.address) is False
        calls = [router.inference.Generate(token_request([i] * 200)) for i in range(20)]
        for call in calls:
            await started(call)
        assert router.loads() == [10, 10]
        assert server.remove_worker(removed.address) is True
        assert router.loads() == [10]
        script.before_delta.open()
        for call in calls:
            last = None
            while (message := await call.read()) is not grpc.aio.EOF:
                last = message
            assert last is not None
            assert last.HasField("finished")
        assert router.loads() == [0]
        assert server.add_worker(removed.address) is True
        assert server.remove_worker(removed.address) is True
        assert server.remove_worker(removed.address) is False
        await eventually(lambda: kept.described >= 2)
        assert [view.address for view in await router.list_workers()] == [kept.address]


async def test_end_of_a_stream_from_a_former_life_counts_for_nobody() -> None:
    """F14: start A on E; remove E; add E again; start B; A ends, B ends → 1, then 0, never negative."""
    script = held_script()
    async with running_router(1, script=script) as router:
        a = router.inference.Generate(token_request(PROMPT))
        await started(a)
        address = router.workers[0].address
        router.server.remove_worker(address)
        router.server.add_worker(address)
        await router.until_ready(1)
        b = router.inference.Generate(token_request(PROMPT))
        await started(b)
        a.cancel()
        await eventually(lambda: router.workers[0].cancelled == 1)
        assert router.loads() == [1]
        b.cancel()
        await eventually(lambda: router.loads() == [0])


def worker_named(router: Router, worker_id: str) -> FakeWorker:
    return next(worker for worker in router.workers if worker.worker_id == worker_id)


async def test_busy_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker too busy to say who it is, and alive by its health stream, stays ready and is sent requests."""
    monkeypatch.setattr("prefixmesh.router.worker_link.DESCRIBE_INTERVAL_S", 0.01)
    monkeypatch.setattr("prefixmesh.router.worker_link.DESCRIBE_TIMEOUT_S", 0.05)
    async with running_router(1) as router:
        worker = router.workers[0]
        worker.script.before_describe.shut()
        asked = worker.described
        await eventually(
            lambda: worker.described >= asked + 3
        )  # at least one of them was not answered in time
        assert len(router.server.core.registry.ready) == 1
        await router.generate(token_request(PROMPT))
        worker.script.before_describe.open()
