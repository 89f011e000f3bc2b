"""The connection to one worker: who is there, how fast, and whether it may be sent anything.

One task follows the worker: it asks who is there (``Describe``), then watches its health, probes it, and asks again at intervals. A
connection that breaks, or a call that found the worker gone, ends the round at once; the next begins after a pause that
grows. Beside that the worker's cache and load are followed (``cache_stream``). What is learned goes to the core; nothing is decided here.

    noticed by                            of what                               after
    a call, the health stream, a probe    nobody listens, connection reset      at once
    probes (``worker_health``)            a process that stands still           7 s at most
    the ends of requests                  whatever it is given fails            three of them
    keepalive (``rpc.channel``)           a peer that cannot be reached         40 s, where nothing was sent meanwhile
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.errors import DeadlineError, PrefixmeshError, UnavailableError
from prefixmesh.fleet_control import ControlCall
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2_grpc
from prefixmesh.router.cache_stream import CacheStream
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.failure_kind import FailureKind, is_workers_fault
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_call import WorkerCall
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_facts import facts_of
from prefixmesh.router.worker_health import PROBE_TIMEOUT_S
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.wall_clock import unix_ms

_log = logging.getLogger(__name__)

DESCRIBE_INTERVAL_S: Final = 1.0
"""How old a worker's measured rates may be."""

DESCRIBE_TIMEOUT_S: Final = 3 * DESCRIBE_INTERVAL_S
"""Three intervals. Only the first answer must come in time; later ones may be late."""

FIRST_HEALTH_S: Final = 10.0
"""Until the health stream's first message, which a worker sends as soon as it is asked."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""Pauses between rounds double from the first to this, so that a worker that comes back is seen within a second or two."""

END_BY_THEMSELVES_S: Final = 1.0
"""How long calls may go on to a worker that nobody can reach any more: far more than a busy router takes to read what has come."""

_T = TypeVar("_T")

GENERATE: Final = "/prefixmesh.v1.Inference/Generate"


