"""A worker's real cache and publisher, a router's real view, and a stream between them that can be made to fail: all in simulated time.

With a host tier copies to it and back take a while, and some of them fail.

The worker's end does what a worker's shell does: on a new stream it resumes from its log or sends a snapshot in parts, then events as
they happen and reports at intervals. The router's end does what a router's shell does: it feeds the view, and opens a stream anew when
the view asks for it, when it breaks, or when it is silent. Messages travel singly, so that each may be lost, doubled or overtaken.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from prefixmesh.cache.base import MatchResult, RadixKey
from prefixmesh.cache.events import CacheSummary, Event, SnapshotPart
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Namespace
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.predictions import Predictions
from prefixmesh.router.worker_view import Need, WorkerView
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.tokens import pack

BLOCK: Final = 4
REPORT_S: Final = 0.1
OPEN_AGAIN_S: Final = 0.35
"""A router that has heard nothing for so long opens a new stream: longer than a view takes to be stale."""

COPY_S: Final = 0.05
"""Most of a copy's time: several requests come meanwhile."""

FAILED: Final = 0.2
"""Share of copies."""

Message = SnapshotPart | Event | CacheSummary


class WorkerEnd:
    """A cache with traffic, and whoever reads from it."""

    def __init__(self, sim: Simulation, network: Network, pages: int, host_pages: int) -> None:
        self._sim = sim
        self._network = network
        self._pages = pages
        self._host_pages = host_pages
        self._rng = sim.fork_rng("worker")
        self._read: tuple[Epoch, int] | None = None
        self._stream = 0
        self._deliver: Callable[[int, Message], Any] | None = None
        self.restart()
        self._report()

    def restart(self) -> None:
        """Another life: an empty cache. Its streams are gone, and nobody is told."""
        epochs = self._rng
        self.publisher = CachePublisher(lambda: Epoch(epochs.getrandbits(64)), log_events=20, log_blocks=60)
        self.allocator = PageAllocator(self._pages)
        host = PageAllocator(self._host_pages) if self._host_pages else None
        options = RadixOptions(host=host, block_size=BLOCK, events=self.publisher)
        self.cache = RadixCache(self.allocator, 1, options)
        self._deliver = None

    def open(
        self, stream: int, resume: tuple[Epoch, int] | None, deliver: Callable[[int, Message], Any]
    ) -> None:
        """A reader has come; only the newest is served."""
        self._stream, self._deliver = stream, deliver
        self._read = resume
        if resume is None or self.publisher.events_since(*resume) is None:
            self._send_snapshot(self.publisher.open_snapshot(), stream)
        else:
            self.send_events()

    def use(self, prompt: list[int] | None = None) -> None:
        """One request: a prompt is looked up, computed and kept, with eviction where the pool is full. One that the host could give more of
        waits for that in vain."""
        rng = self._rng
        if prompt is None:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * BLOCK))]
        key = RadixKey(Namespace(b"n" * 16), pack(prompt))
        match = self.cache.match_prefix(key, self._sim.now)
        if match.host_hit_length and self._bring_back(match):
            self.send_events()
            return
        receipt = self.cache.lock(match.last_device_node)
        missing = len(prompt) - match.matched_tokens
        self.cache.evict(max(0, missing - self.allocator.free_pages))
        fresh = self.allocator.allocate(missing)
        if fresh is not None:
            pages = np.concatenate((match.device_indices, fresh))
            inserted = self.cache.insert(key, pages, self._sim.now)
            if self._host_pages:
                self._back_up(inserted.last_device_node)
        self.cache.release(receipt)
        self.send_events()

    def forget(self) -> None:
        """Some of the device goes; what the host has too stays there."""
        self.cache.evict(self._rng.randrange(self._pages))
        self.send_events()

    def flush(self) -> None:
        """Everything goes; the worker may be idle after that."""
        self.cache.flush()
        self.send_events()

    def send_events(self) -> None:
        """Tell the reader what has happened since it was told last."""
        if self._deliver is None or self._read is None:
            return
        events = self.publisher.events_since(*self._read)
        if events is None and self._read[0] != self.publisher.epoch:
            self._send(self.publisher.beginning)
            events = self.publisher.events_since(self.publisher.epoch, 0)
        if events is None:
            self._send_snapshot(self.publisher.open_snapshot(), self._stream)
            return
        for event in events:
            self._send(event)
        self._read = (self.publisher.epoch, self.publisher.sequence)

    def _back_up(self, node: TreeNode) -> None:
        transfers = self.cache.transfers
        copy = transfers.begin_offload(node)
        if copy is not None:
            self._end_later(copy, transfers.finish_offload, transfers.abort_offload)

    def _bring_back(self, match: MatchResult) -> bool:
        transfers = self.cache.transfers
        copy = transfers.begin_restore(match)
        if copy is None:
            return False
        self._end_later(copy, transfers.finish_restore, transfers.fail_restore)
        return True

    def _end_later(self, copy: Any, finish: Callable[[Any], None], fail: Callable[[Any], None]) -> None:
        """Nothing of a copy is there before its end."""
        end = fail if self._rng.random() < FAILED else finish
        self._sim.call_later(self._rng.uniform(0.0, COPY_S), self._end_copy, self.cache, end, copy)

    def _end_copy(self, cache: RadixCache, end: Callable[[Any], None], copy: object) -> None:
        if cache is self.cache:  # else that life is over
            end(copy)
            self.send_events()

    def _send_snapshot(self, snapshot: Snapshot, stream: int) -> None:
        """Parts one after the other, a little later each; the cache goes on meanwhile."""
        self._read = None

        def go_on() -> None:
            if stream != self._stream or self._deliver is None:
                snapshot.close()
                return
            part = snapshot.next_part(3)
            if part is not None:
                self._send(part)
                self._sim.call_later(0.002, go_on)
            elif snapshot.void:
                self._send_snapshot(self.publisher.open_snapshot(), stream)
            else:
                self._read = (snapshot.summary.epoch, snapshot.summary.sequence)
                self.send_events()

        go_on()

    def _report(self) -> None:
        if self._deliver is not None and self._read is not None:
            self.send_events()
            if self._read is not None:
                self._send(self.publisher.summary())
        self._sim.call_later(REPORT_S, self._report)

    def _send(self, message: Message) -> None:
        deliver, stream = self._deliver, self._stream
        assert deliver is not None
        self._network.send("worker", "router", lambda: deliver(stream, message))


