"""How one end of a simulated network calls another: a request goes there, and a stream of answers comes back, as with gRPC."""

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from prefixmesh.proto.cache_news import News
from prefixmesh.router.worker_view import Need
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.network import STREAM_BUFFER, Name, Network, Stream
from prefixmesh.sim.simulated_news import Place
from prefixmesh.sim.simulated_worker import SimulatedWorker

Message = TypeVar("Message")

OPEN_AGAIN_S: Final = 0.1
"""After a stream of news has ended: time for whoever ended it to be there again, and no crowd at the door."""


def open_call(
    network: Network,
    caller: Name,
    server: Name,
    begin: Callable[["Stream[Message]"], Any],
    on_message: Callable[[Message], Any],
    on_broken: Callable[[], Any],
    *,
    buffer: int = STREAM_BUFFER,
    may_garble: Callable[[Message], bool] | None = None,
) -> "Stream[Message]":
    """The stream of answers to a request. ``begin`` is called at the server when the request arrives, with that stream, unless it has ended
    meanwhile. ``on_broken`` is called at the caller when either way fails; ``may_garble`` as of ``Network.open_stream``.

    A request that is under way arrives, whichever life of the server is there by then: as one does that a connection had queued when it was
    made anew.
    """
    answers: Stream[Message] = network.open_stream(
        server, caller, on_message, on_broken, buffer=buffer, may_garble=may_garble
    )

    def arrive(_: None) -> None:
        request.close()
        if answers.is_open:
            begin(answers)

    request: Stream[None] = network.open_stream(caller, server, arrive, answers.break_off)
    request.send(None)
    return answers


class NewsTaker(Protocol):
    """What learns from a worker's news: a router's core, or one view."""

    def opened(self, now: float) -> Place | None:
        """A stream is about to begin: where it goes on; None for a snapshot."""
        ...

    def take(self, news: News, now: float) -> Need:
        """Its next message."""
        ...

    def ended(self, cause: str, now: float) -> None:
        """It is over."""
        ...


class Watch:
    """Follows one worker's news for as long as the simulation runs: one stream after the other."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        name: Name,
        worker: SimulatedWorker,
        taker: NewsTaker,
        *,
        router_id: str,
        report_interval_s: float,
        silent_s: float,
        on_lost: Callable[[], Any] | None = None,
        may_garble: Callable[[News], bool] | None = None,
    ) -> None:
        """``name`` is the follower's on the network. A stream that says nothing for ``silent_s`` is given up. ``on_lost`` is called when one
        breaks, and then the next is begun only by ``open``."""
        self._sim = sim
        self._network = network
        self._name = name
        self._worker = worker
        self._taker = taker
        self._router_id = router_id
        self._report_interval_s = report_interval_s
        self._silent_s = silent_s
        self._on_lost = on_lost
        self._may_garble = may_garble
        self._is_closed = False
        self._stream: Stream[News] | None = None
        self._silence: Timer | None = None
        self._opens_again = False
        self.streams = 0
        """How many were begun."""

        self.open()

    @property
    def is_on(self) -> bool:
        """Whether a stream is open, or will be by itself."""
        return self._stream is not None or self._opens_again

    def open(self) -> None:
        """Begin a stream, unless one is open."""
        self._opens_again = False
        if self._stream is not None or self._is_closed:
            return
        self.streams += 1
        number, place = self.streams, self._taker.opened(self._sim.now)
        self._stream = open_call(
            self._network,
            self._name,
            self._worker.name,
            lambda stream: self._worker.watch(stream, place, self._report_interval_s, self._router_id),
            self._on_news,
            lambda: self._end("broken") if number == self.streams else None,
            may_garble=self._may_garble,
        )
        self._listen()

    def stop(self, cause: str) -> None:
        """Give the stream up; the next is begun by ``open``."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave()
            if self._silence is not None:
                self._silence.cancel()
            self._taker.ended(cause, self._sim.now)

    def close(self) -> None:
        """End for good, and tell nobody."""
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave()
        if self._silence is not None:
            self._silence.cancel()

    def _on_news(self, news: News) -> None:
        self._listen()
        if self._taker.take(news, self._sim.now) is Need.SNAPSHOT:
            self._end("snapshot")

    def _end(self, cause: str) -> None:
        """Give the stream up and begin another: at once for a snapshot, else after a pause."""
        if self._stream is None:
            return
        self.stop(cause)
        if cause == "broken" and self._on_lost is not None:
            self._on_lost()
        else:
            self._opens_again = True
            self._sim.call_later(0.0 if cause == "snapshot" else OPEN_AGAIN_S, self._open_again)

    def _open_again(self) -> None:
        if self._opens_again:
            self.open()

    def _listen(self) -> None:
        """Count the silence from now on."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._sim.call_later(self._silent_s, self._end, "silent")
