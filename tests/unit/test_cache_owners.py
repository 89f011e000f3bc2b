"""Payers, floors and ceilings: who pays, and whose KV goes when somebody wants room."""

import pytest

from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.owners import NOBODY, Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Namespace
from tests.support.cache_kit import key_of, take

A, B, C = "acme", "globex", "initech"
NAMESPACES = {owner: Namespace(owner.ljust(16).encode()) for owner in (NOBODY, A, B, C)}


class Tree:
    """A tree in which owners insert prompts of their own namespaces."""

    def __init__(
        self, quotas: dict[str, Quota] | None = None, policy: EvictionPolicy = "lru", pages: int = 100
    ) -> None:
        self.allocator = PageAllocator(pages)
        self.cache = RadixCache(self.allocator, 1, RadixOptions(quotas=quotas or {}, policy=policy))
        self.now = 0.0

    def put(self, owner: str, tokens: list[int], namespace: str | None = None) -> None:
        """Insert a prompt on ``owner``'s account, under its own or another's namespace."""
        self.now += 1
        key = key_of(tokens, NAMESPACES[owner if namespace is None else namespace])
        self.cache.insert(key, take(self.allocator, len(tokens)), self.now, owner=owner)
        self.cache.check_invariants()

    def evict(self, pages: int, owner: str) -> int:
        """Evict for ``owner``; exactly what was promised goes."""
        promised = min(pages, self.cache.evictable_for(owner))
        freed = self.cache.evict(pages, owner)
        self.cache.check_invariants()
        assert freed == promised
        return freed

    def has(self, owner: str, tokens: list[int]) -> int:
        return self.cache.peek(key_of(tokens, NAMESPACES[owner]))

    def pays(self, owner: str) -> int:
        return self.cache._accounts.lines.pages_of(owner)


def test_each_node_knows_who_pays_and_a_split_leaves_it_to_both_halves() -> None:
    tree = Tree()
    tree.put(A, [1, 2, 3, 4])
    tree.put(B, [1, 2, 8, 9], namespace=A)
    assert (tree.pays(A), tree.pays(B), tree.pays(NOBODY)) == (4, 2, 0)
    assert tree.cache.render().count(f"payer={A}") == 2
    assert tree.cache.render().count(f"payer={B}") == 1


def test_an_account_is_closed_with_its_last_page() -> None:
    """A million tenants that come once leave nothing behind."""
    tree = Tree()
    for tenant in range(300):
        key = key_of([tenant])
        tree.cache.insert(key, take(tree.allocator, 1), 0.0, owner=f"tenant {tenant}")
        tree.cache.evict(1)
    lines = tree.cache._accounts.lines
    assert [payer.name for payer in lines] == [NOBODY]
    assert len(lines._heap) < 150


def test_without_quotas_the_order_is_of_all_owners_together() -> None:
    """Whose prompt it is does not matter: the least recently used goes."""
    tree = Tree()
    for owner, token in ((A, 1), (B, 2), (C, 3), (A, 4), (B, 5)):
        tree.put(owner, [token])
    tree.cache.match_prefix(key_of([2], NAMESPACES[B]), 9.0)
    gone = []
    for _ in range(5):
        tree.evict(1, C)
        gone.append(
            [
                owner
                for owner, token in ((A, 1), (B, 2), (C, 3), (A, 4), (B, 5))
                if not tree.has(owner, [token])
            ]
        )
    assert gone == [[A], [A, C], [A, C, A], [A, C, A, B], [A, B, C, A, B]]


def test_others_cannot_evict_an_owner_below_its_floor() -> None:
    """The oldest prompt stays as far as the floor goes; its owner itself may have it."""
    tree = Tree({A: Quota(floor_pages=3)})
    tree.put(A, [1, 2, 3, 4, 5])
    tree.put(B, [6, 7])
    assert tree.cache.evictable_for(B) == 4
    assert tree.cache.evictable_for(A) == 7
    assert tree.evict(10, B) == 4
    assert tree.has(A, [1, 2, 3, 4, 5]) == 3
    assert tree.evict(10, A) == 3


def test_a_locked_page_counts_for_the_floor() -> None:
    """What nobody could take anyway is part of what the owner is sure of."""
    tree = Tree({A: Quota(floor_pages=3)})
    tree.put(A, [1, 2])
    tree.put(A, [5, 6])
    receipt = tree.cache.lock(tree.cache.match_prefix(key_of([1, 2], NAMESPACES[A]), 5.0).last_device_node)
    assert tree.evict(10, B) == 1
    assert tree.has(A, [5, 6]) == 1
    tree.cache.release(receipt)
    assert tree.evict(10, B) == 0


def test_an_owner_above_its_floor_again_gives_again() -> None:
    """Shelter ends where the floor ends, whichever way it was reached."""
    tree = Tree({A: Quota(floor_pages=2)})
    tree.put(A, [1, 2])
    assert tree.evict(1, B) == 0
    tree.put(A, [8, 9])
    assert tree.evict(10, B) == 2
    assert tree.pays(A) == 2


