"""A prefix cache so naive that it is plainly right: a dictionary of whole token tuples, searched in full each time.

It knows nothing of nodes, edges or pages. What it says about lengths, locks and the order of eviction, the real caches must
say too.
"""

from collections import Counter
from dataclasses import dataclass, field

Prefix = tuple[bytes, tuple[int, ...]]
"""Namespace and the tokens up to the end of a unit."""


@dataclass(slots=True)
class NaiveCache:
    """Prefixes that end at whole units (pages, or blocks), each with when it was last used and how often it is locked."""

    unit: int
    last_use: dict[Prefix, int] = field(default_factory=dict)
    locks: Counter[Prefix] = field(default_factory=Counter)
    clock: int = 0

    def prefixes(self, namespace: bytes, tokens: tuple[int, ...]) -> list[Prefix]:
        """All whole-unit prefixes of ``tokens``, shortest first."""
        return [(namespace, tokens[:end]) for end in range(self.unit, len(tokens) + 1, self.unit)]

    def matched_tokens(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        """Length of the longest cached prefix."""
        cached = [prefix for prefix in self.prefixes(namespace, tokens) if prefix in self.last_use]
        return max((len(prefix[1]) for prefix in cached), default=0)

    def use(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """A match or an insert of exactly these tokens."""
        self.clock += 1
        for prefix in self.prefixes(namespace, tokens):
            self.last_use[prefix] = self.clock

    def lock(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """One more lock on every prefix."""
        self.locks.update(self.prefixes(namespace, tokens))

    def release(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """One lock less; what is locked no more was in use until now."""
        self.clock += 1
        for prefix in self.prefixes(namespace, tokens):
            self.locks[prefix] -= 1
            if not self.locks[prefix]:
                del self.locks[prefix]
                self.last_use[prefix] = self.clock

    def evict(self, units: int) -> int:
        """Forget up to ``units`` unlocked prefixes: least recently used first, longest first among equals."""
        unlocked = [prefix for prefix in self.last_use if prefix not in self.locks]
        unlocked.sort(key=lambda prefix: (self.last_use[prefix], -len(prefix[1])))
        for prefix in unlocked[:units]:
            del self.last_use[prefix]
        return len(unlocked[:units])

    @property
    def unlocked_units(self) -> int:
        """How many prefixes could be evicted."""
        return len(self.last_use) - len(self.locks)
