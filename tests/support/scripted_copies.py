"""A copier between caches of bytes: sources that give, break off, stand still and garble as a test says, and an engine that writes at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.errors import UnavailableError
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.tokens import unpack
from prefixmesh.worker.engine_stats import Stats
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.kv_copies.copier import KvCopier
from prefixmesh.worker.kv_copies.parts import checksum
from prefixmesh.worker.kv_copies.transport import CopiedPart, WantedKv
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand
from tests.support.kv_copying import LAYOUT, PAGE, PAGE_BYTES, CopyBench, kv_of
from tests.support.servers import eventually

OWN = Incarnation(1)


class DeskEngine:
    """Of ``EngineClient`` what a copier uses."""

    def __init__(self, bench: CopyBench) -> None:
        self.bench = bench
        self.gone = False
        self.before_write: Callable[[], None] = lambda: None

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        await asyncio.sleep(0)
        if self.gone:
            raise UnavailableError("the engine's process ended")
        command: Any = make(3)
        if command.kv:
            self.before_write()
        return self.bench.ask(command)


class Source:
    """What one address does when it is asked. It gives parts of ``pages`` pages of its prefix, ``held`` tokens long."""

    def __init__(self, held: int, *, pages: int = 2) -> None:
        self.held = held
        self.pages = pages
        self.dies_after: int | None = None
        """Parts."""

        self.stalls_after: int | None = None
        self.garble: Callable[[CopiedPart], CopiedPart] = lambda part: part
        self.asked: list[int] = []
        """From which token on, each time."""

        self.open = 0
        self.reached = asyncio.Event()
        """It stands still."""


class ScriptedTransport:
    """``KvTransport`` over such sources, by address."""

    def __init__(self, **sources: Source) -> None:
        self.sources = {f"{name}:1": source for name, source in sources.items()}
        self.closed = False

    async def read(self, source: KvSource, wanted: WantedKv) -> AsyncGenerator[CopiedPart, None]:
        one = self.sources[source.address]
        one.asked.append(wanted.start_tokens)
        one.open += 1
        try:
            ids = unpack(wanted.prefix.tokens).tolist()
            end = min(one.held, len(ids)) // PAGE * PAGE
            for number, start in enumerate(range(wanted.start_tokens, end, one.pages * PAGE)):
                if number == one.dies_after:
                    raise UnavailableError("connection reset")
                if number == one.stalls_after:
                    one.reached.set()
                    await asyncio.Event().wait()
                upto = min(end, start + one.pages * PAGE)
                kv = kv_of(ids)[start // PAGE * PAGE_BYTES : upto // PAGE * PAGE_BYTES]
                told = checksum(wanted.prefix.tokens, upto, kv)
                yield one.garble(CopiedPart(start, upto - start, kv, told))
        finally:
            one.open -= 1

    async def close(self) -> None:
        self.closed = True


class Figures:
    """``EngineFigures`` of an engine that needs a second for each token, so that any copy is quicker."""

    def __init__(self, ms_per_token: float = 1e3, quadratic: float = 0.0, load_back: float = 0.0) -> None:
        self.last: Stats | None = Stats(
            running=0,
            queued=0,
            total_pages=0,
            free_pages=0,
            evictable_pages=0,
            protected_pages=0,
            prefill_tokens_per_s=0.0,
            decode_step_ms=0.0,
            cache=LedgerRow(0, 0, Hits(), Misses()),
            double_releases=0,
            steps=0,
            prefill_ms_per_token=ms_per_token,
            prefill_ms_per_token2=quadratic,
            load_back_ms_per_token=load_back,
        )
        self.mark = 0.0


class CopierBench:
    """A copier before an empty cache, and sources by name."""

    def __init__(self, pages: int = 40, ms_per_token: float = 1e3, **sources: Source) -> None:
        self.cache = CopyBench(pages)
        self.engine = DeskEngine(self.cache)
        self.books = CopyBooks()
        self.books.open(LAYOUT)
        self.transport = ScriptedTransport(**sources)
        self.copier = KvCopier(
            self.engine,  # type: ignore[arg-type]
            self.books,
            Figures(ms_per_token),
            self.transport,
            model_revision="rev",
            incarnation=OWN,
        )

    def source(self, name: str, tokens: int = 1000, incarnation: int = 7) -> KvSource:
        return KvSource(address=f"{name}:1", incarnation=Incarnation(incarnation), tokens=tokens)

    async def at_rest(self) -> None:
        """Until what was cancelled has ended."""
        this = asyncio.current_task()
        await eventually(lambda: not [task for task in asyncio.all_tasks() if task is not this])

    def check_rest(self, cached_tokens: int) -> None:
        """Nothing is under way, nothing is held, and so many tokens are cached."""
        assert not len(self.copier)
        assert self.books.copying == 0
        assert not any(source.open for source in self.transport.sources.values())
        assert self.cache.cache.evictable_pages == cached_tokens // PAGE
        assert self.cache.allocator.free_pages + cached_tokens // PAGE == self.cache.allocator.total_pages
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
