"""Pins: who may keep which prefix, how long, within which budget, and what a pin holds at each moment."""

import math
from collections.abc import Callable, Sequence

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import nodes_below
from prefixmesh.cache.pins import Held, PinBudget, PinStatus, PinTable
from prefixmesh.errors import (
    AccessDeniedError,
    BudgetError,
    ConfigError,
    InvalidRequestError,
    InvariantError,
    NotFoundError,
)
from prefixmesh.ids import Namespace
from tests.support.cache_kit import NS_A, NS_B, key_of
from tests.support.token_tree import TokenTree, path

PROMPT = key_of([1, 2, 3, 4, 5, 6])
NOW = 100.0


def cached(tree: TokenTree, namespace: Namespace = NS_A) -> set[tuple[int, ...]]:
    """Prefixes that are cached, checked beside everything else."""
    tree.pins.check_invariants()
    assert tree.pinned() == tree.pins.pinned_pages
    return {tokens for where, tokens in tree.cached() if where == namespace}


def prefixes_of(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}


def held(tree: TokenTree, key: RadixKey = PROMPT, owner: str = "acme") -> tuple[int, int]:
    """Tokens held and missing."""
    status = tree.pins.status(key, owner)
    assert status is not None
    return status.held_tokens, status.missing_tokens


# What a pin holds.


def test_what_is_pinned_is_not_evicted_and_what_was_is_again() -> None:
    """Exactly the pinned prefix stays, not what goes on from it; after the removal nothing does."""
    tree = TokenTree()
    tree.insert(key_of([1, 2, 3, 4, 5, 6, 7, 8]))
    tree.insert(key_of([9, 9]))
    tree.pins.add(PROMPT, "acme", NOW)
    assert held(tree) == (6, 0)
    tree.evict()
    assert cached(tree) == prefixes_of([1, 2, 3, 4, 5, 6])
    tree.pins.remove(PROMPT, "acme", NOW)
    assert (len(tree.pins), tree.pins.pinned_pages, tree.pins.charged_pages) == (0, 0, 0)
    tree.evict()
    assert cached(tree) == set()


def test_a_pin_may_come_before_what_it_pins() -> None:
    """It tells what is missing, and holds every part as soon as that is cached, in whatever pieces it comes."""
    tree = TokenTree()
    status = tree.pins.add(PROMPT, "acme", NOW)
    assert (status.held_tokens, status.missing_tokens) == (0, 6)
    for done in (2, 3, 6):
        tree.insert(key_of(range(1, done + 1)))
        assert held(tree) == (done, 6 - done)
        tree.evict()
        assert cached(tree) == prefixes_of(range(1, done + 1))
    assert not tree.pins.waiting


def test_a_pin_grows_by_another_prompt_that_shares_only_a_part() -> None:
    """What appears may go on otherwise than the wish: the shared part is held and the rest waited for."""
    tree = TokenTree()
    tree.pins.add(PROMPT, "acme", NOW)
    tree.insert(key_of([1, 2, 7, 7]))
    assert held(tree) == (2, 4)
    tree.evict()
    assert cached(tree) == prefixes_of([1, 2])
    tree.insert(key_of([1, 2, 3, 4, 5, 6, 7]))
    assert held(tree) == (6, 0)


def test_growth_protects_the_new_before_it_lets_go_of_the_old() -> None:
    """There is no moment at which a pin holds nothing."""
    tree = TokenTree()
    tree.pins.add(PROMPT, "acme", NOW)
    tree.calls.clear()
    tree.insert(key_of([1, 2, 3]))
    assert tree.calls == ["hold", "release"]


def test_only_those_that_wait_at_the_place_are_looked_at() -> None:
    """An insert costs nothing for the pins that wait elsewhere."""
    tree = TokenTree()
    for first in range(10, 20):
        tree.pins.add(key_of([first, 1, 2]), "acme", NOW)
    tree.calls.clear()
    tree.insert(key_of([5, 1, 2]))
    assert not tree.calls
    tree.insert(key_of([12, 1, 3]))
    assert tree.calls == ["hold", "release"]
    assert held(tree, key_of([12, 1, 2])) == (2, 1)


