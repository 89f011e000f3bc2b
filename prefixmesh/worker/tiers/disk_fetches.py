"""For whom prefixes are fetched from the disk, and when: which waiting requests are set aside for it, and how long. Pure.

A candidate for admission whose prefix goes on on the disk, beyond what the other tiers have, is set aside while its files are read, and others go
on. What came is copied to the device and put into the tree, where the request's match then finds it. Whatever goes wrong, or takes too long, ends in
the request's being admitted as it is, and computing::

    candidate ──► waits its turn ──► files are read ──► pages are copied to the device ──► candidate again, its prefix on the device
                       │                   │                      │
                       └───────────────────┴── failed, late ──────┴──► candidate again, computes

One fetch serves all who want the same next block: whoever comes after the first waits with it, and looks again. Reading is worth it when it takes less
time than computing, by rates that are measured as they are of load-backs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.transfers import Fetch
from prefixmesh.errors import InvariantError
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.disk_jobs import Disk, DiskPrefix, ReadDone
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates

MAX_READS: Final = 4
"""At once. One thread reads them one after the other; some are queued so that it need not wait for a step to end."""

MAX_READING_BYTES: Final = 1024 * 2**20
"""Memory for what is being read and copied, of all fetches together. A prefix that is longer is fetched as far as that goes."""

LEAST_WAIT_S: Final = 2.0
"""A request that was set aside for so long, and ``PATIENCE`` times as long as was expected, is computed."""

PATIENCE: Final = 4.0

FIXED_MS: Final = 2.0
"""What a fetch costs however little it brings: a thread's turn, a file to open, and being seen between two steps, twice."""

GUESSED_BYTES_PER_S: Final = 2e8
"""Before the first read: how long that is waited for, and nothing else. A disk that is slower is found out by it."""

WEIGHT: Final = 0.3
"""Of the newest read in the moving average: a disk's cache makes reads differ, and the last few count."""

KEPT_PER_REFUSAL: Final = 0.97
"""Of the rate, whenever somebody computes because of it: else nobody would find out that the disk has become quicker."""

_MS_PER_S = 1000.0


class FetchedRange(NamedTuple):
    """Tokens of a request's prompt that came from the disk for it."""

    start_tokens: int
    end_tokens: int

    def within(self, matched_tokens: int) -> int:
        """How many of them a match of so many tokens has."""
        return max(0, min(matched_tokens, self.end_tokens) - self.start_tokens)


NOTHING_FETCHED: Final = FetchedRange(0, 0)


class BeganCopy(NamedTuple):
    """Pages to be copied to the device now, ``buffer[i]`` to ``copy.device_pages[i]``. Its end is told by ``copied`` or ``failed``."""

    copy: Fetch
    buffer: Any


class DiskFetch:
    """One prefix on its way from the disk."""

    __slots__ = (
        "asked_by",
        "began_at",
        "copy",
        "expected_ms",
        "first_unit",
        "owner",
        "prefix",
        "read_number",
        "waiting",
    )

    def __init__(
        self, prefix: DiskPrefix, first_unit: bytes, asked_by: str, owner: str, now: float, expected_ms: float
    ) -> None:
        self.prefix = prefix
        self.first_unit = first_unit
        """The name of its first unit: whoever wants that waits for this fetch."""

        self.asked_by = asked_by
        """The request whose prefix it is."""

        self.owner = owner
        self.began_at = now
        self.expected_ms = expected_ms
        self.read_number: int | None = None
        """Its read's; None until that has been begun."""

        self.copy: Fetch | None = None
        """Set once it was read."""

        self.waiting: dict[str, None] = {}
        """Ids of the requests that are set aside for it."""

    @property
    def wait_until(self) -> float:
        """When nobody waits for it any more."""
        return self.began_at + max(LEAST_WAIT_S, PATIENCE * self.expected_ms / _MS_PER_S)

    def left_ms(self, now: float) -> float:
        """How long it is still to be expected to take; 0 for one that is late."""
        return max(0.0, self.expected_ms - (now - self.began_at) * _MS_PER_S)

    def __repr__(self) -> str:
        stage = "copied" if self.copy is not None else "queued" if self.read_number is None else "read"
        return f"<DiskFetch of {self.prefix.size_tokens} tokens, {stage}, {len(self.waiting)} wait>"


@dataclass(slots=True)
class _Want:
    """What is known of a request that waits."""

    fetch: DiskFetch | None = None
    """What it is set aside for."""

    is_decided: bool = False
    """Nothing more is fetched for it."""

    fetched: FetchedRange = NOTHING_FETCHED