class RouterEnd:
    """A view, and the streams that feed it."""

    def __init__(self, sim: Simulation, network: Network, worker: WorkerEnd) -> None:
        self._sim = sim
        self._network = network
        self._worker = worker
        self.index = BlockIndex(max_blocks=100_000)
        self.predictions = Predictions()
        self.view = WorkerView(self.index, self.predictions, report_interval_s=REPORT_S, now=sim.now)
        self._stream = 0
        self._heard_at = 0.0
        self.open()
        self._watch()

    def open(self) -> None:
        """Begin a stream; the old one is closed."""
        self._stream += 1
        stream, resume = self._stream, self.view.resume_from
        self.view.on_broken()
        self.view.on_opened()
        self._heard_at = self._sim.now
        self._network.send("router", "worker", lambda: self._worker.open(stream, resume, self._on_message))

    def _watch(self) -> None:
        if self._sim.now - self._heard_at > OPEN_AGAIN_S:
            self.open()
        self._sim.call_later(REPORT_S, self._watch)

    def _on_message(self, stream: int, message: Message) -> None:
        if stream != self._stream:
            return
        self._heard_at = now = self._sim.now
        need = Need.NOTHING
        match message:
            case SnapshotPart():
                self.view.on_part(message, now)
            case CacheSummary():
                need = self.view.on_report(message, now)
            case _:
                need = self.view.on_event(message, now)
        if need is Need.SNAPSHOT:
            self.open()


class ViewScene:
    """Both ends and the network between them."""

    def __init__(
        self, seed: int, *, quality: LinkQuality | None = None, pages: int = 64, host_pages: int = 0
    ) -> None:
        self.sim = Simulation(seed)
        self.network = Network(self.sim, quality)
        self.worker = WorkerEnd(self.sim, self.network, pages, host_pages)
        self.router = RouterEnd(self.sim, self.network, self.worker)

    @property
    def view(self) -> WorkerView:
        return self.router.view

    def differs(self) -> str:
        """How the view differs from the cache's own tree; empty when it does not."""
        for tier in Tier:
            held = self.router.index.held(self.view.slot, tier)
            there = self.worker.cache.blocks(tier)
            if held != there:
                return (
                    f"{tier.name}: {len(held - there)} too many, {len(there - held)} missing; {self.view!r}"
                )
        return ""
