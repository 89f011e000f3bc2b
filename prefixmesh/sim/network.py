"""A network of the simulation: messages take time, and may be lost, come twice, come late, or not at all while a link is cut.

Two kinds of carriage, as there are in the field:

- ``Network.send`` carries single messages, each on its own: what is delayed longer arrives later, also after ones sent since. This is
  what a protocol that claims to survive loss, doubling and disorder is tried on.
- ``Stream`` carries messages in their order, each once, as TCP and so gRPC do, until it is cut or closed: then what was under way is
  lost and both ends are told; or it stalls, when the link was cut silently, and goes on when that is mended. Its buffer is bounded:
  ``send`` says False when a reader that is too slow has filled it. An end that leaves or dies is told of to the other over the link,
  which a silent cut holds up. A stream may be opened so that some of its messages are garbled as single ones are: harsher than TCP, for
  a protocol that claims to bear it.

Who talks to whom is a pair of names. A link's quality holds for one direction.
"""

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from prefixmesh.errors import ConfigError
from prefixmesh.sim.kernel import Simulation

Name = Hashable
Message = TypeVar("Message")

STREAM_BUFFER: Final = 1024
"""Messages under way or unread in one stream before its sender is told to wait."""

CUT_NOTICE_S: Final = 0.01
"""How long after a cut the ends of a stream learn of it: a reset travels too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkQuality:
    """What may happen to a message on its way."""

    delay_s: float = 0.0005
    jitter_s: float = 0.0
    """Added to the delay: uniform from 0 to this."""

    loss: float = 0.0
    """Share of messages that never arrive."""

    duplicate: float = 0.0
    """Share of messages that arrive twice, each time with its own delay."""

    late: float = 0.0
    """Share of messages that ``late_s`` is added to, so that later ones overtake them."""

    late_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "late_s"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("loss", "duplicate", "late"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def draw_delay_s(self, rng: random.Random) -> float:
        """How long one message takes."""
        late_s = self.late_s if self.late and rng.random() < self.late else 0.0
        return self.delay_s + late_s + (rng.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0)


@dataclass(slots=True)
class NetworkCounts:
    """What has happened to single messages."""

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    """By chance, or because the link was cut when they were sent or due."""

    duplicated: int = 0


class Network:
    """All links between named ends. Links are made as they are used, with the network's own quality."""

    def __init__(self, sim: Simulation, quality: LinkQuality | None = None, *, name: str = "network") -> None:
        """``name`` is that of its source of chance."""
        self._sim = sim
        self._rng = sim.fork_rng(name)
        self._quality = quality or LinkQuality()
        self._own_quality: dict[tuple[Name, Name], LinkQuality] = {}
        self._cut: set[tuple[Name, Name]] = set()
        # What the ends of silently cut links are told once those are mended.
        self._notices: dict[tuple[Name, Name], list[Callable[[], Any]]] = {}
        # In the order in which they were opened, in which they break: sets would go by addresses in memory, another order in each run.
        self._streams: dict[tuple[Name, Name], dict[Stream[Any], None]] = {}
        self.counts = NetworkCounts()

    def set_quality(
        self, quality: LinkQuality, source: Name | None = None, target: Name | None = None
    ) -> None:
        """From now on: of the link from ``source`` to ``target``, or of every link that was not given its own."""
        if source is None or target is None:
            self._quality = quality
        else:
            self._own_quality[source, target] = quality

    def quality(self, source: Name, target: Name) -> LinkQuality:
        """Of one link now."""
        return self._own_quality.get((source, target), self._quality)

    def is_cut(self, source: Name, target: Name) -> bool:
        """Whether nothing passes from ``source`` to ``target``."""
        return (source, target) in self._cut

    def cut(self, one: Name, other: Name, *, silently: bool = False) -> None:
        """Let nothing pass in either direction. Streams break and their ends are told; ``silently``, they stall and nobody is."""
        for pair in ((one, other), (other, one)):
            self._cut.add(pair)
            if silently:
                self._notices.setdefault(pair, [])
            else:
                self._tell_held(pair)
                for stream in tuple(self._streams.get(pair, ())):
                    stream.break_off()

    def isolate(self, one: Name, others: list[Name]) -> None:
        """Cut ``one`` off from all of ``others``."""
        for other in others:
            self.cut(one, other)

    def mend(self, one: Name, other: Name) -> None:
        """Let messages pass again. Stalled streams go on, broken ones stay broken."""
        for pair in ((one, other), (other, one)):
            self._cut.discard(pair)
            self._tell_held(pair)
            for stream in tuple(self._streams.get(pair, ())):
                stream.hand_over()

    def send(self, source: Name, target: Name, deliver: Callable[[], Any]) -> None:
        """Carry one message: ``deliver`` is called when it arrives, twice when it was doubled, or never."""
        quality = self.quality(source, target)
        self.counts.sent += 1
        if self.is_cut(source, target) or (quality.loss and self._rng.random() < quality.loss):
            self.counts.lost += 1
            return
        copies = 1
        if quality.duplicate and self._rng.random() < quality.duplicate:
            copies = 2
            self.counts.duplicated += 1
        for _ in range(copies):
            self._sim.call_later(quality.draw_delay_s(self._rng), self._arrive, source, target, deliver)

    def open_stream(
        self,
        source: Name,
        target: Name,
        on_message: Callable[[Message], Any],
        on_broken: Callable[[], Any],
        *,
        buffer: int = STREAM_BUFFER,
        may_garble: Callable[[Message], bool] | None = None,
    ) -> "Stream[Message]":
        """A stream of messages from ``source`` to ``target``. ``on_message`` is called at the target for each, ``on_broken`` once there
        when the link fails or the sender dies; a stream over a cut link breaks at once, over a silently cut one it stalls. Messages of
        which ``may_garble`` is true are lost, doubled and overtaken as the link's quality says."""
        stream = Stream(self, self._sim, (source, target), on_message, on_broken, buffer, may_garble)
        self._streams.setdefault((source, target), {})[stream] = None
        if self.is_cut(source, target) and (source, target) not in self._notices:
            stream.break_off()
        return stream

    def forget(self, stream: "Stream[Any]") -> None:
        """Know a stream no longer; for the stream itself, when it has ended."""
        streams = self._streams.get(stream.ends)
        if streams is not None:
            streams.pop(stream, None)
            if not streams:
                del self._streams[stream.ends]

    def notify(self, source: Name, target: Name, call: Callable[[], Any]) -> None:
        """Tell ``target`` that ``source`` has left or died: soon, or once a silent cut is over; for streams."""
        held = self._notices.get((source, target))
        if held is None:
            self._sim.call_later(CUT_NOTICE_S, call)
        else:
            held.append(call)

    def draw_delay_s(self, source: Name, target: Name) -> float:
        """How long a message of a stream takes now."""
        return self.quality(source, target).draw_delay_s(self._rng)

    def draw_copies(self, source: Name, target: Name) -> int:
        """How often a message arrives that may be garbled."""
        quality = self.quality(source, target)
        if quality.loss and self._rng.random() < quality.loss:
            return 0
        return 2 if quality.duplicate and self._rng.random() < quality.duplicate else 1

    def _tell_held(self, pair: tuple[Name, Name]) -> None:
        for call in self._notices.pop(pair, ()):
            self._sim.call_later(CUT_NOTICE_S, call)

    def _arrive(self, source: Name, target: Name, deliver: Callable[[], Any]) -> None:
        if self.is_cut(source, target):
            self.counts.lost += 1
            return
        self.counts.delivered += 1
        deliver()

    def __repr__(self) -> str:
        counts, streams = self.counts, sum(map(len, self._streams.values()))
        return (
            f"<Network {counts.delivered} delivered, {counts.lost} lost, {counts.duplicated} doubled of {counts.sent} sent | "
            f"{streams} streams, {len(self._cut) // 2} links cut>"
        )