def test_a_pin_survives_splits() -> None:
    """Splits above, at and inside what it holds leave it whole, and its end lets go of every half."""
    tree = TokenTree()
    tree.insert(key_of([1, 2, 3, 4, 5, 6, 7]))
    tree.pins.add(PROMPT, "acme", NOW)
    for cut in (3, 1, 5):
        tree.insert(key_of([*range(1, cut + 1), 90]))
        assert held(tree) == (6, 0)
        cached(tree)
    tree.evict()
    assert cached(tree) == prefixes_of([1, 2, 3, 4, 5, 6])
    tree.pins.remove(PROMPT, "acme", NOW)
    assert [node.lock_ref + node.pin_ref for _, node in nodes_below(tree.root)] == [0, 0, 0, 0]
    tree.evict()
    assert cached(tree) == set()


def test_a_pin_waits_at_its_end_whatever_is_split_above() -> None:
    """The place where it waits moves with the end of what it holds."""
    tree = TokenTree()
    tree.insert(key_of([1, 2, 3, 4]))
    tree.pins.add(PROMPT, "acme", NOW)
    tree.insert(key_of([1, 2, 90]))
    tree.insert(key_of([1, 2, 3, 4, 5, 6]))
    assert held(tree) == (6, 0)


def test_a_pin_covers_whole_pages() -> None:
    """Tokens short of a page are neither charged nor told as missing."""
    tree = TokenTree(page_size=4)
    status = tree.pins.add(PROMPT, "acme", NOW)
    assert (status.pages, status.held_tokens, status.missing_tokens) == (1, 0, 4)
    tree.insert(PROMPT)
    assert tree.pins.status(key_of([1, 2, 3, 4]), "acme") == tree.pins.status(PROMPT, "acme")
    assert held(tree) == (4, 0)


def test_less_than_a_page_is_refused_by_name() -> None:
    tree = TokenTree(page_size=4)
    with pytest.raises(InvalidRequestError, match=r"^tokens: .* 4 tokens, got 3$"):
        tree.pins.add(key_of([1, 2, 3]), "acme", NOW)


def test_pages_that_several_pins_protect_count_once() -> None:
    """Pinned pages are the tree's, charges are the owners'."""
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW)
    tree.pins.add(PROMPT, "globex", NOW)
    tree.pins.add(key_of([1, 2, 3]), "acme", NOW)
    assert (tree.pins.pinned_pages, tree.pins.charged_pages) == (6, 15)
    assert (tree.pins.charged_to("acme"), tree.pins.charged_to("globex"), tree.pins.charged_to("x")) == (
        9,
        6,
        0,
    )
    cached(tree)


def test_namespaces_never_meet() -> None:
    """Equal tokens of another namespace neither are held nor make a pin grow."""
    tree = TokenTree()
    tree.insert(key_of([1, 2, 3, 4, 5, 6], NS_B))
    tree.pins.add(PROMPT, "acme", NOW)
    tree.insert(key_of([1, 2, 3, 4, 5, 6, 7], NS_B))
    assert held(tree) == (0, 6)
    tree.evict()
    assert cached(tree, NS_B) == set()
    assert tree.pins.status(key_of([1, 2, 3, 4, 5, 6], NS_B), "acme") is None


def test_a_flush_leaves_the_wish() -> None:
    """Everything pinned goes; the pin waits for it to be computed again, with the end it had."""
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW, 10.0)
    tree.flush()
    assert cached(tree) == set()
    assert held(tree) == (0, 6)
    assert (tree.pins.charged_pages, tree.pins.pinned_pages, tree.pins.next_expiry) == (6, 0, NOW + 10)
    tree.insert(PROMPT)
    assert held(tree) == (6, 0)


