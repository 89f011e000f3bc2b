"""A core with a host tier over the fake model, and a disk behind it that keeps what the host's slots held."""

from typing import Any

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.tiers.disk_jobs import DiskPrefix, ReadDone
from prefixmesh.worker.tiers.disk_runs import KvLayout
from tests.support.fake_disk import FakeDisk
from tests.support.scripted_mover import Content, ScriptedMover
from tests.support.tier_bench import TierBench


class SlotDisk(FakeDisk):
    """Reads and writes are over as soon as they begin, unless they are held; what is read and written is so at its end."""

    def __init__(self, mover: ScriptedMover, page_size: int, block_size: int) -> None:
        layout = KvLayout(
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            page_size=page_size,
            block_size=block_size,
        )
        super().__init__(layout)
        self._mover = mover
        self._kept: dict[tuple[bytes, bytes], list[Content]] = {}
        """By where it lives, and all tokens up to a page's end."""

        self._host_pages: dict[int, PageIndices] = {}
        self.holds: set[str] = set()
        """``read``, ``write``."""

        self.waits = 0

    def write(self, key: RadixKey, host_pages: PageIndices) -> int | None:
        number = super().write(key, host_pages)
        if number is not None:
            self._host_pages[number] = host_pages
            if "write" not in self.holds:
                self.finish_write()
        return number

    def finish_write(self, size_tokens: int | None = None) -> None:
        number, key = next(iter(self.writes.items()))
        pages = self._host_pages.pop(number)
        for prefix, page in zip(self._prefixes(key, 0, len(key.tokens)), pages.tolist(), strict=True):
            self._kept[_place(key, prefix), prefix] = self._mover.host_page(page)
        super().finish_write(size_tokens)

    def read(self, prefix: DiskPrefix) -> int | None:
        number = super().read(prefix)
        if "read" not in self.holds:
            self.finish_read()
        return number

    def finish_read(self, size_tokens: int | None = None, elapsed_s: float = 0.001) -> None:
        key, start = (prefix := next(iter(self.reads.values()))).key, prefix.start_tokens
        super().finish_read(size_tokens, elapsed_s)
        done = self._done.pop()
        assert isinstance(done, ReadDone)
        end = (start + done.size_tokens) * TOKEN_BYTES
        pages = [self._kept[_place(key, each), each] for each in self._prefixes(key, start, end)]
        self._done.append(done._replace(buffer=pages))

    def wait_done(self, at_most_s: float) -> None:
        self.waits += 1
        self._mover.on_wait(at_most_s)

    def _prefixes(self, key: RadixKey, start_tokens: int, end: int) -> list[bytes]:
        size = self.layout.page_size * TOKEN_BYTES
        return [key.tokens[: at + size] for at in range(start_tokens * TOKEN_BYTES, end, size)]


def _place(key: RadixKey, prefix: bytes) -> bytes:
    is_tail = key.boundary_tokens and len(prefix) > key.boundary_tokens * TOKEN_BYTES
    return key.namespace + key.tail if is_tail else key.namespace


class DiskBench(TierBench):
    """See the module."""

    disk: SlotDisk

    def __init__(self, *, page_size: int = 1, **settings: Any) -> None:
        def make(mover: ScriptedMover) -> SlotDisk:
            self.disk = SlotDisk(mover, page_size, block_size=2)
            return self.disk

        super().__init__(page_size=page_size, disk=make, **settings)

    def evict_all(self) -> None:
        """Take all from device and host that nothing locks."""
        self.evict()
        self.cache.evict_host(self.host.total_pages)
        self._check()

    def aside(self) -> list[str]:
        assert self.keeper.disk is not None
        return self.keeper.disk.fetches.waiting

    def check_at_rest(self) -> None:
        super().check_at_rest()
        assert self.aside() == []
        assert self.keeper.disk is not None
        assert self.keeper.disk.fetches._wants == {}
