"""A prefix cache of two tiers so naive that it is plainly right: sets of whole token tuples, searched in full each time.

It knows nothing of nodes, edges, page indices or receipts. What it says about lengths, locks, pins, the order of eviction and
the blocks on each tier, the real caches must say too.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import pack

Tokens = tuple[int, ...]
Space = tuple[bytes, bytes, int]
"""Where a prefix lives: its namespace; and for one that goes on behind a public prefix, the tail's namespace and the boundary."""
Prefix = tuple[Space, Tokens]
"""All tokens from the first up to the end of a unit (a page; for the hash cache a block), and where they live."""


class Prompt(NamedTuple):
    """What is looked up; ``tokens[:boundary]`` are public where there is a boundary, and the rest is the tail's."""

    namespace: bytes
    tokens: Tokens
    boundary: int = 0
    tail: bytes = b""

    def key(self) -> RadixKey:
        """The same, for a real cache."""
        return RadixKey(Namespace(self.namespace), pack(self.tokens), self.boundary, Namespace(self.tail))

    def upto(self, tokens: int) -> "Prompt":
        """The same prompt, cut."""
        return self._replace(tokens=self.tokens[:tokens])

    def prefix(self, end: int) -> Prefix:
        """The prefix of so many tokens."""
        if self.boundary and end > self.boundary:
            return (self.namespace, self.tail, self.boundary), self.tokens[:end]
        return (self.namespace, b"", 0), self.tokens[:end]

    def prefixes(self, unit: int) -> list[Prefix]:
        """All its prefixes of whole units, shortest first."""
        return [self.prefix(end) for end in range(unit, len(self.tokens) + 1, unit)]


def prompt_of(prefix: Prefix) -> Prompt:
    """The prompt that ends where this prefix does."""
    (namespace, tail, boundary), tokens = prefix
    return Prompt(namespace, tokens, boundary, tail)


def other_tier(tier: Tier) -> Tier:
    """Of two tiers, the other one."""
    return Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE


@functools.cache
def fingerprint(space: Space, tokens: Tokens, block_size: int) -> Fingerprint:
    """The name of the block that ends with ``tokens``; a tail is named from its own namespace on."""
    namespace, tail, boundary = space
    return block_fingerprints(tail or namespace, pack(tokens[boundary:]), block_size)[-1]


@dataclass(slots=True)
class Copy:
    """Pages on their way, and what is locked on each tier until they have arrived."""

    source: Tier | None
    """None: from somewhere else."""
    target: Tier | None
    copied: list[Prefix]
    locked: dict[Tier, list[Prefix]]
    epoch: int


PinName = tuple[str, Prompt, Tier]
"""Whose, what, and where."""