def test_a_tree_that_cannot_hold_leaves_no_pin_behind() -> None:
    """An error from below charges nobody."""

    class BrokenTree(TokenTree):
        def hold(self, key: RadixKey) -> Held:
            raise RuntimeError("no")

    tree = BrokenTree()
    with pytest.raises(RuntimeError):
        tree.pins.add(PROMPT, "acme", NOW, 1.0)
    assert repr(tree.pins) == repr(PinTable(tree))
    tree.pins.check_invariants()


# How long.


def test_a_pin_ends_at_its_time_and_not_before() -> None:
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW, 10.0)
    assert tree.pins.next_expiry == NOW + 10
    assert tree.pins.expire(NOW + 9.9) == []
    assert held(tree) == (6, 0)
    (gone,) = tree.pins.expire(NOW + 10)
    assert (gone.owner, gone.key, gone.expires_at) == ("acme", PROMPT, NOW + 10)
    assert (len(tree.pins), tree.pins.charged_pages, tree.pins.next_expiry) == (0, 0, math.inf)
    tree.evict()
    assert cached(tree) == set()


def test_pins_end_in_the_order_of_their_times() -> None:
    """Whatever the order in which they were made; those without an end stay."""
    tree = TokenTree()
    for first, ttl in ((1, 30.0), (2, 10.0), (3, None), (4, 20.0), (5, 40.0)):
        tree.pins.add(key_of([first]), "acme", NOW, ttl)
    assert [pin.key for pin in tree.pins.expire(NOW + 30)] == [key_of([2]), key_of([4]), key_of([1])]
    assert tree.pins.next_expiry == NOW + 40
    assert [status.expires_at for status in tree.pins.statuses()] == [None, NOW + 40]


@pytest.mark.parametrize("ttl", [0.0, -1.0, math.inf, math.nan])
def test_a_ttl_is_finite_and_positive(ttl: float) -> None:
    tree = TokenTree()
    with pytest.raises(InvalidRequestError, match=r"^ttl_s: must be finite and above 0"):
        tree.pins.add(PROMPT, "acme", NOW, ttl)
    assert not len(tree.pins)


def test_the_same_pin_again_only_renews_its_time() -> None:
    """Later, sooner, for ever, and not for ever again: never a second charge or a second lock."""
    tree = TokenTree(budget=PinBudget(pages_per_owner=6, pages_in_all=6, pins_per_owner=1, pins_in_all=1))
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW, 10.0)
    tree.calls.clear()
    for ttl in (20.0, 5.0, None, 7.0):
        status = tree.pins.add(PROMPT, "acme", NOW + 1, ttl)
        assert status.expires_at == (None if ttl is None else NOW + 1 + ttl)
        assert tree.pins.next_expiry == (math.inf if ttl is None else NOW + 1 + ttl)
        assert (len(tree.pins), tree.pins.charged_pages) == (1, 6)
        assert cached(tree)
    assert not tree.calls
    assert tree.pins.expire(NOW + 7.9) == []
    assert len(tree.pins.expire(NOW + 8)) == 1


def test_renewing_for_ever_costs_no_memory() -> None:
    """What a TTL was before is not kept."""
    tree = TokenTree()
    for _ in range(2000):
        for first in (1, 2, 3):
            tree.pins.add(key_of([first]), "acme", NOW, 10.0 + first)
        tree.pins.add(key_of([4]), "acme", NOW, 10.0)
        tree.pins.add(key_of([4]), "acme", NOW)
    assert tree.pins.deadlines.entries <= 2 * 4 + 16
    tree.pins.check_invariants()


def test_an_expired_pin_makes_room_in_the_call_that_needs_it() -> None:
    """The budget is that of the moment: nobody has to clean up first."""
    tree = TokenTree(budget=PinBudget(pages_in_all=6))
    tree.pins.add(PROMPT, "globex", NOW, 10.0)
    with pytest.raises(BudgetError):
        tree.pins.add(key_of([9]), "acme", NOW + 9)
    tree.pins.add(key_of([9]), "acme", NOW + 10)
    assert [status.owner for status in tree.pins.statuses()] == ["acme"]


