"""The ledger: how many prompt tokens were asked for, how many were found and on which tier, and why the rest was not.

It counts *requests*, not look-ups. A request makes one ``CacheQuery`` when it arrives, and only a query can count, and only the
first time: a request that is preempted and resumed, that matches again after a failed restore, or that computes something twice
has been counted already. So a rate says what callers met, and no pressure inside the worker can make it look better or worse.

Every counter only rises, and ``prompt_tokens == sum(hit_tokens) + sum(miss_tokens)`` holds for each row. The ledger does
not know caches: what was found, and why not more, comes in as a ``Lookup`` (made by ``misses.MissFinder``).

Causes are for whoever runs the worker. A tenant must not be shown ``OTHER_NAMESPACE``: it tells what others have cached.
"""

import enum
from collections import OrderedDict
from typing import Final, NamedTuple

from prefixmesh.cache.namespace import short_digest
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import ConfigError, InternalError, InvariantError
from prefixmesh.ids import Namespace

MAX_LEDGER_ROWS: Final = 1024
"""Namespaces with a row of their own. A caller makes as many as it likes (its own ``extra_key`` is in them), so there must be a
bound; more tenants and adapters than this are hardly in use on one worker at a time. Less than 0.5 MB."""


class MissCause(enum.IntEnum):
    """Why a prompt token had to be computed; the values index ``Misses``."""

    NEVER_SEEN = 0
    """Nothing says that it was ever cached here. Also what nobody can know: see ``misses.classify``."""

    EVICTED = 1
    """It was cached in this namespace, and evicted from the last tier before this request came: more room would have helped."""

    OTHER_NAMESPACE = 2
    """Equal tokens are cached in another namespace, which must not be shared: a public prefix may help."""

    TAIL = 3
    """Beyond the last whole page that may be matched; the last token of a prompt, which is always computed, is among them."""


class Hits(NamedTuple):
    """Tokens found, by tier; ``hits[Tier.HOST]`` is ``hits.host``."""

    device: int = 0
    host: int = 0
    """What only the host held."""
    disk: int = 0
    """What neither held: it was read from the disk, which is no tier of the tree, before the request was admitted."""


class Misses(NamedTuple):
    """Tokens not found, by cause; ``misses[MissCause.TAIL]`` is ``misses.tail``."""

    never_seen: int = 0
    evicted: int = 0
    other_namespace: int = 0
    tail: int = 0


class Lookup(NamedTuple):
    """What one request asked for and what it got; the parts sum to ``prompt_tokens``."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    misses: Misses
    disk_tokens: int = 0
    """Of what the device holds now, what was fetched for this request: not counted in ``device_tokens``."""


class LedgerRow(NamedTuple):
    """The counts of one namespace, of those that have no row any more, or of all."""

    requests: int
    prompt_tokens: int
    hit_tokens: Hits
    miss_tokens: Misses

    def cache_hit_rate(self, tier: Tier | None = None) -> float | None:
        """Share of the prompt tokens that were found, on ``tier`` or (None) on any; None when nothing was asked for."""
        if not self.prompt_tokens:
            return None
        found = sum(self.hit_tokens) if tier is None else self.hit_tokens[tier]
        return found / self.prompt_tokens


class CacheQuery:
    """One request's right to be counted, once. Held by the request from its arrival to its end; the ledger keeps none.

    A request that ends before it was ever admitted is not counted: it has asked the cache for nothing.
    """

    __slots__ = ("_ledger", "_namespace", "_open")

    def __init__(self, ledger: "CacheLedger", namespace: Namespace) -> None:
        self._ledger = ledger
        self._namespace = namespace
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether this request has still to be counted; asked first, it saves explaining what would be ignored."""
        return self._open

    def leave_uncounted(self) -> None:
        """Count nothing of this request: nobody has asked for it. O(1)."""
        self._open = False

    def record(self, lookup: Lookup) -> bool:
        """Count ``lookup``, if this query has counted nothing yet; returns whether it did. O(1).

        Any later call changes nothing but the ledger's ``ignored_records``. Raises InternalError, changing nothing, when the
        lookup's parts are negative or do not sum to its prompt.
        """
        if not self._open:
            self._ledger.ignored_records += 1
            return False
        self._ledger._count(self._namespace, lookup)
        self._open = False
        return True

    def __repr__(self) -> str:
        return (
            f"CacheQuery(namespace={short_digest(self._namespace)}, {'open' if self._open else 'recorded'})"
        )


