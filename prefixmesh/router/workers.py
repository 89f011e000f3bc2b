"""The connections to the workers: who is there, how fast, and whether it may be sent anything.

Each worker is followed by one task: it asks who is there (``Describe``), then watches its health and asks again at intervals. A
connection that breaks, or a call that found the worker gone, ends the round at once; the next begins after a pause that
grows. Beside that the worker's cache and load are followed (``cache_stream``). What is learned goes to the core; nothing is decided here.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE
from prefixmesh.errors import DeadlineError, InvalidRequestError, PrefixmeshError, UnavailableError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.proto.cache_counts import decode_cache_counts
from prefixmesh.proto.cache_news import MAX_RATE_MS, check_rate
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2_grpc
from prefixmesh.router.cache_stream import CacheStream, log_trust
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.registry import PASSING_PROBLEMS, Rates, WorkerFacts
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_call import WorkerCall
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.wall_clock import unix_ms

_log = logging.getLogger(__name__)

DESCRIBE_INTERVAL_S: Final = 1.0
"""How old a worker's measured rates may be."""

DESCRIBE_TIMEOUT_S: Final = 3 * DESCRIBE_INTERVAL_S
"""Three intervals. Only the first answer must come in time; later ones may be late."""

LOOKUP_TIMEOUT_S: Final = 1.0
"""A request waits for these answers. A worker gives one within a fifth of a second, also while it computes."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""Pauses between rounds double from the first to this, so that a worker that comes back is seen within a second or two."""

MAX_UNIX_MS: Final = 253_402_300_799_999
"""The end of the year 9999: tickets expire by a worker's clock, and theirs are 64 bits."""

LEAST_TOKENS_PER_S: Final = 1000.0 / MAX_RATE_MS
"""What a rate in milliseconds can still tell."""

REVIEW_INTERVAL_S: Final = 0.25
"""How late it is noticed that a worker has become silent, or that a ticket is over."""

GENERATE: Final = "/prefixmesh.v1.Inference/Generate"