class Stream(Generic[Message]):
    """Messages in order, each once, from one end to the other. Made by ``Network.open_stream``.

    A reader that is paused (``pause``) leaves messages in the buffer; ``resume`` hands them over.
    """

    def __init__(
        self,
        network: Network,
        sim: Simulation,
        ends: tuple[Name, Name],
        on_message: Callable[[Message], Any],
        on_broken: Callable[[], Any],
        buffer: int,
        may_garble: Callable[[Message], bool] | None,
    ) -> None:
        self.ends = ends
        self._network = network
        self._sim = sim
        self._on_message = on_message
        self._on_broken = on_broken
        self._buffer = buffer
        self._may_garble = may_garble
        self._under_way = 0
        self._arrived: deque[Message] = deque()
        self._last_due = 0.0
        self._paused = False
        self.is_open = True
        """False once it was closed or has broken."""

        self.on_gone: Callable[[], Any] = _nothing
        """Set by the sender: called once when the reader has left, or the link has failed."""

    @property
    def pending(self) -> int:
        """Messages sent and not read."""
        return self._under_way + len(self._arrived)

    def send(self, message: Message) -> bool:
        """Send a message; False when the buffer is full or the stream has ended, and then it was not sent."""
        if not self.is_open or self.pending >= self._buffer:
            return False
        if self._may_garble is not None and self._may_garble(message):
            for _ in range(self._network.draw_copies(*self.ends)):
                self._under_way += 1
                self._sim.call_later(self._network.draw_delay_s(*self.ends), self._arrive, message)
            return True
        # In order: nothing is due before what was sent before it.
        delay_s = self._network.draw_delay_s(*self.ends)
        self._last_due = max(self._sim.now + delay_s, self._last_due)
        self._under_way += 1
        self._sim.call_at(self._last_due, self._arrive, message)
        return True

    def pause(self) -> None:
        """The reader reads no more for now."""
        self._paused = True

    def resume(self) -> None:
        """The reader reads what has come meanwhile, and goes on."""
        self._paused = False
        self.hand_over()

    def close(self) -> None:
        """End it from either side; nobody is told, and what is under way is lost."""
        if self.is_open:
            self.is_open = False
            self._under_way = 0
            self._arrived.clear()
            self._network.forget(self)

    def break_off(self) -> None:
        """End it as a failing link does: both ends are told after ``CUT_NOTICE_S``."""
        if self.is_open:
            self.close()
            self._sim.call_later(CUT_NOTICE_S, self._on_broken)
            self._sim.call_later(CUT_NOTICE_S, self.on_gone)

    def reset(self) -> None:
        """The sender is not there any more: the reader is told, over the link."""
        if self.is_open:
            self.close()
            self._network.notify(*self.ends, self._on_broken)

    def leave(self) -> None:
        """The reader wants no more, or is not there any more: the sender is told, over the link."""
        if self.is_open:
            self.close()
            source, target = self.ends
            self._network.notify(target, source, self.on_gone)

    def hand_over(self) -> None:
        """Give the reader what has arrived, unless it is paused or the link is cut; for the network and the stream itself."""
        while self._arrived and not self._paused and not self._network.is_cut(*self.ends):
            self._on_message(self._arrived.popleft())

    def _arrive(self, message: Message) -> None:
        if self.is_open:
            self._under_way -= 1
            self._arrived.append(message)
            self.hand_over()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "ended"
        return f"<Stream {self.ends[0]} -> {self.ends[1]} {state}: {self._under_way} under way, {len(self._arrived)} unread>"


def _nothing() -> None:
    """Nobody wants to know."""