def test_a_match_or_insert_lets_go_of_what_has_expired() -> None:
    """What a tree does with ``next_expiry``."""
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW, 10.0)
    tree.insert(key_of([8]), NOW + 9)
    assert len(tree.pins) == 1
    tree.insert(key_of([9]), NOW + 10)
    assert len(tree.pins) == 0


def test_an_expired_pin_cannot_be_removed() -> None:
    tree = TokenTree()
    tree.pins.add(PROMPT, "acme", NOW, 10.0)
    with pytest.raises(NotFoundError):
        tree.pins.remove(PROMPT, "acme", NOW + 10)


# Whose.


def test_the_same_prefix_pinned_by_two_stays_until_both_let_go() -> None:
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW)
    tree.pins.add(PROMPT, "globex", NOW, 10.0)
    tree.pins.remove(PROMPT, "acme", NOW)
    tree.evict()
    assert cached(tree) == prefixes_of([1, 2, 3, 4, 5, 6])
    tree.pins.expire(NOW + 10)
    tree.evict()
    assert cached(tree) == set()


def test_nobody_removes_anothers_pin() -> None:
    tree = TokenTree()
    tree.insert(PROMPT)
    tree.pins.add(PROMPT, "acme", NOW)
    with pytest.raises(AccessDeniedError, match="'globex'") as refused:
        tree.pins.remove(PROMPT, "globex", NOW)
    assert "acme" not in str(refused.value)
    assert held(tree) == (6, 0)


def test_an_unknown_pin_is_not_found() -> None:
    """Not even where a longer or shorter one is, or the same tokens in another namespace."""
    tree = TokenTree()
    tree.pins.add(PROMPT, "acme", NOW)
    for key in (key_of([1, 2, 3]), key_of([1, 2, 3, 4, 5, 6, 7]), key_of([1, 2, 3, 4, 5, 6], NS_B)):
        with pytest.raises(NotFoundError):
            tree.pins.remove(key, "acme", NOW)


def test_each_owner_sees_its_own() -> None:
    tree = TokenTree()
    tree.pins.add(PROMPT, "acme", NOW)
    tree.pins.add(PROMPT, "globex", NOW)
    tree.pins.add(key_of([7]), "acme", NOW)
    assert [(status.owner, status.pages) for status in tree.pins.of("acme")] == [("acme", 6), ("acme", 1)]
    assert tree.pins.of("initech") == []
    assert len(tree.pins.statuses()) == 3


# How much.

BUDGETS = [
    (PinBudget(pages_per_owner=9), "pin of owner 'acme': 4 more wanted, 6 used, limit 9 pages per owner"),
    (PinBudget(pages_in_all=12), "pin of owner 'acme': 4 more wanted, 9 used, limit 12 pages in all"),
    (PinBudget(pins_per_owner=1), "pin of owner 'acme': 1 more wanted, 1 used, limit 1 pins per owner"),
    (PinBudget(pins_in_all=2), "pin of owner 'acme': 1 more wanted, 2 used, limit 2 pins in all"),
]


@pytest.mark.parametrize(("budget", "message"), BUDGETS)
def test_what_does_not_fit_is_refused_with_the_sums(budget: PinBudget, message: str) -> None:
    """Refused before anything is held, whether cached or missing; what was pinned before stays."""
    tree = TokenTree(budget=budget)
    tree.pins.add(PROMPT, "acme", NOW)
    tree.pins.add(key_of([7, 8, 9]), "globex", NOW)
    before = repr(tree.pins)
    tree.calls.clear()
    with pytest.raises(BudgetError) as refused:
        tree.pins.add(key_of([4, 5, 6, 7]), "acme", NOW)
    assert str(refused.value) == message
    assert (refused.value.status, refused.value.retryable) == ("RESOURCE_EXHAUSTED", False)
    assert repr(tree.pins) == before
    assert not tree.calls