class DiskFetches:
    """See the module. One loop owns it.

    * candidates: ``consider``, ``waiting``, ``fetched``, ``forget``
    * what happens: ``pump``, ``was_read``, ``copied``, ``copy_failed``, ``expire``
    """

    def __init__(
        self,
        cache: RadixCache,
        disk: Disk,
        engine: EngineRates,
        load_backs: LoadBackRates,
        *,
        device_pages: int,
        page_bytes: int,
    ) -> None:
        """``engine`` says what computing takes, ``load_backs`` what copying to the device does."""
        self._cache = cache
        self._disk = disk
        self._engine = engine
        self._load_backs = load_backs
        self._guessed_ms_per_token = page_bytes / cache.page_size / GUESSED_BYTES_PER_S * _MS_PER_S
        self._max_reading_pages = max(1, MAX_READING_BYTES // max(1, page_bytes))
        # A fetch brings no more than its request's own prompt, for which it would take the pages in any case.
        self._max_pages = min(device_pages, self._max_reading_pages)
        self._wants: dict[str, _Want] = {}
        """By request id: of those that were looked at and are not admitted."""

        self._fetches: dict[bytes, DiskFetch] = {}
        """By the name of their first unit."""

        self._reads: dict[int, DiskFetch] = {}
        self.disk_ms_per_token = 0.0
        """As measured; 0 before the first read."""

        self.fetched_tokens = 0
        self.recomputed_tokens = 0
        """Of prefixes that were to be fetched, and did not come; those that are not worth it are not among them."""

    @property
    def waiting(self) -> list[str]:
        """Ids of the requests that are set aside. O(them)."""
        return [request_id for fetch in self._fetches.values() for request_id in fetch.waiting]

    @property
    def is_reading(self) -> bool:
        """Whether files are being read."""
        return bool(self._reads)

    def consider(self, request_id: str, key: Callable[[], RadixKey], owner: str, now: float) -> bool:
        """Whether a candidate is set aside, because its prefix comes from the disk. O(tokens) the first time, and after a fetch that it waited
        for, when its ``key`` is asked for; else O(1)."""
        want = self._wants.get(request_id)
        if want is None:
            want = self._wants[request_id] = _Want()
        if want.fetch is not None:
            return True
        if want.is_decided:
            return False
        fetch = self._fetch_for(request_id, key(), owner, now)
        if fetch is None:
            want.is_decided = True
            return False
        want.fetch = fetch
        fetch.waiting[request_id] = None
        return True

    def fetched(self, request_id: str) -> FetchedRange:
        """What came from the disk for a request. O(1)."""
        want = self._wants.get(request_id)
        return NOTHING_FETCHED if want is None else want.fetched

    def forget(self, request_id: str) -> None:
        """It was admitted or has ended, whether it was set aside or not. What is read for nobody is not copied. O(1)."""
        want = self._wants.pop(request_id, None)
        if want is None or want.fetch is None:
            return
        want.fetch.waiting.pop(request_id, None)
        if not want.fetch.waiting:
            self._give_up(want.fetch)

    def expire(self, now: float) -> None:
        """Let those compute who have waited long enough. O(fetches)."""
        for fetch in [fetch for fetch in self._fetches.values() if now >= fetch.wait_until]:
            self.recomputed_tokens += fetch.prefix.size_tokens
            self._release(fetch, is_over=True)
            self._give_up(fetch)

    def pump(self) -> None:
        """Begin the reads that have their turn. O(fetches)."""
        pages = sum(self._pages(fetch) for fetch in self._fetches.values() if fetch.read_number is not None)
        for fetch in self._fetches.values():
            if fetch.read_number is not None:
                continue
            if len(self._reads) >= MAX_READS or (
                pages and pages + self._pages(fetch) > self._max_reading_pages
            ):
                return
            number = self._disk.read(fetch.prefix)
            if number is None:
                return
            fetch.read_number = number
            self._reads[number] = fetch
            pages += self._pages(fetch)

    def was_read(self, outcome: ReadDone, now: float) -> BeganCopy | None:
        """Files were read, as far as they were good; what is to be copied now, if anybody still wants it. O(depth + pages)."""
        fetch = self._reads.pop(outcome.number)
        if outcome.size_tokens and outcome.elapsed_s > 0.0:
            self._measured(outcome.elapsed_s * _MS_PER_S / outcome.size_tokens)
        if not fetch.waiting:
            return None
        began = self._begin_copy(fetch, outcome, now) if outcome.size_tokens else None
        if began is None:
            self.recomputed_tokens += fetch.prefix.size_tokens
            self._end(fetch, NOTHING_FETCHED)
        return began

    def copied(self, copy: Fetch) -> None:
        """What was copied is in the tree: its requests look again. O(fetches)."""
        size_tokens = len(copy.device_pages) * self._cache.page_size
        self.fetched_tokens += size_tokens
        fetch = self._fetch_of(copy)
        if fetch is not None:
            self._end(fetch, FetchedRange(copy.start, copy.start + size_tokens))

    def copy_failed(self, copy: Fetch) -> None:
        """It was not: they compute. O(fetches)."""
        self.recomputed_tokens += len(copy.device_pages) * self._cache.page_size
        fetch = self._fetch_of(copy)
        if fetch is not None:
            self._end(fetch, NOTHING_FETCHED)

    def check_invariants(self) -> None:
        """Who is set aside waits for a fetch that is under way, and the other way round; raises InvariantError. O(all)."""
        waiting = {request_id for request_id, want in self._wants.items() if want.fetch is not None}
        if waiting != set(self.waiting):
            raise InvariantError(f"DiskFetches: set aside are {sorted(waiting)}: {self!r}")

    def __repr__(self) -> str:
        return f"<DiskFetches {list(self._fetches.values())}, {len(self._reads)} reads, {len(self._wants)} requests known>"

    def _fetch_for(self, request_id: str, key: RadixKey, owner: str, now: float) -> DiskFetch | None:
        """A fetch under way of what comes next, or a new one if that is worth it; None to compute."""
        units = self._disk.units(key)
        self._disk.use(units)
        found = self._cache.peek_tiers(key)
        prefix = self._disk.find(units, found.device)
        if prefix is None or prefix.end_tokens <= found.device + found.host:
            return None
        prefix = prefix.cut(found.device + self._max_pages * self._cache.page_size)
        if prefix is None or self._is_stuck(now):
            return None
        name = units.names[prefix.start_tokens // units.unit_tokens]
        fetch = self._fetches.get(name)
        if fetch is not None:
            return fetch
        before_ms = max((fetch.left_ms(now) for fetch in self._fetches.values()), default=0.0)
        expected_ms = before_ms + self._fetch_ms(prefix.size_tokens)
        if not self._is_worth(prefix, found.device, found.host, expected_ms):
            self.disk_ms_per_token *= KEPT_PER_REFUSAL
            return None
        fetch = self._fetches[name] = DiskFetch(prefix, name, request_id, owner, now, expected_ms)
        return fetch

    def _is_stuck(self, now: float) -> bool:
        """Whether a read takes so long that nobody waits for it any more: others would not come sooner."""
        return any(now >= fetch.wait_until for fetch in self._reads.values())

    def _is_worth(self, prefix: DiskPrefix, device_tokens: int, host_tokens: int, expected_ms: float) -> bool:
        """Whether it is there sooner from the disk. What the host has of it could be loaded back, and only the rest be computed."""
        compute_ms = self._engine.prefill_ms(device_tokens + host_tokens, prefix.end_tokens)
        if compute_ms <= 0.0 or not self.disk_ms_per_token:
            return True  # nobody has measured yet
        if host_tokens:
            compute_ms += self._load_backs.restore_ms(host_tokens)
        return expected_ms < compute_ms

    def _fetch_ms(self, size_tokens: int) -> float:
        read_ms_per_token = self.disk_ms_per_token or self._guessed_ms_per_token
        return FIXED_MS + read_ms_per_token * size_tokens + self._load_backs.restore_ms(size_tokens)

    def _pages(self, fetch: DiskFetch) -> int:
        return fetch.prefix.size_tokens // self._cache.page_size

    def _begin_copy(self, fetch: DiskFetch, outcome: ReadDone, now: float) -> BeganCopy | None:
        """None when no page can be had for it, when what stood before it was evicted meanwhile, or when somebody has computed all of it."""
        key = fetch.prefix.key
        match = self._cache.match_prefix(key, now)
        skipped = match.matched_tokens - fetch.prefix.start_tokens
        if not 0 <= skipped < outcome.size_tokens:
            return None
        copy = self._cache.transfers.begin_fetch(key, match, outcome.size_tokens - skipped, fetch.owner)
        if copy is None:
            return None
        fetch.copy = copy
        first = skipped // self._cache.page_size
        return BeganCopy(copy, outcome.buffer[first : first + len(copy.device_pages)])

    def _fetch_of(self, copy: Fetch) -> DiskFetch | None:
        return next((fetch for fetch in self._fetches.values() if fetch.copy is copy), None)

    def _end(self, fetch: DiskFetch, fetched: FetchedRange) -> None:
        """Those who waited are candidates again: that whose prefix it is as it is now, the others, if it came, to look once more."""
        want = self._wants.get(fetch.asked_by)
        if want is not None and want.fetch is fetch:
            want.is_decided, want.fetched = True, fetched
        self._release(fetch, is_over=fetched is NOTHING_FETCHED)
        del self._fetches[fetch.first_unit]

    def _release(self, fetch: DiskFetch, *, is_over: bool) -> None:
        for request_id in fetch.waiting:
            want = self._wants[request_id]
            want.fetch = None
            want.is_decided |= is_over
        fetch.waiting.clear()

    def _give_up(self, fetch: DiskFetch) -> None:
        """Nobody waits for it. What is being copied ends in the tree."""
        del self._fetches[fetch.first_unit]
        if fetch.read_number is not None and fetch.copy is None:
            self._disk.cancel(fetch.read_number)

    def _measured(self, ms_per_token: float) -> None:
        if not self.disk_ms_per_token:
            self.disk_ms_per_token = ms_per_token
        else:
            self.disk_ms_per_token += WEIGHT * (ms_per_token - self.disk_ms_per_token)