class WorkerLink:
    """The connection to one worker. ``start`` it once; ``close`` lets running calls end first."""

    def __init__(
        self,
        endpoint: Endpoint,
        core: RouterCore,
        secret: FleetSecret,
        router_id: str,
        on_news: Callable[[Endpoint], None],
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

    def suspect(self, why: str) -> None:
        """A call found the worker gone: it gets nothing more until it has answered again, and is asked at once."""
        self._core.unreachable(self.endpoint, why)
        self._on_news(self.endpoint)
        self._suspected.set()

    async def describe(self, timeout_s: float | None = None) -> None:
        """Ask who is there. Raises the error that the call ends with."""
        try:
            answer = await self._control.Describe(
                pb.DescribeRequest(), metadata=self._metadata, timeout=timeout_s or DESCRIBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if self._core.described(self.endpoint, facts_of(answer), _now()):
            _log.info("worker_new_life endpoint=%s incarnation=%016x", self.endpoint, answer.incarnation)
        entry = self._core.registry.get(self.endpoint)
        if entry is not None and answer.unix_ms:
            entry.clock_ahead_ms = answer.unix_ms - unix_ms()
        self._on_news(self.endpoint)

    async def close(self) -> None:
        """Stop following, wait until the running calls have ended, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._idle.wait()
        await self._channel.close()

    async def _follow(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.describe()
                pause_s = FIRST_PAUSE_S
                await _first_to_fail(
                    self._describe_often(),
                    self._watch_health(),
                    self._until_suspected(),
                    self._stream.follow(),
                )
            except PrefixmeshError as error:
                self._core.unreachable(self.endpoint, str(error))
                self._on_news(self.endpoint)
                if isinstance(error, UnavailableError) and not self._suspected.is_set():
                    # Not only late: nobody is there any more.
                    self.give_up_calls(f"worker {self.endpoint} cannot be reached: {error}")
            except Exception:  # a bug of ours, or a peer that is no worker: the next round may find it well
                _log.exception("worker_link_failed endpoint=%s", self.endpoint)
                self._core.unreachable(
                    self.endpoint, "the connection to it failed; the router's log has the reason"
                )
                self._on_news(self.endpoint)
            self._suspected.clear()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _describe_often(self) -> None:
        while True:
            await asyncio.sleep(DESCRIBE_INTERVAL_S)
            try:
                await self.describe()
            except DeadlineError:
                # Busy is not dead: a machine under load answers late. A dead one breaks the health stream or its keepalive.
                _log.info("worker_answers_late endpoint=%s", self.endpoint)

    async def _watch_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        try:
            async for answer in self._health.Watch(health_pb2.HealthCheckRequest()):
                self._core.health_changed(self.endpoint, serving=answer.status == serving)
                self._on_news(self.endpoint)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise UnavailableError("it ended its health stream")

    async def _until_suspected(self) -> None:
        await self._suspected.wait()
        raise UnavailableError("a request found it gone")


class WorkerPool:
    """The links to all workers. Owns which there are; what is known of them is the core's."""

    def __init__(
        self, core: RouterCore, secret: FleetSecret, router_id: str, on_change: Callable[[], None]
    ) -> None:
        """``router_id`` is what this router calls itself to workers; ``on_change`` is called whenever a worker's problem has changed."""
        self._core = core
        self._secret = secret
        self._router_id = router_id
        self._on_change = on_change
        self._links: dict[Endpoint, WorkerLink] = {}
        self._problems: dict[Endpoint, str] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reviewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look after what time alone brings about. Needs a running event loop."""
        self._reviewing = asyncio.create_task(self._review_often())

    def add(self, endpoint: Endpoint) -> bool:
        """Follow a worker from now on; False when it is followed already. Needs a running event loop."""
        if not self._core.add_worker(endpoint, _now()):
            return False
        link = self._links[endpoint] = WorkerLink(
            endpoint, self._core, self._secret, self._router_id, self._note_news
        )
        link.start()
        self._note_news(endpoint)
        return True

    def remove(self, endpoint: Endpoint) -> bool:
        """Send a worker nothing more; its running streams end undisturbed. False when it is not known."""
        if not self._core.remove_worker(endpoint):
            return False
        self._problems.pop(endpoint, None)
        task = asyncio.create_task(self._links.pop(endpoint).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        _log.info("worker_removed endpoint=%s", endpoint)
        self._on_change()
        return True

    def link(self, endpoint: Endpoint) -> WorkerLink:
        """The link to a worker that a decision has just named."""
        return self._links[endpoint]

    async def describe_ready(self) -> None:
        """Have every ready worker tell who it is, all at once. One that does not answer soon is left to its own link."""

        async def describe(link: WorkerLink) -> None:
            with suppress(PrefixmeshError):
                await link.describe(LOOKUP_TIMEOUT_S)

        await asyncio.gather(*(describe(self._links[entry.endpoint]) for entry in self._core.registry.ready))

    async def close(self) -> None:
        """Stop following everyone and wait for the last running calls, which the caller has ended."""
        if self._reviewing is not None:
            self._reviewing.cancel()
            await asyncio.wait({self._reviewing})
        for endpoint in list(self._links):
            self.remove(endpoint)
        await asyncio.gather(*self._closing)

    async def _review_often(self) -> None:
        while True:
            await asyncio.sleep(REVIEW_INTERVAL_S)
            try:
                self._core.tick(_now())
                log_trust(self._core)
            except Exception:  # a bug of ours: what comes by time must go on coming
                _log.exception("review_failed")

    def _note_news(self, endpoint: Endpoint) -> None:
        entry = self._core.registry.get(endpoint)
        if entry is None or self._problems.get(endpoint) == entry.problem:
            return
        self._problems[endpoint] = entry.problem
        if entry.ready:
            _log.info("worker_ready endpoint=%s worker_id=%s", endpoint, entry.name)
        else:
            level = logging.DEBUG if entry.problem in PASSING_PROBLEMS else logging.WARNING
            _log.log(level, "worker_not_ready endpoint=%s problem=%r", endpoint, entry.problem)
        self._on_change()


def facts_of(answer: pb.DescribeResponse) -> WorkerFacts:
    """What a worker's answer says, as the core reads it. Raises InvalidRequestError for figures that nothing can be reckoned with."""
    if not 0 <= answer.unix_ms <= MAX_UNIX_MS:
        raise InvalidRequestError("unix_ms", f"must be 0 to {MAX_UNIX_MS}, got {answer.unix_ms}")
    match_units = {"radix": answer.page_size, "hash": HASH_BLOCK_SIZE}
    return WorkerFacts(
        worker_id=WorkerId(answer.worker_id),
        incarnation=Incarnation(answer.incarnation),
        model=answer.model,
        model_revision=answer.model_revision,
        tokenizer_digest=answer.tokenizer_digest,
        protocol_version=answer.protocol_version,
        fingerprint_version=answer.fingerprint_version,
        context_length=answer.context_length,
        max_running_requests=answer.max_running_requests,
        match_unit=match_units.get(answer.prefix_cache, 0),
        page_size=answer.page_size,
        block_size=answer.block_size or DEFAULT_BLOCK_SIZE,
        total_tokens=answer.max_total_tokens,
        draining=answer.draining,
        resident_adapters=frozenset(adapter.digest for adapter in answer.adapters if adapter.resident),
        rates=Rates(
            _tokens_per_s(answer.rates.prefill_tokens_per_s),
            check_rate(answer.rates.decode_step_ms, "rates.decode_step_ms"),
        ),
        cache=decode_cache_counts(answer.cache) if answer.HasField("cache") else None,
        adapters={adapter.name: adapter.digest for adapter in answer.adapters},
    )


def _tokens_per_s(rate: float) -> float:
    if rate and not LEAST_TOKENS_PER_S <= rate < math.inf:
        raise InvalidRequestError(
            "rates.prefill_tokens_per_s",
            f"must be 0, or at least {LEAST_TOKENS_PER_S:g} and finite, got {rate}",
        )
    return rate


def _now() -> float:
    """Seconds by the clock that the core goes by."""
    return time.monotonic()


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
