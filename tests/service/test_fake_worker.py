"""The fake worker over gRPC: a worker to all who ask, with answers that are known beforehand, and wrong exactly where it was told to be."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import OverloadedError, PrefixmeshError, UnavailableError
from prefixmesh.ids import Namespace
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc, router_pb2, router_pb2_grpc, worker_control_pb2
from prefixmesh.rpc.channel import open_channel
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.faulty_worker import EXIT_CRASHED, FaultFile, FaultyEngine, FaultyWatchers
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.server import WorkerServer
from tests.support.cache_following import Follower
from tests.support.programs import Program, running_program
from tests.support.servers import Worker, answer_of, byte_text, eventually, running_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

IDENTITY = ModelIdentity(vocab_size=300, context_length=4096)
PROMPT = list(range(200))
OTHER_PROMPT = list(range(1, 201))
INSTANT = TimingModel(step_ms=0.0, prefill_ms_per_token=0.0)


def switch(path: Path, *faults: dict[str, Any]) -> None:
    """Faults from now on, as a program would switch them: whole, never half."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(faults))
    os.replace(new, path)


@pytest.fixture
def faults_path(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


@pytest.fixture
async def worker(faults_path: Path) -> AsyncIterator[Worker]:
    settings = EngineConfig(max_total_tokens=4096)
    faults, secret = FaultFile(faults_path), fleet_secret.generate()
    server = WorkerServer(
        WorkerConfig(engine=settings),
        secret,
        engine=FaultyEngine(settings, IDENTITY, INSTANT, faults),
        text=byte_text(),
        make_watchers=partial(FaultyWatchers, faults),
    )
    async with running_worker(server, secret) as running:
        yield running


def request(prompt: list[int] = PROMPT, max_tokens: int = 6) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(prompt)),
        # The namespace is another one in each run, and one of 300 tokens would end an answer.
        sampling=pb.Sampling(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_it_answers_what_is_known_beforehand_and_finds_it_again(worker: Worker) -> None:
    namespace = Namespace(b"n" * 16)
    for number, cached in enumerate((0, 199)):
        ticket = worker.ticket(namespace=namespace, request_id=f"request-{number}")
        answer = await worker.generate(request(), ticket)
        assert answer.token_ids == expected_answer(namespace, PROMPT, 6, IDENTITY.vocab_size)
        assert answer.started.cached_tokens.device == cached


async def test_its_host_tier_gives_back_what_its_device_had_to_forget(faults_path: Path) -> None:
    """By the machine's clock: the backups of an idle worker are complete by themselves, and a copy that fails is computed."""
    settings = EngineConfig(max_total_tokens=256, hicache_ratio=4.0)
    timing = TimingModel(
        step_ms=0.1, prefill_ms_per_token=0.1, load_back_ms_per_token=0.01, offload_ms_per_token=0.01
    )
    faults, secret = FaultFile(faults_path), fleet_secret.generate()
    engine = FaultyEngine(settings, IDENTITY, timing, faults)
    server = WorkerServer(WorkerConfig(engine=settings), secret, engine=engine, text=byte_text())
    prompts = (PROMPT, OTHER_PROMPT, PROMPT, OTHER_PROMPT)

    async def has_backed_up() -> bool:
        tiers = (await engine.stats()).tiers
        return tiers.backed_up_tokens >= len(PROMPT) and not tiers.copies_in_flight

    async with running_worker(server, secret) as worker:
        found = []
        for number, prompt in enumerate(prompts):
            if number == 3:
                switch(faults_path, {"kind": "copy_fail"})
            ticket = worker.ticket(namespace=b"n" * 16, request_id=f"request-{number}")
            answer = await worker.generate(request(prompt), ticket)
            assert answer.token_ids == expected_answer(b"n" * 16, prompt, 6, IDENTITY.vocab_size)
            found.append(answer.started.cached_tokens)
            await eventually(has_backed_up, 60.0)
        assert [told.host > 100 for told in found] == [False, False, True, False]
        assert found[2].device + found[2].host == 199


async def test_it_tells_of_its_cache_and_its_rates(worker: Worker) -> None:
    await worker.generate(request())
    follower = Follower(worker)
    await follower.until(lambda: follower.report is not None and follower.report.device_pool.total_pages)
    assert follower.report is not None
    assert follower.report.summary.states[0].count == 200 // 64
    follower.close()


async def test_it_lies_about_cached_tokens_while_it_is_told_to(worker: Worker, faults_path: Path) -> None:
    told = []
    for amount in (0, 50, -150, 0):
        switch(faults_path, {"kind": "wrong_cached", "amount": amount})
        told.append((await worker.generate(request())).started.cached_tokens.device)
    assert told == [0, 200, 49, 199]


async def test_its_sums_are_wrong_while_it_is_told_to_lie(worker: Worker, faults_path: Path) -> None:
    await worker.generate(request())
    switch(faults_path, {"kind": "wrong_sums"})
    liar = Follower(worker)
    with pytest.raises(AssertionError):
        await liar.next_report()
    liar.close()
    switch(faults_path)
    honest = Follower(worker)
    await honest.next_report()
    honest.close()


async def test_it_is_silent_while_it_is_told_to_be_and_goes_on_where_it_was(
    worker: Worker, faults_path: Path
) -> None:
    follower = Follower(worker)
    await follower.next_report()
    switch(faults_path, {"kind": "silence"})
    await worker.generate(request())
    hearing = asyncio.create_task(follower.until(lambda: follower.view.blocks(Tier.DEVICE)))
    # Requests are served all the while, and nothing is heard of their blocks.
    for number in range(5):
        await worker.generate(request([number, *PROMPT]))
    assert not hearing.done()
    switch(faults_path)
    await asyncio.wait_for(hearing, 30)
    follower.close()


@pytest.mark.parametrize(
    ("status", "error"), [("RESOURCE_EXHAUSTED", OverloadedError), ("UNAVAILABLE", UnavailableError)]
)
async def test_it_refuses_every_request_while_it_is_told_to_and_lives(
    worker: Worker, faults_path: Path, status: str, error: type[PrefixmeshError]
) -> None:
    switch(faults_path, {"kind": "refuse", "status": status})
    for _ in range(2):
        with pytest.raises(error, match="told to refuse requests"):
            await worker.generate(request())
    switch(faults_path)
    assert len((await worker.generate(request())).token_ids) == 6


@pytest.mark.parametrize("tokens", [0, 4])
async def test_it_falls_silent_in_the_middle_of_an_answer_and_goes_on_when_that_is_over(
    worker: Worker, faults_path: Path, tokens: int
) -> None:
    switch(faults_path, {"kind": "stall_stream", "amount": tokens})
    async with open_channel(worker.bound.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub
        call = stub(channel).Generate(request(), timeout=60)
        told = [await call.read() for _ in range(1 + tokens)]
        assert told[0].HasField("started")
        more = asyncio.create_task(call.read())
        # Others are told of as much meanwhile: it lives, and has had the time to tell more of this one.
        other = stub(channel).Generate(request([1, *PROMPT]), timeout=60)
        for _ in range(1 + tokens):
            await other.read()
        assert not more.done()
        other.cancel()
        switch(faults_path)
        told.append(await more)
        told += [message async for message in _rest(call)]
    assert len(answer_of(told).token_ids) == 6


async def _rest(call: Any) -> AsyncIterator[Any]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


async def ask(program: Program, message: pb.GenerateRequest) -> Any:
    async with open_channel(program.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub
        call = stub(channel).Generate(message, timeout=60, wait_for_ready=True)
        return answer_of([message async for message in call])


@pytest.mark.slow
async def test_real_router_takes_it_in_as_a_worker_of_the_real_model(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """As programs, both: text in, an answer through the router, and a crash when told, which the router sees."""
    faults, model = tmp_path / "faults.json", ("--model", str(tiny_model_folder))
    async with running_program(
        tmp_path, "prefixmesh.sim.fake_worker", *model, "--faults", str(faults), name="worker"
    ) as worker:
        to_it = ("--worker", worker.address)
        async with running_program(tmp_path, "prefixmesh.router", *model, *to_it, name="router") as router:
            await eventually(partial(is_ready, router), 60)
            prompt = pb.GenerateRequest(
                text="Once upon a time " * 40, sampling=pb.Sampling(max_tokens=12, ignore_eos=True)
            )
            first, second = await ask(router, prompt), await ask(router, prompt)
            assert len(first.token_ids) == 12
            assert second.token_ids == first.token_ids
            assert second.started.cached_tokens.device > first.started.cached_tokens.device == 0
            switch(faults, {"kind": "crash"})
            assert await worker.exit_code() == EXIT_CRASHED
            await eventually(partial(is_lost, router), 60)


async def listed(router: Program) -> Any:
    async with open_channel(router.address) as channel:
        stub: Any = router_pb2_grpc.RouterStub
        answer = await stub(channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=30)
        (one,) = answer.workers
        return one


async def is_ready(router: Program) -> bool:
    return bool((await listed(router)).ready)


async def is_lost(router: Program) -> bool:
    return not (await listed(router)).ready


async def test_it_warms_and_pins_like_any_worker(worker: Worker) -> None:
    pin = worker_control_pb2.WorkerPin(pin_id="p", owner="acme")
    prefix = worker_control_pb2.Prefix(namespace=b"n" * 16, token_ids=pack(PROMPT))
    metadata = worker.control_metadata()
    warmed = await worker.control.Warm(
        worker_control_pb2.WarmRequest(prefix=prefix, pin=pin), metadata=metadata, timeout=30.0
    )
    assert (warmed.held_tokens, warmed.computed_tokens) == (200, 200)
    listed = await worker.control.ListPins(worker_control_pb2.WorkerPinsRequest(), metadata=metadata)
    assert [(one.pin_id, one.held_tokens) for one in listed.pins] == [("p", 200)]
    answer = await worker.generate(request(), worker.ticket(request_id="r", namespace=b"n" * 16))
    assert answer.started.cached_tokens.device == 199, "all but the last token, which must be computed"
