"""Caches whose pages hold bytes, for tests that copy KV from one into another."""

from collections.abc import Mapping, Sequence

from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.tokens import pack
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_desk import KvDesk
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.prefix_messages import KvRead, KvWritten, PrefixAnswer, PrefixName, ReadKv, WriteKv
from tests.support.cache_kit import NS_A, as_pages, key_of

PAGE = 2
LAYOUT = CopyLayout(dtype="float16", layers=1, kv_heads=1, head_dim=2, page_size=PAGE)
PAGE_BYTES = LAYOUT.page_bytes


class PagesOfBytes:
    """``PageBytes`` over two dictionaries: by page, what was written there."""

    def __init__(self, layout: CopyLayout = LAYOUT) -> None:
        self.layout = layout
        self.device: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.failing = False
        self.writes = 0

    def read(self, device: PageIndices, host: PageIndices) -> bytes:
        return b"".join(self.device[page] for page in device.tolist()) + b"".join(
            self.host[page] for page in host.tolist()
        )

    def write(self, device: PageIndices, kv: memoryview) -> None:
        if self.failing:
            raise RuntimeError("the device does not take it")
        self.writes += 1
        size = self.layout.page_bytes
        assert len(kv) == len(device) * size
        for place, page in enumerate(device.tolist()):
            self.device[page] = bytes(kv[place * size : (place + 1) * size])


class CopyBench:
    """A desk before a radix cache of pages of two tokens. What a page holds is told by its tokens."""

    def __init__(
        self, pages: int = 20, quotas: Mapping[str, Quota] | None = None, host_pages: int = 0
    ) -> None:
        self.allocator = PageAllocator(pages)
        options = RadixOptions(
            block_size=PAGE,
            quotas=quotas or {},
            host=PageAllocator(host_pages) if host_pages else None,
        )
        self.cache = RadixCache(self.allocator, PAGE, options)
        self.kv = KvManager(self.allocator, self.cache)
        self.bytes = PagesOfBytes()
        self.desk = KvDesk(self.cache, self.kv, self.bytes)
        self.now = 0.0

    def compute(self, tokens: Sequence[int], owner: str = "") -> None:
        """As if a request had computed these tokens and ended."""
        self.now += 1
        have = self.cache.peek(key_of(tokens)) // PAGE
        fresh = self.kv.take_pages(len(tokens) // PAGE - have, owner)
        assert fresh is not None
        match = self.cache.match_prefix(key_of(tokens), self.now)
        for place, page in enumerate(fresh.tolist(), start=have):
            self.bytes.device[page] = kv_of(tokens)[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
        whole = [*match.device_indices.tolist(), *fresh.tolist()]
        self.cache.insert(key_of(tokens), as_pages(whole), self.now, owner=owner)
        self.check()

    def read(self, tokens: Sequence[int], start: int = 0, max_pages: int = 100) -> KvRead:
        command = ReadKv(
            question=1, prefix=name_of(tokens), start_tokens=start, max_bytes=max_pages * PAGE_BYTES
        )
        answer = self.ask(command)
        assert answer.read is not None, answer
        return answer.read

    def write(self, tokens: Sequence[int], start: int, kv: bytes, owner: str = "") -> KvWritten:
        """Of ``tokens`` those from ``start`` on; ``kv`` is theirs."""
        command = WriteKv(question=2, prefix=name_of(tokens), start_tokens=start, kv=kv, owner=owner)
        answer = self.ask(command)
        assert answer.written is not None, answer
        return answer.written

    def ask(self, command: ReadKv | WriteKv) -> PrefixAnswer:
        """What a command comes to, with the cache looked at afterwards."""
        self.now += 1
        answer = self.desk.take(command, self.now) or self.desk.turn(self.now)
        assert answer.question == command.question
        self.check()
        return answer

    def check(self) -> None:
        self.cache.check_invariants()
        self.allocator.check_invariants()
        owned = len(self.cache.owned_pages())
        assert owned + self.allocator.free_pages == self.allocator.total_pages
        self.bytes.device = {
            page: kv
            for page, kv in self.bytes.device.items()
            if page in set(self.cache.owned_pages().tolist())
        }


def kv_of(tokens: Sequence[int]) -> bytes:
    """What these tokens' KV is: of each, a number that all before it have made."""
    size = PAGE_BYTES // PAGE
    chain = 7
    parts = []
    for token in tokens:
        chain = (chain * 31 + token + 1) % 2**32
        parts.append(chain.to_bytes(4, "little") * (size // 4))
    return b"".join(parts)


def name_of(tokens: Sequence[int]) -> PrefixName:
    return PrefixName(NS_A, pack(list(tokens)))
