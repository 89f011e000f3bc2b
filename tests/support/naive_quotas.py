"""The naive model of a cache whose pages are paid for: whose goes is decided anew for every single page, from the whole order."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixmesh.cache.owners import Quota
from prefixmesh.cache.tier import Tier
from tests.support.naive_tiers import NaiveTiers, Prefix, Prompt, prompt_of


@dataclass(slots=True)
class NaiveQuotas(NaiveTiers):
    """Who pays for what on the device, and whose goes."""

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    payer: dict[Prefix, str] = field(default_factory=dict)
    above: list[str] = field(default_factory=list)
    """Who has more than its ceiling, in the order in which that came to be."""
    passed_over: bool = False
    """Whether the last eviction passed over something that stayed."""

    def pages_of(self, who: str) -> int:
        """How much one pays for."""
        return sum(self.payer[prefix] == who for prefix in self.on[Tier.DEVICE])

    def ceiling(self, who: str) -> float:
        """How much one may have while others want room."""
        quota = self.quotas.get(who, Quota())
        return float("inf") if quota.ceiling_pages is None else quota.ceiling_pages

    def floor(self, who: str) -> int:
        """How much others must leave one."""
        return self.quotas.get(who, Quota()).floor_pages

    def insert_for(self, owner: str, prompt: Prompt, now: float) -> None:
        """What is new is on the owner's account; in public, on nobody's."""
        for prefix in prompt.prefixes(self.unit):
            if prefix not in self.on[Tier.DEVICE]:
                self.payer[prefix] = "" if len(prefix[1]) <= prompt.boundary else owner
                self.insert(prompt_of(prefix), now)
                self.note_ceilings()
        self.insert(prompt, now)

    def note_ceilings(self) -> None:
        """Look again who has too much."""
        too_much = [who for who in self.quotas if self.pages_of(who) > self.ceiling(who)]
        self.above = [who for who in self.above if who in too_much]
        self.above += [who for who in too_much if who not in self.above]

    def evict_for(self, owner: str, units: int, node_of: Mapping[Prefix, object]) -> list[Prefix]:
        """Forget up to so many prefixes because ``owner`` wants room. A node that was passed over because something continues it,
        as something still does, was in use until now, one path after another; ``node_of`` tells of which nodes there are."""
        gone: list[Prefix] = []
        passed_over: dict[Prefix, None] = {}
        while len(gone) < units and (prefix := self.next_to_go(owner, units, passed_over)) is not None:
            self.forget(Tier.DEVICE, prefix)
            self.note_ceilings()
            gone.append(prefix)
        stayed = [prefix for prefix in passed_over if self.is_continued_node(node_of, prefix)]
        for prefix in stayed:
            self.use(prompt_of(prefix).prefixes(self.unit))
        self.passed_over = bool(stayed)
        return gone

    def next_to_go(self, owner: str, units: int, passed_over: dict[Prefix, None]) -> Prefix | None:
        """The next single page; None when nothing may go."""
        line = self.line(Tier.DEVICE)
        groups = [[prefix for prefix in line if self.payer[prefix] == who] for who in self.above]
        if self.pages_of(owner) + units > self.ceiling(owner):
            groups.append([prefix for prefix in line if self.payer[prefix] == owner])
        groups.append([prefix for prefix in line if self.may_take(owner, self.payer[prefix])])
        for prefix in (prefix for group in groups for prefix in group):
            if not self.is_continued(prefix):
                return prefix
            passed_over[prefix] = None
        return None

    def may_take(self, owner: str, who: str) -> bool:
        """Whether a page of ``who`` may go for ``owner``."""
        return owner == who or self.pages_of(who) > self.floor(who)

    def is_continued(self, prefix: Prefix) -> bool:
        """Whether something on the device goes on from here."""
        return any(
            prefix in prompt_of(other).prefixes(self.unit)
            for other in self.on[Tier.DEVICE]
            if other != prefix
        )

    def is_continued_node(self, node_of: Mapping[Prefix, object], prefix: Prefix) -> bool:
        """Whether something on the device goes on from where the prefix's node ends."""
        device = self.on[Tier.DEVICE]
        node = [other for other in device if node_of[other] is node_of[prefix]]
        return prefix in device and self.is_continued(max(node, key=lambda other: len(other[1])))

    def sheltered_from(self, owner: str) -> int:
        """Unprotected pages that floors keep from ``owner``."""
        idle = Counter(self.payer[prefix] for prefix in self.line(Tier.DEVICE))
        spare = {who: max(0, self.pages_of(who) - self.floor(who)) for who in self.quotas if who != owner}
        return sum(max(0, idle[who] - pages) for who, pages in spare.items())

    def flush(self) -> None:
        """Forget all, who pays too."""
        NaiveTiers.flush(self)
        self.payer.clear()
        self.above.clear()
