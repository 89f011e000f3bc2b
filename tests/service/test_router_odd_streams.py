"""A worker's stream that is none: messages that cannot be read, messages behind the end, an end that never comes. Its caller is none the
worse for it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.history_check import check_records
from prefixmesh.history_file import read_history
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack, unpack
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually, rest_of

PROMPT = range(200)
ANSWER = [97, 98, 99, 100]
GARBAGE = b"\xff\xff\xff"
BAD_DELTA = b"\x12\x03" + GARBAGE

Odd = Callable[[list[pb.GenerateResponse]], list[pb.GenerateResponse | bytes]]
"""What a worker sends, given what it should."""


def makes_odd(worker: FakeWorker, odd: Odd, *, hangs: bool = False) -> None:
    """From now on the worker sends what ``odd`` makes of its answers; with ``hangs`` it never ends the stream."""
    anyone: Any = worker
    proper = anyone._answer

    async def answer(*args: Any) -> AsyncGenerator[pb.GenerateResponse | bytes]:
        for message in odd([message async for message in proper(*args)]):
            yield message
        if hangs:
            await asyncio.Event().wait()

    anyone._answer = answer


def told(messages: list[pb.GenerateResponse]) -> list[int]:
    return [
        int(one)
        for message in messages
        if message.HasField("delta")
        for one in unpack(message.delta.token_ids)
    ]


async def is_clean(router: Router) -> None:
    await eventually(lambda: not any(router.loads()))


@pytest.mark.parametrize("place", [0, 1, 2, 3], ids=["first", "started", "token", "later"])
@pytest.mark.parametrize("garbage", [GARBAGE, BAD_DELTA], ids=["no_message", "no_delta"])
async def test_an_answer_goes_on_elsewhere_after_a_message_that_cannot_be_read(
    place: int, garbage: bytes, tmp_path: Path
) -> None:
    """As after any other death: nothing that was told before is lost or told again, and the worker is counted as failing."""
    file = tmp_path / "history"
    async with running_router(2, script=Script(answer=lambda _: ANSWER), history=str(file)) as router:
        undisturbed = await router.generate(token_request(PROMPT))
        home = next(worker for worker in router.workers if worker.received)
        makes_odd(home, lambda proper: [*proper[:place], garbage])
        messages = await rest_of(router.inference.Generate(token_request(PROMPT)))
        assert told(messages) == list(undisturbed.token_ids) == ANSWER
        assert messages[-1].finished.usage.interruptions == (1 if place > 1 else 0)
        views = {view.worker_id: view.failures for view in await router.list_workers()}
        assert views[home.worker_id] == 1
        await is_clean(router)
    report = check_records(line.record for line in read_history(file) if line.record)
    assert not report.violations


async def test_where_all_send_what_cannot_be_read_the_caller_learns_so() -> None:
    async with running_router(2) as router:
        for worker in router.workers:
            makes_odd(worker, lambda proper: [GARBAGE])
        with pytest.raises(UnavailableError, match="no message of an answer"):
            await router.generate(token_request(PROMPT))
        await is_clean(router)


def finished_again(proper: list[pb.GenerateResponse]) -> list[pb.GenerateResponse | bytes]:
    return [*proper, proper[-1]]


def started_again(proper: list[pb.GenerateResponse]) -> list[pb.GenerateResponse | bytes]:
    return [*proper, proper[0], *proper]


def goes_on(proper: list[pb.GenerateResponse]) -> list[pb.GenerateResponse | bytes]:
    return [*proper, pb.GenerateResponse(delta=pb.Delta(position=4, token_ids=pack([101])))]


def garbage_behind(proper: list[pb.GenerateResponse]) -> list[pb.GenerateResponse | bytes]:
    return [*proper, GARBAGE]


@pytest.mark.parametrize("odd", [finished_again, started_again, goes_on, garbage_behind])
@pytest.mark.parametrize("is_resumed", [False, True], ids=["first", "resumed"])
async def test_nothing_follows_the_end_of_an_answer(odd: Odd, *, is_resumed: bool) -> None:
    """Whatever a worker says behind it: the caller has its whole answer, and no error."""
    script = Script(answer=lambda _: ANSWER)
    async with running_router(2, script=script) as router:
        for worker in router.workers:
            makes_odd(worker, odd)
        if is_resumed:
            script.dies_before = 2
        messages = await rest_of(router.inference.Generate(token_request(PROMPT)))
        assert told(messages) == ANSWER
        assert [message.WhichOneof("event") for message in messages] == [
            "started",
            *["delta"] * len(ANSWER),
            "finished",
        ]
        await is_clean(router)


async def test_a_stream_that_stays_open_behind_its_end_is_closed() -> None:
    """Its caller waits for the status, which a worker that has lost the call never sends."""
    async with running_router(1, script=Script(answer=lambda _: ANSWER), stream_idle_timeout_s=0.1) as router:
        makes_odd(router.workers[0], lambda proper: [*proper], hangs=True)
        messages = await rest_of(router.inference.Generate(token_request(PROMPT)))
        assert told(messages) == ANSWER
        assert messages[-1].HasField("finished")
        await is_clean(router)
