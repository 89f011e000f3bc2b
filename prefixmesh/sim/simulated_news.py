"""What the readers of a simulated worker are told of its cache and load: the turns of ``worker.cache_watchers``, in simulated time.

A snapshot in parts or what has happened since the reader's place, then events as they happen and reports when they are due. A reader whose
buffer is full, or whose place the log does not keep any more, is cut off and must begin anew; nobody waits for it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from prefixmesh.cache.events import Event
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.errors import OverloadedError
from prefixmesh.ids import Epoch
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.sim.faults import FaultsNow
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.network import Stream
from prefixmesh.worker.cache_watchers import PART_BLOCKS
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.messages import Stats
from prefixmesh.worker.router_requests import OwnReader
from prefixmesh.worker.worker_reports import ReportMaker, ReportPace

PART_S: Final = 0.001
"""Between two parts of a snapshot: the cache goes on meanwhile."""

SILENCE_LOOK_S: Final = 0.05
"""How soon a reader that a fault keeps in the dark is looked at again."""

Place = tuple[Epoch, int]


class Figures:
    """The engine's figures as it has told them last; ``worker.recent_stats`` without an event loop."""

    def __init__(self, load: FrontLoad, ask: Callable[[], None]) -> None:
        """``ask`` sends the engine the question; its answer goes to ``answered``."""
        self.last: Stats | None = None
        self.mark = load.mark()
        self.on_answer: Callable[[], None] = _ignore
        self._load = load
        self._send_question = ask
        self._asked_at: float | None = None
        self._ask_again = False

    def ask(self) -> None:
        """Have ``last`` renewed by what is true from now on."""
        if self._asked_at is not None:
            self._ask_again = True
            return
        self._asked_at = self._load.mark()
        self._send_question()

    def answered(self, stats: Stats) -> None:
        """The engine's answer to the question."""
        assert self._asked_at is not None
        self.last, self.mark, self._asked_at = stats, self._asked_at, None
        if self._ask_again:
            self._ask_again = False
            self.ask()
        self.on_answer()


class Newsroom:
    """The books of one life of a worker, and those who read them."""

    def __init__(
        self,
        sim: Simulation,
        publisher: CachePublisher,
        load: FrontLoad,
        ask_stats: Callable[[], None],
        faults_now: Callable[[], FaultsNow],
    ) -> None:
        self.sim = sim
        self.publisher = publisher
        self.load = load
        self.figures = Figures(load, ask_stats)
        self.faults_now = faults_now
        self.reports = ReportMaker(self.figures, load, lambda: False, lambda: round(sim.now * 1e3))
        self._readers: list[NewsReader] = []
        self._awaits_answer = False
        load.on_change = self._on_load_change
        self.figures.on_answer = self._on_answer

    def read(
        self, stream: "Stream[News]", resume_from: Place | None, report_interval_s: float, router_id: str
    ) -> None:
        """A reader has come; it is told what there is to tell until its stream ends."""
        self._readers = [reader for reader in self._readers if reader.is_open]
        reader = NewsReader(self, stream, report_interval_s, router_id)
        self._readers.append(reader)
        reader.begin(resume_from)

    def wake(self) -> None:
        """The cache has changed."""
        for reader in self._readers:
            reader.wake()

    def close(self) -> None:
        """The life is over: all streams break."""
        for reader in self._readers:
            reader.cut_off()

    def _on_load_change(self) -> None:
        if self._note_news():
            self.figures.ask()
            self._awaits_answer = True

    def _on_answer(self) -> None:
        if self._awaits_answer:
            self._awaits_answer = False
            self._note_news()

    def _note_news(self) -> bool:
        """Make reports due soon; whether any was not already."""
        is_new = False
        for reader in self._readers:
            if reader.is_open and not reader.pace.has_news:
                reader.pace.has_news = is_new = True
                reader.wake()
        return is_new

    def __repr__(self) -> str:
        return f"<Newsroom {len(self._readers)} readers, {self.publisher!r}>"


class NewsReader:
    """One reader: its place in the log, and when it is due a report."""

    def __init__(
        self, room: Newsroom, stream: "Stream[News]", report_interval_s: float, router_id: str
    ) -> None:
        self._room = room
        self._stream = stream
        self._follows = ExitStack()
        self._own: OwnReader = self._follows.enter_context(room.load.requests.follow(router_id))
        self.pace = ReportPace(report_interval_s, lambda: room.sim.now)
        self._place: Place | None = None
        """None while a snapshot is being sent."""

        self._timer: Timer | None = None

    @property
    def is_open(self) -> bool:
        """Whether anybody reads."""
        return self._stream.is_open

    def begin(self, resume_from: Place | None) -> None:
        """Go on from a place, or from a snapshot where the log does not reach back to it."""
        publisher = self._room.publisher
        if resume_from is not None and publisher.events_since(*resume_from) is not None:
            self._place = resume_from
            self.wake()
            return
        snapshot = publisher.open_snapshot()
        place = (snapshot.summary.epoch, snapshot.summary.sequence)

        def next_part() -> None:
            if not self.is_open:
                snapshot.close()
                return
            part = snapshot.next_part(PART_BLOCKS)
            if part is not None:
                if not self._stream.send(part):
                    snapshot.close()
                    self.cut_off()
                    return
                self._room.sim.call_later(PART_S, next_part)
                return
            # Void by a flush: the reader is told of that next.
            self._place = place
            self.wake()

        next_part()

    def wake(self) -> None:
        """There may be something to tell: soon, once, however often this is called."""
        if self._place is not None:
            self._look_again(0.0)

    def cut_off(self) -> None:
        """Tell it nothing more: its stream breaks."""
        self._stream.reset()
        self._close()

    def _turn(self) -> None:
        """Tell all that there is to tell of this moment: the events up to it, and a report where one is due."""
        self._timer = None
        if not self.is_open:
            self._close()
            return
        faults = self._room.faults_now()
        if faults.silent or faults.stalled:
            self._look_again(SILENCE_LOOK_S)
            return
        try:
            self._tell(faults)
        except OverloadedError:
            self.cut_off()
            return
        if self._stream.is_open:
            self._look_again(self.pace.due_in_s())

    def _tell(self, faults: FaultsNow) -> None:
        is_due = self.pace.take_turn()
        for batch in self._take_events():
            self._send(batch)
        if is_due:
            report = self._room.reports.make(self._room.publisher.summary(), self._own)
            self._room.figures.ask()
            self._send(replace(report, summary=faults.summary(report.summary)))

    def _take_events(self) -> list[EventBatch]:
        publisher, batches = self._room.publisher, list[EventBatch]()
        assert self._place is not None
        if self._place[0] != publisher.epoch:
            batches.append(EventBatch([publisher.beginning]))
            self._place = (publisher.epoch, 0)
        events = publisher.events_since(*self._place)
        if events is None:
            raise OverloadedError("this reader was too slow: what it missed is not kept any more")
        if events:
            batches.append(EventBatch(list[Event](events)))
        self._place = (publisher.epoch, publisher.sequence)
        return batches

    def _send(self, news: News) -> None:
        if self._stream.is_open and not self._stream.send(news):
            raise OverloadedError("this reader takes nothing more")

    def _look_again(self, in_s: float) -> None:
        """Have a turn by then, and not later than what was asked for before."""
        when, timer = self._room.sim.now + in_s, self._timer
        if timer is None or timer.when > when:
            if timer is not None:
                timer.cancel()
            self._timer = self._room.sim.call_at(when, self._turn)

    def _close(self) -> None:
        self._follows.close()


def _ignore() -> None:
    """Nobody waits for answers."""