class WorkerLink:
    """The connection to one worker. ``start`` it once; ``close`` lets running calls end first."""

    def __init__(
        self,
        endpoint: Endpoint,
        core: RouterCore,
        secret: FleetSecret,
        router_id: str,
        on_news: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self._core = core
        self._on_news = on_news
        self._channel = open_channel(endpoint)
        self._control = worker_control_pb2_grpc.WorkerControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        # Bytes in, bytes out: most of a stream is passed on as it came.
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(GENERATE)
        self._metadata = ((AUTHORIZATION_METADATA, f"Bearer {secret.control_token()}"),)
        self._stream = CacheStream(
            endpoint, core, self._control.WatchCache, metadata=self._metadata, router_id=router_id
        )
        self._suspected = asyncio.Event()
        self._calls: set[WorkerCall] = set()
        self._described_at = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the worker."""
        self._task = asyncio.create_task(self._follow(), name=f"worker-link {self.endpoint}")

    @contextmanager
    def generate(
        self, request: bytes, metadata: tuple[tuple[str, str | bytes], ...], timeout_s: float | None
    ) -> Iterator[WorkerCall]:
        """A Generate call, which is cancelled when the block is left before it has ended. The link may give it up."""
        call = WorkerCall(self._generate(request, metadata=metadata, timeout=timeout_s))
        self._calls.add(call)
        self._idle.clear()
        try:
            yield call
        finally:
            call.cancel()
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    def give_up_calls(self, why: str) -> None:
        """End every call that runs there, with this reason: nothing is expected of the worker any more. O(calls)."""
        for call in list(self._calls):
            call.give_up(why)

    def note_failure(self, kind: FailureKind, why: str) -> None:
        """A request that was sent there failed. Whether that speaks against the worker is its kind's business. A connection that broke
        is to be told by ``suspect``, too, in whatever order."""
        if is_workers_fault(kind):
            self._core.request_failed(self.endpoint, why, core_now())
            self._on_news()

    def note_success(self) -> None:
        """A request that was sent there ended well."""
        self._core.request_succeeded(self.endpoint)

    def suspect(self, why: str) -> None:
        """A call found the worker gone: it gets nothing more until it has answered again, and is asked at once."""
        self._core.unreachable(self.endpoint, why)
        self._on_news()
        self._suspected.set()

    async def control(self, call: ControlCall[_T], timeout_s: float) -> _T:
        """The answer to a control call. Raises the error that it ends with."""
        try:
            return await call(self._control, {"metadata": self._metadata, "timeout": timeout_s})
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError:  # begun on a channel that is closed
            raise self._closed() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancels us: so gRPC tells of calls whose channel is closed, as when the worker was removed.
            raise self._closed() from None

    async def describe(self, timeout_s: float | None = None) -> None:
        """Ask who is there. Raises the error that the call ends with."""

        async def call(stub: Any, settings: Any) -> pb.DescribeResponse:
            told: pb.DescribeResponse = await stub.Describe(pb.DescribeRequest(), **settings)
            return told

        answer = await self.control(call, timeout_s or DESCRIBE_TIMEOUT_S)
        self._described_at = core_now()
        if self._core.described(self.endpoint, facts_of(answer), core_now()):
            _log.info("worker_new_life endpoint=%s incarnation=%016x", self.endpoint, answer.incarnation)
        entry = self._core.registry.get(self.endpoint)
        if entry is not None and answer.unix_ms:
            entry.clock_ahead_ms = answer.unix_ms - unix_ms()
        self._on_news()

    async def close(self) -> None:
        """Stop following, wait until the running calls have ended, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._idle.wait()
        await self._channel.close()

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"{self.endpoint}: the connection to it was closed")

    async def _follow(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.describe()
                pause_s = FIRST_PAUSE_S
                await _first_to_fail(
                    self._describe_often(),
                    self._watch_health(),
                    self._probe_often(),
                    self._until_suspected(),
                    self._stream.follow(),
                )
            except PrefixmeshError as error:
                self._core.unreachable(self.endpoint, str(error))
                self._on_news()
                if isinstance(error, UnavailableError) and not self._suspected.is_set():
                    # Not only late: nobody is there any more.
                    self._give_up_later(f"worker {self.endpoint} cannot be reached: {error}")
            except Exception:  # a bug of ours, or a peer that is no worker: the next round may find it well
                _log.exception("worker_link_failed endpoint=%s", self.endpoint)
                self._core.unreachable(
                    self.endpoint, "the connection to it failed; the router's log has the reason"
                )
                self._on_news()
            self._suspected.clear()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _give_up_later(self, why: str) -> None:
        """Give up the calls that run there now, unless they end by themselves. Most do: a connection that is gone ends them, and of a
        worker that has drained the last frames are here and not read yet. What is left after a while hangs on what nobody can reach."""
        left = list(self._calls)
        if left:
            asyncio.get_running_loop().call_later(END_BY_THEMSELVES_S, _give_up, left, why)

    async def _describe_often(self) -> None:
        while True:
            await asyncio.sleep(DESCRIBE_INTERVAL_S)
            try:
                await self.describe()
            except DeadlineError:
                # Busy is not dead: a machine under load answers late. A dead one breaks the health stream or its keepalive.
                _log.info("worker_answers_late endpoint=%s", self.endpoint)

    async def _watch_health(self) -> None:
        """Hear of each change. It may be silent for days: that it is there at all is known by probes and keepalive."""
        serving = health_pb2.HealthCheckResponse.SERVING
        call = self._health.Watch(health_pb2.HealthCheckRequest())
        try:
            async with asyncio.timeout(FIRST_HEALTH_S) as patience:
                while (answer := await call.read()) is not grpc.aio.EOF:
                    patience.reschedule(None)
                    self._core.health_changed(self.endpoint, serving=answer.status == serving)
                    self._on_news()
        except TimeoutError:
            raise DeadlineError(f"it did not say within {FIRST_HEALTH_S:g} s whether it is serving") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise UnavailableError("it ended its health stream")

    async def _probe_often(self) -> None:
        began = core_now()
        while (entry := self._core.registry.get(self.endpoint)) is not None:
            pause_s = entry.health.pause_s(random.random())  # noqa: S311  no secret
            since = core_now() if entry.health.is_failing else began
            await asyncio.sleep(max(0.0, since + pause_s - core_now()))
            began = core_now()
            problem = await self._probe(entry)
            # Busy is not dead: one that has said anything since is alive, whatever it has no time for.
            if problem is not None and not (problem and self._heard_at > began):
                self._core.probe_ended(self.endpoint, problem, core_now())
                self._on_news()

    async def _probe(self, entry: WorkerEntry) -> str | None:
        """What is wrong with the worker; empty when nothing is, None when that is not to be told by this probe."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            ours = from_rpc_error(error)
            if isinstance(ours, DeadlineError):
                return f"it did not answer within {PROBE_TIMEOUT_S:g} s"
            if isinstance(ours, UnavailableError):
                raise ours from error  # nobody is there
            return f"its health check failed: {ours}"
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        # One that says so on its stream, too, drains or has not begun: it is well, and not ready.
        return "it says that it is not serving" if entry.serving and not entry.draining else None

    @property
    def _heard_at(self) -> float:
        """When the worker was last known to live."""
        return max(self._described_at, self._stream.heard_at)

    async def _until_suspected(self) -> None:
        await self._suspected.wait()
        raise UnavailableError("a request found it gone")


def core_now() -> float:
    """Seconds by the clock that the core goes by."""
    return time.monotonic()


def _give_up(calls: Iterable[WorkerCall], why: str) -> None:
    for call in calls:
        call.give_up(why)


async def _first_to_fail(*endless: Coroutine[Any, Any, None]) -> None:
    """Run all until one raises, end the others, and raise its error."""
    tasks = {asyncio.ensure_future(one) for one in endless}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
