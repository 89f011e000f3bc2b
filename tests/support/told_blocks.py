"""What a fake worker tells of its cache and its load: a real publisher's books, and a plain stream of them for each reader."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint, Namespace
from prefixmesh.proto.cache_news import EventBatch, News, decode_place, encode_news
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.ticket import Ticket
from prefixmesh.worker_report import PagePool, WorkerReport

PART_BLOCKS = 1_000


class ToldBlocks:
    """One life of a fake worker's cache. ``held`` is what it holds; streams end with the server's."""

    def __init__(self) -> None:
        self.publisher = CachePublisher(lambda: Epoch(secrets.randbits(64)))
        self.held: set[Fingerprint] = set()
        self.streams = 0
        """How many were begun."""

        self.asked_interval_ms = 0
        """How often the last of them was to report."""

        self.silent = asyncio.Event()
        """Set: streams say nothing more."""

        self.garble_next = False
        """The next message is one that makes no sense."""

        self.skip_next = False
        """The next message is lost."""

        self.rates: dict[str, float] = {}
        """What its reports tell beside its load, by their fields' names."""

        self.host_pool: PagePool | None = None
        self.on_host: set[Fingerprint] = set()
        self._running: dict[str, str] = {}
        self._ended: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def computed(self, namespace: bytes, tokens: bytes) -> None:
        """A prompt is cached now."""
        names = block_fingerprints(Namespace(namespace), tokens, DEFAULT_BLOCK_SIZE)
        new = [name for name in names if name not in self.held]
        self.held.update(new)
        self.publisher.stored(Tier.DEVICE, None, new)
        self._wake()

    def evict(self, count: int) -> None:
        """Some blocks go."""
        gone = [self.held.pop() for _ in range(min(count, len(self.held)))]
        self.publisher.removed(Tier.DEVICE, gone)
        self._wake()

    def demote(self) -> None:
        """All blocks go from the device, and stay on the host."""
        self.publisher.stored(Tier.HOST, None, sorted(self.held - self.on_host))
        self.publisher.removed(Tier.DEVICE, sorted(self.held))
        self.on_host |= self.held
        self.held.clear()
        self._wake()

    def flush(self) -> None:
        """All blocks go."""
        self.held.clear()
        self.on_host.clear()
        self.publisher.cleared()
        self._wake()

    @contextmanager
    def running(self, ticket: Ticket) -> Iterator[None]:
        """A request of a router's is in the worker."""
        self._running[ticket.request_id] = ticket.router_id
        try:
            yield
        finally:
            del self._running[ticket.request_id]
            self._ended.append((ticket.request_id, ticket.router_id))

    async def watch(self, request: pb.WatchCacheRequest) -> AsyncGenerator[pb.WatchCacheResponse]:
        """One reader's stream."""
        self.streams += 1
        self.asked_interval_ms = request.report_interval_ms
        place = decode_place(request)
        told = 0
        if place is None or self.publisher.events_since(*place) is None:
            snapshot = self.publisher.open_snapshot()
            place = (snapshot.summary.epoch, snapshot.summary.sequence)
            while (part := snapshot.next_part(PART_BLOCKS)) is not None:
                yield encode_news(part)
        while True:
            self._changed.clear()
            if place[0] != self.publisher.epoch:
                place = (self.publisher.epoch, 0)
                yield encode_news(EventBatch([self.publisher.beginning]))
            events = self.publisher.events_since(*place)
            assert events is not None, "the log of a fake worker is never too short"
            summary = self.publisher.summary()
            for event in events:
                for message in self._faulty(EventBatch([event])):
                    yield message
            place = (summary.epoch, summary.sequence)
            ended = [name for name, router in self._ended[told:] if router == request.router_id]
            told = len(self._ended)
            if not self.silent.is_set():
                yield encode_news(
                    WorkerReport(
                        summary=summary,
                        running_requests=len(self._running),
                        accepted=tuple(
                            name for name, router in self._running.items() if router == request.router_id
                        ),
                        ended=tuple(ended),
                        own_requests=sum(router == request.router_id for router in self._running.values()),
                        host_pool=self.host_pool,
                        **self.rates,  # type: ignore[arg-type]
                    )
                )
            try:
                async with asyncio.timeout(request.report_interval_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _faulty(self, news: News) -> Iterator[pb.WatchCacheResponse]:
        if self.silent.is_set():
            return
        if self.skip_next:
            self.skip_next = False
            return
        message = encode_news(news)
        if self.garble_next:
            self.garble_next = False
            message.events.events[0].ClearField("event")
        yield message

    def _wake(self) -> None:
        self._changed.set()
