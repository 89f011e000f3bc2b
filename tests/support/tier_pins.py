"""Pins in the rule machine of the tree: wishes of several owners for either tier, beside a naive model of who holds what."""

import math
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import AccessDeniedError, BudgetError, NotFoundError
from tests.support.cache_machine import CacheMachine
from tests.support.naive_tiers import PinName, Prompt, prompt_of

OWNERS = ("acme", "globex")
TTLS = st.sampled_from([None, 3, 6, 10])
TIERS = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])


class PinningMachine(CacheMachine):
    """Owners pin, renew and unpin on either tier."""

    budget: ClassVar[PinBudget] = PinBudget(
        pages_per_owner=5, pages_in_all=8, pins_per_owner=3, pins_in_all=4
    )
    """Of each tier."""
    cache: RadixCache

    def __init__(self) -> None:
        super().__init__()
        self.pinned_before: Counter[PinName] = Counter()

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), ttl=TTLS, tier=TIERS)
    def pin(self, data: st.DataObject, owner: str, ttl: float | None, tier: Tier) -> None:
        """Somebody wants a prefix kept, cached or not; the budget may forbid it."""
        prompt = self.draw_prompt(data)
        wish = self.wish(prompt)
        if wish.tokens:
            self.checked_pin((owner, wish, tier), ttl, prompt.key())

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def compute_what_is_pinned(self, data: st.DataObject) -> None:
        """A prompt that somebody has pinned, or a part of it, is computed."""
        _, prompt, _ = data.draw(st.sampled_from(list(self.model.pins)))
        self.insert_whole(prompt_of(data.draw(st.sampled_from(prompt.prefixes(self.unit)))))

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS), renew=st.booleans())
    def change_pin(self, data: st.DataObject, owner: str, renew: bool) -> None:
        """A pin is renewed, or another owner's comes to stand beside it; or it ends, if it is its owner who ends it."""
        _, prompt, tier = data.draw(st.sampled_from(list(self.model.pins)))
        if renew:
            self.checked_pin((owner, prompt, tier), data.draw(TTLS))
            both = all((who, prompt, tier) in self.model.pins for who in OWNERS)
            self.note("two owners pin one prefix", both)
        else:
            self.checked_unpin((owner, prompt, tier))

    def wait(self, data: st.DataObject) -> None:
        """Time passes, and pins end with it."""
        self.now += data.draw(st.sampled_from([1, 5, 20]))
        ended = self.cache.pins.expire(self.now)
        expected = self.model.expire(self.now)
        assert [(pin.owner, pin.key, pin.tier) for pin in ended] == [
            (owner, prompt.key(), tier) for owner, prompt, tier in expected
        ]
        self.note("a pin expired", bool(ended))

    def pins_hold_what_their_tier_has(self) -> None:
        held = Counter({pin: len(self.model.held(pin).tokens) for pin in self.model.pins})
        for (owner, prompt, tier), tokens in held.items():
            status = self.cache.pins_on(tier).status(prompt.key(), owner)
            assert status is not None
            missing = len(prompt.tokens) - tokens
            assert (status.held_tokens, status.missing_tokens, status.tier) == (tokens, missing, tier)
        for tier in Tier:
            pins = self.cache.pins_on(tier)
            assert len(pins) == sum(pin[2] is tier for pin in held)
            assert pins.pinned_pages == len(self.model.pinned(tier))
            assert pins.charged_pages == self.model.pinned_units(tier)
        before = self.pinned_before
        grew = [pin for pin in held if 0 < before[pin] < held[pin]]
        self.note("a pin grew", bool(grew))
        self.note("a pin of the host grew", any(pin[2] is Tier.HOST for pin in grew))
        awoken = any(pin in before and not before[pin] and tokens for pin, tokens in held.items())
        self.note("a pin that held nothing came to hold something", awoken)
        device = self.model.on[Tier.DEVICE]
        demoted = [prefix for prefix in self.model.pinned(Tier.HOST) if prefix not in device]
        self.note("what is pinned on the host is there alone", bool(demoted))
        self.pinned_before = held

    def wish(self, prompt: Prompt) -> Prompt:
        """What a pin of this prompt keeps: whole pages, and no boundary without a tail."""
        prompt = self.whole_units(prompt)
        return prompt_of(prompt.prefix(len(prompt.tokens)))

    def checked_pin(self, pin: PinName, ttl: float | None, key: RadixKey | None = None) -> None:
        """Pin, in the model too, or be refused; perhaps by a key that names the same wish otherwise."""
        owner, prompt, tier = pin
        self.model.expire(self.now)
        pins = self.cache.pins_on(tier)
        if pin not in self.model.pins and not self.fits_budget(pin):
            with pytest.raises(BudgetError):
                pins.add(key or prompt.key(), owner, self.now, ttl)
            self.note("a pin beyond the budget")
            return
        pins.add(key or prompt.key(), owner, self.now, ttl)
        self.model.pin(pin, math.inf if ttl is None else self.now + ttl)

    def checked_unpin(self, pin: PinName) -> None:
        """Unpin, in the model too, or be refused."""
        owner, prompt, tier = pin
        self.model.expire(self.now)
        pins = self.cache.pins_on(tier)
        if pin in self.model.pins:
            pins.remove(prompt.key(), owner, self.now)
            self.model.unpin(pin)
            return
        others = any((pinned, where) == (prompt, tier) for _, pinned, where in self.model.pins)
        with pytest.raises(AccessDeniedError if others else NotFoundError):
            pins.remove(prompt.key(), owner, self.now)
        self.note("another's pin was not removed", others)

    def unpin_all(self) -> None:
        """No pin is left, however it would have ended."""
        for owner, prompt, tier in list(self.model.pins):
            self.cache.pins_on(tier).remove(prompt.key(), owner, 0)
            self.model.unpin((owner, prompt, tier))

    def fits_budget(self, pin: PinName) -> bool:
        """Whether one more pin is within what its owner and all may have."""
        owner, prompt, tier = pin
        pages, budget = len(prompt.tokens) // self.unit, self.budget
        there = [who for who, _, where in self.model.pins if where is tier]
        assert budget.pages_per_owner is not None
        assert budget.pages_in_all is not None
        return (
            self.model.pinned_units(tier, owner) + pages <= budget.pages_per_owner
            and self.model.pinned_units(tier) + pages <= budget.pages_in_all
            and there.count(owner) < budget.pins_per_owner
            and len(there) < budget.pins_in_all
        )