@dataclass(slots=True)
class NaiveTiers:
    """The prefixes on each tier with when each was last used there; who protects them; how often they were hit."""

    unit: int
    policy: str = "lru"
    pins: dict[PinName, float] = field(default_factory=dict)
    """When each ends; what ends first, or was renewed first, stands first among equals."""
    on: dict[Tier, dict[Prefix, int]] = field(default_factory=lambda: {tier: {} for tier in Tier})
    locks: dict[Tier, Counter[Prefix]] = field(default_factory=lambda: {tier: Counter() for tier in Tier})
    hits: Counter[Prefix] = field(default_factory=Counter)
    priority: Counter[Prefix] = field(default_factory=Counter)
    accessed: dict[Prefix, float] = field(default_factory=dict)
    """When each was last matched or inserted, by the caller's clock."""
    clock: int = 0
    epoch: int = 0
    cut_off: dict[Tier, Counter[tuple[int, Prefix]]] = field(
        default_factory=lambda: {tier: Counter() for tier in Tier}
    )
    """What earlier epochs left: locked when a flush came, and not yet released."""

    # What is there.

    def on_device(self, prompt: Prompt) -> int:
        """Tokens of the longest prefix with KV on the device."""
        return self._longest(prompt, [Tier.DEVICE])

    def anywhere(self, prompt: Prompt) -> int:
        """Tokens of the longest prefix with KV on either tier."""
        return self._longest(prompt, list(Tier))

    def _longest(self, prompt: Prompt, tiers: list[Tier]) -> int:
        cached = [p for p in prompt.prefixes(self.unit) if any(p in self.on[tier] for tier in tiers)]
        return max((len(tokens) for _, tokens in cached), default=0)

    def all_prefixes(self) -> set[Prefix]:
        """Everything cached."""
        return self.on[Tier.DEVICE].keys() | self.on[Tier.HOST].keys()

    def blocks(self, tier: Tier, block_size: int) -> Counter[Fingerprint]:
        """Names of the whole blocks whose last token's page is on the tier; one as often as there are such pages, which differ
        behind the block's end."""
        return Counter(
            fingerprint(space, tokens[:end], block_size)
            for space, tokens in self.on[tier]
            for end in range(block_size, len(tokens) + 1, block_size)
            if end > len(tokens) - self.unit
        )

    # What is used.

    def match(self, prompt: Prompt, now: float, priority: int = 0) -> None:
        """A look-up that uses what it finds, and counts."""
        found = prompt.upto(self.anywhere(prompt)).prefixes(self.unit)
        self.hits.update(found)
        self._note_user(found, now, priority)
        self.use(found)

    def insert(self, prompt: Prompt, now: float, priority: int = 0) -> None:
        """KV for all of the prompt on the device."""
        path = prompt.prefixes(self.unit)
        for prefix in path:
            self.on[Tier.DEVICE].setdefault(prefix, 0)
        self._note_user(path, now, priority)
        self.use(path)

    def _note_user(self, prefixes: list[Prefix], now: float, priority: int) -> None:
        for prefix in prefixes:
            self.priority[prefix] = max(self.priority[prefix], priority)
            self.accessed[prefix] = now

    def use(self, prefixes: list[Prefix], tiers: Iterable[Tier] = Tier) -> None:
        """Put these behind all others in the order in which they go."""
        self.clock += 1
        for tier in tiers:
            self.on[tier].update((prefix, self.clock) for prefix in prefixes if prefix in self.on[tier])

    # What is protected.

    def lock(self, tier: Tier, prefixes: list[Prefix]) -> None:
        """One more lock on every prefix."""
        self.locks[tier].update(prefixes)

    def release(self, tier: Tier, prefixes: list[Prefix], epoch: int) -> None:
        """One lock less; what is protected no more was in use until now, or is gone if a flush had cut it off."""
        if epoch != self.epoch:
            self.cut_off[tier] -= Counter((epoch, prefix) for prefix in prefixes)
            return
        self.locks[tier] -= Counter(prefixes)
        self.use([prefix for prefix in prefixes if prefix not in self.protected(tier)], [tier])

    def held(self, pin: PinName) -> Prompt:
        """What a pin holds: as much as its tier has."""
        _, prompt, tier = pin
        return prompt.upto(self._longest(prompt, [tier]))

    def pin(self, pin: PinName, until: float) -> None:
        """Make a pin, which uses what it holds; or renew it, which does not."""
        if self.pins.pop(pin, None) is None:
            self.use(self.held(pin).prefixes(self.unit))
        self.pins[pin] = until

    def pinned_units(self, on: Tier, owner: str | None = None) -> int:
        """What the wishes of one owner, or all, cover on a tier: cached or not, and once per pin."""
        mine = [prompt for who, prompt, tier in self.pins if owner in (None, who) and tier is on]
        return sum(len(prompt.tokens) // self.unit for prompt in mine)

    def unpin(self, pin: PinName) -> None:
        """A pin ends; what nothing protects any more was in use until now."""
        held, tier = self.held(pin).prefixes(self.unit), pin[2]
        del self.pins[pin]
        self.use([prefix for prefix in held if prefix not in self.protected(tier)], [tier])

    def expire(self, now: float) -> list[PinName]:
        """All pins end whose time has come, each in its turn."""
        ended = sorted(
            (pin for pin, until in self.pins.items() if until <= now), key=lambda pin: self.pins[pin]
        )
        for pin in ended:
            self.unpin(pin)
        return ended

    # What goes.

    def protected(self, tier: Tier) -> set[Prefix]:
        """What must stay on the tier."""
        return set(self.locks[tier]).union(self.pinned(tier))

    def pinned(self, tier: Tier) -> Counter[Prefix]:
        """What the pins of a tier hold, each as often as pins hold it."""
        pins = [pin for pin in self.pins if pin[2] is tier]
        return Counter(prefix for pin in pins for prefix in self.held(pin).prefixes(self.unit))

    def line(self, tier: Tier) -> list[Prefix]:
        """What may go, in the order in which it goes: by the policy's rank, then last use, then the longest first."""
        free_to_go = self.on[tier].keys() - self.protected(tier)
        return sorted(free_to_go, key=lambda p: (self.rank(p), self.on[tier][p], -len(p[1])))

    def rank(self, prefix: Prefix) -> int:
        """What the policy compares before recency."""
        return {"lru": Counter[Prefix](), "lfu": self.hits, "priority": self.priority}[self.policy][prefix]

    def goes_for(self, prefix: Prefix) -> list[Prefix]:
        """What goes from the host for a copy of this, which the device has, in the order in which it goes: nothing that the policy
        would rather keep. What is protected is in use now."""
        used = math.inf if prefix in self.protected(Tier.DEVICE) else self.on[Tier.DEVICE][prefix]
        newcomer = (self.rank(prefix), used)
        line = self.line(Tier.HOST)
        return list(itertools.takewhile(lambda p: (self.rank(p), self.on[Tier.HOST][p]) <= newcomer, line))

    def evict(self, tier: Tier, units: int) -> list[Prefix]:
        """Forget up to so many prefixes on one tier; returns them."""
        gone = self.line(tier)[: max(units, 0)]
        for prefix in gone:
            self.forget(tier, prefix)
        return gone

    def forget(self, tier: Tier, prefix: Prefix) -> None:
        """One prefix leaves one tier."""
        del self.on[tier][prefix]
        if not any(prefix in self.on[tier] for tier in Tier):
            for memory in (self.hits, self.priority, self.accessed):
                memory.pop(prefix, None)

    def flush(self) -> None:
        """Forget all, but count what is locked on."""
        for tier in Tier:
            self.cut_off[tier] += Counter({(self.epoch, p): n for p, n in self.locks[tier].items()})
            self.locks[tier].clear()
            self.on[tier].clear()
        for memory in (self.hits, self.priority, self.accessed):
            memory.clear()
        self.epoch += 1

    # What is on its way.

    def to_copy(self, source: Tier, prompt: Prompt) -> list[Prefix]:
        """What the other tier lacks."""
        return [prefix for prefix in prompt.prefixes(self.unit) if prefix not in self.on[other_tier(source)]]

    def begin_restore(self, prompt: Prompt) -> Copy:
        """Lock all of the prompt where it is, on both tiers."""
        path = prompt.prefixes(self.unit)
        locked = {tier: [prefix for prefix in path if prefix in self.on[tier]] for tier in Tier}
        for tier, prefixes in locked.items():
            self.lock(tier, prefixes)
        return Copy(Tier.HOST, Tier.DEVICE, self.to_copy(Tier.HOST, prompt), locked, self.epoch)

    def begin_fetch(self, prompt: Prompt) -> Copy:
        """Lock what the device has of the prompt; the rest is to come."""
        held = prompt.upto(self.on_device(prompt)).prefixes(self.unit)
        self.lock(Tier.DEVICE, held)
        copied = prompt.prefixes(self.unit)[len(held) :]
        return Copy(None, Tier.DEVICE, copied, {Tier.DEVICE: held}, self.epoch)

    def begin_read(self, prompt: Prompt) -> Copy:
        """Lock all of the prompt on the host."""
        path = prompt.prefixes(self.unit)
        self.lock(Tier.HOST, path)
        return Copy(Tier.HOST, None, path, {Tier.HOST: path}, self.epoch)

    def refuse_copy(self, copy: Copy) -> None:
        """There is no room for it: what it locked was in use until now."""
        for tier, prefixes in copy.locked.items():
            self.release(tier, prefixes, copy.epoch)

    def end_copy(self, copy: Copy, *, arrived: bool, now: float) -> list[Prefix]:
        """What arrived is there now, unless a flush came between, and its whole path was in use until now; its locks end.
        Returns what was there before it came."""
        already = [p for p in copy.copied if copy.target is not None and p in self.on[copy.target]]
        if arrived and copy.epoch == self.epoch and copy.target is not None:
            if copy.source is None:
                self.insert(prompt_of(copy.copied[-1]), now)
            else:
                self.on[copy.target].update((prefix, 0) for prefix in copy.copied)
                self.use(copy.locked[copy.source], [copy.target])
        self.refuse_copy(copy)
        return already