def test_an_owner_above_its_ceiling_gives_first_and_only_down_to_it() -> None:
    """However recently it was used: others want room."""
    tree = Tree({A: Quota(ceiling_pages=2)})
    tree.put(B, [6, 7, 8])
    tree.put(A, [1, 2, 3, 4])
    assert tree.evict(3, C) == 3
    assert (tree.has(A, [1, 2, 3, 4]), tree.has(B, [6, 7, 8])) == (2, 2)


def test_an_owner_at_its_ceiling_pays_for_new_room_with_its_own() -> None:
    """Others' older prompts stay; below the ceiling the common order holds."""
    tree = Tree({A: Quota(ceiling_pages=4)})
    tree.put(B, [6, 7, 8])
    tree.put(A, [1, 2, 3])
    assert tree.evict(2, A) == 2
    assert (tree.has(A, [1, 2, 3]), tree.has(B, [6, 7, 8])) == (2, 2)


def test_a_ceiling_does_not_stop_an_owner_while_there_is_room() -> None:
    tree = Tree({A: Quota(ceiling_pages=2)})
    tree.put(A, [1, 2, 3, 4])
    assert tree.has(A, [1, 2, 3, 4]) == 4


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_a_parent_of_a_sheltered_node_stays_and_the_rest_goes(policy: EvictionPolicy) -> None:
    """The parent's owner has no floor, but without the parent the sheltered child would continue nothing. Everything else,
    used later or ranked higher, goes all the same, and the parent goes once its child's owner lets it."""
    tree = Tree({B: Quota(floor_pages=2)}, policy)
    tree.put(A, [1, 2])
    tree.put(B, [1, 2, 3, 4], namespace=A)
    tree.put(A, [7, 8])
    tree.cache.match_prefix(key_of([7, 8], NAMESPACES[A]), 50.0, priority=5)
    assert tree.cache.evict(10, C) == 2
    tree.cache.check_invariants()
    assert (tree.has(A, [1, 2, 3, 4]), tree.has(A, [7, 8])) == (4, 0)
    assert tree.cache.evict(10, B) == 4
    tree.cache.check_invariants()


def test_many_owners_cost_no_scan() -> None:
    """The heap of owners is bounded, whatever is used and evicted."""
    tree = Tree({f"t{n}": Quota(floor_pages=1, ceiling_pages=5) for n in range(50)}, pages=1000)
    for turn in range(40):
        for n in range(50):
            key = key_of([n, turn])
            tree.cache.insert(key, take(tree.allocator, 2), float(turn), owner=f"t{n}")
        while tree.allocator.free_pages < 200:
            assert tree.cache.evict(50, f"t{turn}") == 50
    tree.cache.check_invariants()
    assert len(tree.cache._accounts.lines._heap) <= 2 * 52 + 65


def test_a_bad_quota_is_refused() -> None:
    with pytest.raises(ConfigError, match="floor_pages"):
        Quota(floor_pages=-1)
    with pytest.raises(ConfigError, match="ceiling_pages"):
        Quota(floor_pages=5, ceiling_pages=4)


@pytest.mark.parametrize("lengths", [[4], [1, 1, 1, 1], [3, 1]])
def test_what_an_owner_at_its_ceiling_gives_does_not_depend_on_its_nodes(lengths: list[int]) -> None:
    """It has four of four and wants four: four of its own go, in however many nodes they are."""
    tree = Tree({A: Quota(ceiling_pages=4)})
    tree.put(B, [6, 7, 8, 9])
    for number, length in enumerate(lengths):
        tree.put(A, [10 * number] * length)
    assert tree.evict(4, A) == 4
    assert (tree.pays(A), tree.pays(B)) == (0, 4)


def test_a_node_above_its_ceiling_goes_in_one_call_with_the_child_that_kept_it() -> None:
    """Its owner is asked first, but another's leaf hangs below: once that has gone, it is its turn again."""
    tree = Tree({A: Quota(ceiling_pages=0)})
    tree.put(A, [1, 2])
    tree.put(B, [1, 2, 3], namespace=A)
    assert tree.evict(3, C) == 3


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_a_lower_rank_below_the_floor_counts_once_its_owner_is_above_it(policy: EvictionPolicy) -> None:
    """While it is sheltered, but still known by its former first, something of a lower rank comes to an owner; above its floor again
    that goes first, before others' of a rank between."""
    tree = Tree({A: Quota(floor_pages=3)}, policy)

    def use(owner: str, tokens: list[int], rank: int) -> None:
        """Insert a prompt and let it have so many hits, and this priority."""
        key = key_of(tokens, NAMESPACES[owner])
        tree.cache.insert(key, take(tree.allocator, len(tokens)), 0.0, owner=owner, priority=rank)
        for _ in range(rank):
            tree.cache.match_prefix(key, 1.0, rank)
        tree.cache.check_invariants()

    use(A, [1, 2, 3, 4], 5)
    assert (tree.evict(1, B), tree.evict(1, A)) == (1, 1)
    use(A, [8], 0)  # at its floor, and so sheltered
    use(A, [9], 6)
    use(B, [7], 2)
    assert tree.evict(1, C) == 1
    assert (tree.has(A, [8]), tree.has(B, [7])) == (0, 1)