class CacheLedger:
    """Counts per namespace, in a bounded number of rows. Not thread-safe: the engine's loop owns it.

    The row that was counted in least recently is folded into ``rest`` when a new namespace needs its place, so that no token
    is ever lost from the totals; should its namespace come back, it begins again from zero.
    """

    __slots__ = ("_max_rows", "_rest", "_rows", "_totals", "folded_rows", "ignored_records")

    def __init__(self, max_rows: int = MAX_LEDGER_ROWS) -> None:
        if max_rows < 1:
            raise ConfigError(f"a ledger needs at least one row, got max_rows={max_rows}")
        self._max_rows = max_rows
        self._rows: OrderedDict[Namespace, _Counts] = OrderedDict()
        """Least recently counted in first."""
        self._rest = _Counts()
        self._totals = _Counts()
        self.folded_rows = 0
        """Rows that were folded into ``rest``; when it keeps rising, there are more namespaces in use than rows."""
        self.ignored_records = 0
        """Records after a query's first: look-ups that would have been counted twice."""

    def open_query(self, namespace: Namespace) -> CacheQuery:
        """The query of a request that arrives; ``namespace`` is the caller's own, also where a public prefix is matched."""
        return CacheQuery(self, namespace)

    def row(self, namespace: Namespace) -> LedgerRow | None:
        """The counts of ``namespace``; None when it has no row (never counted, or folded). O(1)."""
        counts = self._rows.get(namespace)
        return None if counts is None else counts.row()

    def rows(self) -> dict[Namespace, LedgerRow]:
        """Every row, least recently counted in first, without ``rest``. O(rows)."""
        return {namespace: counts.row() for namespace, counts in self._rows.items()}

    def rest(self) -> LedgerRow:
        """The counts of all rows that were folded. O(1)."""
        return self._rest.row()

    def totals(self) -> LedgerRow:
        """The counts of all namespaces, those in ``rest`` too. O(1)."""
        return self._totals.row()

    def cache_hit_rate(self, tier: Tier | None = None) -> float | None:
        """Share of all prompt tokens that were found, on ``tier`` or on any; None when nothing was asked for. O(1)."""
        return self.totals().cache_hit_rate(tier)

    def check_invariants(self) -> None:
        """Every row's parts are not negative and sum to its prompts, and all rows sum to the totals; raises InvariantError
        with the counts printed. O(rows)."""
        summed = _Counts()
        for name, counts in (("rest", self._rest), ("totals", self._totals), *self._rows.items()):
            row = counts.row()
            if min(row.requests, *row.hit_tokens, *row.miss_tokens) < 0:
                raise InvariantError(f"CacheLedger: negative: {name!r} is {row}")
            if row.prompt_tokens != sum(row.hit_tokens) + sum(row.miss_tokens):
                raise InvariantError(
                    f"CacheLedger: sums: the parts of {name!r} do not sum to its prompts: {row}"
                )
            if counts is not self._totals:
                summed.add(counts)
        if summed.row() != self._totals.row():
            raise InvariantError(f"CacheLedger: totals: the rows sum to {summed.row()}, not {self.totals()}")
        if len(self._rows) > self._max_rows:
            raise InvariantError(f"CacheLedger: bound: {len(self._rows)} rows, {self._max_rows} allowed")

    def _count(self, namespace: Namespace, lookup: Lookup) -> None:
        """For ``CacheQuery.record`` alone."""
        prompt, device, host, misses, disk = lookup
        never_seen, evicted, elsewhere, tail = misses
        parts_are_counts = (
            device >= 0 <= host and disk >= 0 <= never_seen and evicted >= 0 <= elsewhere and tail >= 0
        )
        missed = never_seen + evicted + elsewhere + tail
        if not parts_are_counts or device + host + disk + missed != prompt:
            raise InternalError(f"the parts of a look-up do not make up its prompt: {lookup}")
        counts = self._rows.get(namespace)
        if counts is None:
            counts = self._new_row(namespace)
        else:
            self._rows.move_to_end(namespace)
        counts.add_lookup(lookup)
        self._totals.add_lookup(lookup)

    def _new_row(self, namespace: Namespace) -> "_Counts":
        if len(self._rows) >= self._max_rows:
            _, oldest = self._rows.popitem(last=False)
            self._rest.add(oldest)
            self.folded_rows += 1
        counts = self._rows[namespace] = _Counts()
        return counts

    def __repr__(self) -> str:
        totals = self.totals()
        rate = totals.cache_hit_rate()
        return (
            f"CacheLedger(requests={totals.requests}, prompt_tokens={totals.prompt_tokens}, "
            f"cache_hit_rate={'none' if rate is None else f'{rate:.3f}'}, rows={len(self._rows)}/{self._max_rows}, "
            f"folded={self.folded_rows})"
        )


class _Counts:
    """A row that can be added to: nine integers."""

    __slots__ = (
        "device",
        "disk",
        "evicted",
        "host",
        "never_seen",
        "other_namespace",
        "prompt",
        "requests",
        "tail",
    )

    def __init__(self) -> None:
        self.requests = self.prompt = self.device = self.host = self.disk = 0
        self.never_seen = self.evicted = self.other_namespace = self.tail = 0

    def add_lookup(self, lookup: Lookup) -> None:
        misses = lookup.misses
        self.requests += 1
        self.prompt += lookup.prompt_tokens
        self.device += lookup.device_tokens
        self.host += lookup.host_tokens
        self.disk += lookup.disk_tokens
        self.never_seen += misses.never_seen
        self.evicted += misses.evicted
        self.other_namespace += misses.other_namespace
        self.tail += misses.tail

    def add(self, other: "_Counts") -> None:
        for name in _Counts.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self) -> LedgerRow:
        misses = Misses(self.never_seen, self.evicted, self.other_namespace, self.tail)
        return LedgerRow(self.requests, self.prompt, Hits(self.device, self.host, self.disk), misses)
