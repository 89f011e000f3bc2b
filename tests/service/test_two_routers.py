"""Two routers before the same three workers, all of them programs: each sees the load that the other has made, through the workers.

The times in which the views come to agree are printed (``-s``) and recorded, not asserted: what is proved is that they always do.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc, router_pb2, router_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.tokens import pack
from tests.support.programs import running_program
from tests.support.servers import eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="function")]

AGREE_S: Final = 60.0
"""Within a few tenths of a second where nobody else uses the machine."""

SLOW_STEPS: Final = ("--step-ms", "20")
"""With ``ANSWER_TOKENS`` no answer ends before the test does."""

ANSWER_TOKENS: Final = 3000


@dataclass
class Server:
    """A program and its stubs."""

    address: str
    channel: grpc.aio.Channel

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]

    async def workers(self) -> dict[str, Any]:
        """What a router says of each worker that is ready."""
        stub: Any = router_pb2_grpc.RouterStub
        answer = await stub(self.channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=30)
        return {worker.worker_id: worker for worker in answer.workers if worker.ready}


@dataclass
class Fleet:
    """The programs, and the streams that are open."""

    routers: list[Server]
    workers: list[Server]
    streams: dict[Any, tuple[Server, str]] = field(default_factory=dict)
    """By call: who was asked, and the worker that answers."""

    agreed_ms: list[float] = field(default_factory=list)

    async def begin(self, asked: Server, prompts: list[list[int]]) -> None:
        """Open a stream for each prompt, and wait until each has begun."""
        for prompt in prompts:
            request = pb.GenerateRequest(
                tokens=pb.TokenPrompt(ids=pack(prompt)),
                sampling=pb.Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            )
            call = asked.inference.Generate(request, timeout=300)
            started = (await call.read()).started
            self.streams[call] = (asked, started.worker_id)

    def cancel(self, count: int) -> None:
        """End the oldest streams."""
        for call in list(self.streams)[:count]:
            call.cancel()
            del self.streams[call]

    def load(self, asked: Server | None = None) -> Counter[str]:
        """Open streams by worker: all, or those that one server was asked for."""
        return Counter(worker for who, worker in self.streams.values() if asked in (None, who))

    async def agree(self) -> None:
        """Wait until both routers see every worker's load, and their own part of it, as it is."""
        began = time.monotonic()
        await eventually(self._all_agree, AGREE_S)
        self.agreed_ms.append(1e3 * (time.monotonic() - began))

    async def _all_agree(self) -> bool:
        for router in self.routers:
            seen = await router.workers()
            running = {name: one.running_requests + one.queued_requests for name, one in seen.items()}
            own = {name: one.in_flight for name, one in seen.items()}
            if +Counter(running) != self.load() or +Counter(own) != self.load(router):
                return False
        return True


@asynccontextmanager
async def running_fleet(folder: Path, model: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:

        async def start(module: str, name: str, *arguments: str) -> Server:
            program = await stack.enter_async_context(
                running_program(folder, module, "--model", str(model), *arguments, name=name)
            )
            channel = await stack.enter_async_context(open_channel(program.address))
            return Server(program.address, channel)

        async def start_all(module: str, arguments: dict[str, tuple[str, ...]]) -> list[Server]:
            """At once: most of a program's beginning is reading libraries."""
            async with asyncio.TaskGroup() as starting:
                tasks = [starting.create_task(start(module, name, *its)) for name, its in arguments.items()]
            return [task.result() for task in tasks]

        workers = await start_all(
            "prefixmesh.sim.fake_worker",
            {name: ("--worker-id", name, *SLOW_STEPS) for name in ("w-0", "w-1", "w-2")},
        )
        known = tuple(argument for worker in workers for argument in ("--worker", worker.address))
        routers = await start_all("prefixmesh.router", {"r-0": known, "r-1": known})
        fleet = Fleet(routers, workers)
        for router in routers:
            await eventually(partial(_knows, router, len(workers)), AGREE_S)
        yield fleet
        fleet.cancel(len(fleet.streams))


async def _knows(router: Server, count: int) -> bool:
    return len(await router.workers()) == count


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[(7 * seed + 11 * number + place) % 500 for place in range(300)] for number in range(count)]


async def test_each_router_sees_the_load_that_the_other_has_made(
    tmp_path: Path, tiny_model_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    async with running_fleet(tmp_path, tiny_model_folder) as fleet:
        first, second = fleet.routers
        await fleet.agree()
        await fleet.begin(first, prompts(1, 4))
        await fleet.agree()
        await fleet.begin(second, prompts(2, 3))
        await fleet.agree()
        # What is new goes to where least is, whoever has sent what is there.
        assert max(fleet.load().values()) - min(fleet.load().values()) <= 2
        # Nobody has told a router of these.
        await fleet.begin(fleet.workers[0], prompts(3, 2))
        await fleet.agree()
        fleet.cancel(3)
        await fleet.agree()
        fleet.cancel(len(fleet.streams))
        await fleet.agree()
        record_property("agreed_ms", [round(ms) for ms in fleet.agreed_ms])
        print("views agreed after", [f"{ms:.0f} ms" for ms in fleet.agreed_ms])