@pytest.mark.parametrize(
    "budget",
    [
        PinBudget(pages_per_owner=7),
        PinBudget(pages_in_all=7),
        PinBudget(pins_per_owner=2),
        PinBudget(pins_in_all=2),
    ],
)
def test_a_budget_may_be_used_up_and_comes_back(budget: PinBudget) -> None:
    """To the last page or pin, as often as pins go, while another of the owner's stays."""
    tree = TokenTree(budget=budget)
    tree.pins.add(key_of([50]), "acme", NOW)
    for _ in range(3):
        tree.pins.add(PROMPT, "acme", NOW)
        with pytest.raises(BudgetError):
            tree.pins.add(key_of([1]), "acme", NOW)
        tree.pins.remove(PROMPT, "acme", NOW)
        assert tree.pins.charged_to("acme") == 1


@pytest.mark.parametrize("field", ["pages_per_owner", "pages_in_all", "pins_per_owner", "pins_in_all"])
def test_no_bound_is_negative(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PinBudget(**{field: -1})


def test_a_budget_for_a_pool_is_a_share_of_it() -> None:
    """Unless something else was said; most of the pool stays for what is not pinned."""
    assert PinBudget(pages_per_owner=5).for_pool(1000) == PinBudget(pages_per_owner=5, pages_in_all=300)
    assert PinBudget(pages_in_all=700).for_pool(1000).pages_in_all == 700


def test_a_tenant_that_pins_a_thousand_prompts_stops_at_its_budget() -> None:
    """F75: others keep their share of the pages and can still pin, and nobody unpins another's."""
    tree = TokenTree(budget=PinBudget(pages_per_owner=100, pages_in_all=150))
    prompts = [key_of([1000 + n, *range(8), n]) for n in range(1000)]
    refused = 0
    for prompt in prompts:
        tree.insert(prompt)
        try:
            tree.pins.add(prompt, "greedy", NOW)
        except BudgetError:
            refused += 1
    assert (refused, len(tree.pins), tree.pins.charged_to("greedy")) == (990, 10, 100)
    assert len(tree.cached()) == 10_000
    tree.evict()
    assert len(tree.cached()) == 100
    tree.pins.add(PROMPT, "modest", NOW)
    with pytest.raises(AccessDeniedError):
        tree.pins.remove(PROMPT, "greedy", NOW)
    with pytest.raises(AccessDeniedError):
        tree.pins.remove(prompts[0], "modest", NOW)
    assert len(tree.pins) == 11


# What is told.


def test_tokens_are_never_told() -> None:
    """Neither as numbers nor as bytes; a digest names the prefix, and tells namespaces apart."""
    tree = TokenTree()
    secret = key_of([1718882131, 1718882132])
    tree.pins.add(secret, "acme", NOW)
    tree.pins.add(secret._replace(namespace=NS_B), "acme", NOW, 5.0)
    (first, second) = tree.pins.statuses()
    assert first.digest != second.digest
    told = [repr(first), repr(tree.pins), *map(repr, tree.pins.pins.values())]
    with pytest.raises(NotFoundError) as unknown:
        tree.pins.remove(secret._replace(tokens=secret.tokens[:4]), "acme", NOW)
    with pytest.raises(AccessDeniedError) as denied:
        tree.pins.remove(secret, "globex", NOW)
    tree.pins.charged_pages += 1
    with pytest.raises(InvariantError) as broken:
        tree.pins.check_invariants()
    for text in (*told, str(unknown.value), str(denied.value), str(broken.value)):
        assert "1718882131" not in text
        assert repr(secret.tokens)[2:8] not in text


def test_the_state_in_a_line() -> None:
    tree = TokenTree()
    tree.insert(key_of([1, 2]))
    tree.pins.add(PROMPT, "acme", NOW, 5.0)
    tree.pins.add(key_of([1]), "globex", NOW)
    assert repr(tree.pins) == (
        "PinTable(pins=2, owners=2, charged_pages=7, pinned_pages=2, waiting=1, next_expiry=105)"
    )
    first, second = tree.pins.pins.values()
    assert repr(first) == (
        f"Pin('acme', 61616161/{first.digest}, pages=6, held_tokens=2, missing_tokens=4, expires_at=105)"
    )
    assert repr(second).endswith("pages=1, held_tokens=1, missing_tokens=0, permanent)")
    assert first.status() == PinStatus("acme", "61616161", first.digest, 6, 2, 4, 105.0)


# That damage is found.


def a_table() -> TokenTree:
    tree = TokenTree(budget=PinBudget(pages_per_owner=10))
    tree.insert(key_of([1, 2, 3]))
    tree.pins.add(PROMPT, "acme", NOW, 5.0)
    tree.pins.add(key_of([1, 2]), "globex", NOW, 9.0)
    tree.pins.check_invariants()
    return tree


def hold_of(tree: TokenTree) -> Held:
    found = next(iter(tree.pins.pins.values())).held
    assert found is not None
    return found


def forget_a_charge(tree: TokenTree) -> None:
    tree.pins.charged_pages -= 1


def charge_another(tree: TokenTree) -> None:
    tree.pins.accounts["globex"] = tree.pins.accounts["acme"]


def exceed_the_budget(tree: TokenTree) -> None:
    tree.pins.budget = PinBudget(pages_in_all=7)


def release_what_is_held(tree: TokenTree) -> None:
    tree.release(hold_of(tree).receipt)


def forget_a_hold(tree: TokenTree) -> None:
    next(iter(tree.pins.pins.values())).held = None


def tell_too_much_held(tree: TokenTree) -> None:
    next(iter(tree.pins.pins.values())).held = hold_of(tree)._replace(held_tokens=4)


def stop_waiting(tree: TokenTree) -> None:
    tree.pins.waiting.clear()


def miss_a_growth(tree: TokenTree) -> None:
    waiting = dict(tree.pins.waiting)
    tree.pins.waiting.clear()
    tree.insert(PROMPT)
    tree.pins.waiting.update(waiting)


def lose_a_pin_ref(tree: TokenTree) -> None:
    path(hold_of(tree).node)[0].pin_ref -= 1


def lose_a_lock(tree: TokenTree) -> None:
    path(hold_of(tree).node)[1].lock_ref = 1


def miscount_pages(tree: TokenTree) -> None:
    tree.pins.pinned_pages += 1


def end_later(tree: TokenTree) -> None:
    tree.pins.deadlines.set(next(iter(tree.pins.pins.values())), NOW + 50)


def miss_the_first_end(tree: TokenTree) -> None:
    tree.pins.next_expiry = NOW + 9


@pytest.mark.parametrize(
    ("damage", "group"),
    [
        (forget_a_charge, "charges"),
        (charge_another, "charges"),
        (exceed_the_budget, "budget"),
        (release_what_is_held, "holds"),
        (forget_a_hold, "holds"),
        (tell_too_much_held, "holds"),
        (stop_waiting, "waiting"),
        (miss_a_growth, "waiting"),
        (lose_a_pin_ref, "pages"),
        (lose_a_lock, "pages"),
        (miscount_pages, "pages"),
        (end_later, "expiry"),
        (miss_the_first_end, "expiry"),
    ],
)
def test_each_damage_is_found_and_the_state_printed(damage: Callable[[TokenTree], None], group: str) -> None:
    """The message names the group and carries the table and its pins."""
    tree = a_table()
    damage(tree)
    with pytest.raises(InvariantError, match=f"^PinTable: {group}: ") as error:
        tree.pins.check_invariants()
    assert "PinTable(pins=2" in str(error.value)
    assert "Pin('globex'" in str(error.value)
