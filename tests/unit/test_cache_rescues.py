"""What is next to leave the device is saved first: what that is, whose room on the host it takes, and what becomes of its pages."""

from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Offload
from tests.support.cache_kit import key_of
from tests.support.tier_kit import Tree


def rescue(tree: Tree, *tokens: int, going: int = 0) -> Offload | None:
    """Begin one of the path to these tokens, beside the first so many pages of those that are going."""
    transfers = tree.cache.transfers
    copy = transfers.begin_rescue(tree.node(*tokens), dict.fromkeys(transfers.next_to_go(going)))
    tree.check()
    return copy


def finish(tree: Tree, copy: Offload | None) -> None:
    assert copy is not None
    tree.cache.transfers.finish_offload(copy)
    tree.check()


def on(tree: Tree, *tokens: int) -> tuple[int, int]:
    """Tokens of a prompt on the device, and beyond on the host; no use of them."""
    found = tree.cache.peek_tiers(key_of(tokens))
    return found.device, found.host


def test_next_to_go_is_what_an_eviction_takes_and_nothing_that_is_locked() -> None:
    tree = Tree()
    for first in (1, 2, 3):
        tree.put(first, 7, 8)
    receipt = tree.cache.lock(tree.node(1, 7, 8))
    before = tree.cache.render()
    going = tree.cache.transfers.next_to_go(4)
    assert going == [tree.node(2, 7, 8), tree.node(3, 7, 8)]
    assert tree.cache.transfers.next_to_go(3) == going[:1]
    assert tree.cache.transfers.next_to_go(0) == []
    assert tree.cache.render() == before
    tree.cache.release(receipt)


def test_next_to_go_of_several_payers_is_in_the_order_of_their_uses() -> None:
    tree = Tree()
    for first, owner in ((1, "a"), (2, "b"), (3, "a"), (4, "")):
        tree.put(first, 7, owner=owner)
    assert [node.payer.name for node in tree.cache.transfers.next_to_go(8)] == ["a", "b", "a", ""]


def test_rescue_sheds_copies_of_what_the_device_keeps_longest_from_their_ends() -> None:
    tree = Tree(host=6)
    tree.put(1, 1)
    tree.put(2, 2)
    tree.back_up(2, 2)
    tree.put(3, 3)
    tree.put(3, 3, 3, 3)
    tree.back_up(3, 3, 3, 3)
    finish(tree, rescue(tree, 1, 1, going=2))
    assert on(tree, 1, 1) == (0, 2)
    assert tree.node(2, 2).on_host
    assert tree.node(3, 3).on_host
    assert not tree.node(3, 3, 3, 3).on_host
    tree.check_at_rest()


def test_what_goes_next_keeps_its_copy_and_so_does_what_is_locked_or_pinned_on_the_host() -> None:
    tree = Tree(host=4, host_pin_budget=PinBudget(pages_in_all=4))
    tree.put(1, 1)
    tree.put(2, 2)
    tree.put(3, 3)
    tree.back_up(2, 2)
    tree.back_up(3, 3)
    tree.cache.pins_on(Tier.HOST).add(key_of((3, 3)), "me", tree.now)
    tree.match(2, 2)
    transfers = tree.cache.transfers
    going = dict.fromkeys([tree.node(1, 1), tree.node(2, 2)])
    assert transfers.begin_rescue(tree.node(1, 1), going) is None
    assert tree.node(2, 2).on_host
    assert tree.node(3, 3).on_host


def test_what_is_shed_is_told_and_stays_on_the_device() -> None:
    tree = Tree(host=2)
    tree.put(1, 1)
    tree.put(2, 2)
    tree.back_up(2, 2)
    finish(tree, rescue(tree, 1, 1, going=2))
    assert on(tree, 2, 2) == (2, 0)
    assert tree.cache.blocks(Tier.HOST).isdisjoint(tree.cache.blocks(Tier.DEVICE))


def test_quotas_on_the_host_say_who_gives_and_nothing_is_shed() -> None:
    tree = Tree(host=2, host_quotas={"acme": Quota(floor_pages=1)})
    tree.put(1, 1)
    tree.put(2, 2)
    tree.back_up(2, 2)
    assert rescue(tree, 1, 1, going=2) is None
    assert tree.node(2, 2).on_host


def test_a_rescue_that_has_come_gives_up_its_pages_with_all_that_was_used_with_it() -> None:
    """What had its copy before goes too; else it would stand at the back, as if somebody had used it."""
    tree = Tree()
    tree.put(1, 1)
    tree.back_up(1, 1)
    tree.put(1, 1, 1, 1)
    free = tree.device.free_pages
    copy = rescue(tree, 1, 1, 1, 1, going=2)
    assert copy is not None
    assert tree.cache.transfers.gives(copy) == 4
    finish(tree, copy)
    assert tree.device.free_pages == free + 4
    assert on(tree, 1, 1, 1, 1) == (0, 4)
    tree.check_at_rest()


def test_what_others_use_of_its_path_stays() -> None:
    """Later than it, meanwhile, or by another branch."""
    tree = Tree()
    tree.put(1, 1, 1, 1)
    tree.put(1, 1, 2, 2)  # later
    copy = rescue(tree, 1, 1, 1, 1, going=2)
    assert copy is not None
    assert tree.cache.transfers.gives(copy) == 2
    finish(tree, copy)
    assert on(tree, 1, 1, 1, 1) == (2, 2)
    copy = rescue(tree, 1, 1, 2, 2, going=2)
    receipt = tree.cache.lock(tree.node(1, 1, 2, 2))  # meanwhile
    finish(tree, copy)
    assert on(tree, 1, 1, 2, 2) == (4, 0)
    tree.cache.release(receipt)


def test_a_rescue_that_fails_leaves_everything_as_it_was() -> None:
    tree = Tree()
    tree.put(1, 1)
    copy = rescue(tree, 1, 1, going=2)
    assert copy is not None
    tree.cache.transfers.abort_offload(copy)
    tree.check()
    assert on(tree, 1, 1) == (2, 0)
    tree.check_at_rest()


def test_flush_meanwhile_leaves_nothing() -> None:
    tree = Tree()
    tree.put(1, 1)
    copy = rescue(tree, 1, 1, going=2)
    tree.cache.flush()
    finish(tree, copy)
    tree.check_at_rest()


def test_what_somebody_waits_for_is_not_pushed_out_for_it_and_what_is_older_is() -> None:
    tree = Tree(host=4)
    tree.demote(1, 1)
    tree.demote(2, 2)
    tree.put(3, 3)
    tree.cache.transfers.keep(key_of((1, 1)))
    finish(tree, rescue(tree, 3, 3, going=2))
    assert on(tree, 1, 1) == (0, 2)
    assert on(tree, 2, 2) == (0, 0)
    assert on(tree, 3, 3) == (0, 2)


def test_keep_puts_a_prompt_last_on_both_tiers_without_a_hit() -> None:
    tree = Tree()
    tree.put(1, 1)
    tree.put(2, 2)
    node = tree.node(1, 1)
    hits, used = node.hit_count, node.last_access_time
    tree.cache.transfers.keep(key_of((1, 1, 5)))
    assert tree.cache.transfers.next_to_go(2) == [tree.node(2, 2)]
    assert (node.hit_count, node.last_access_time) == (hits, used)


def test_of_what_does_not_fit_the_front_is_saved_and_nothing_leaves_the_device() -> None:
    tree = Tree(host=2)
    tree.put(1, 2, 3)
    copy = rescue(tree, 1, 2, 3, going=3)
    assert copy is not None
    assert tree.cache.transfers.gives(copy) == 0
    finish(tree, copy)
    assert on(tree, 1, 2, 3) == (3, 0)
    assert tree.node(1, 2).on_host


def test_what_the_device_goes_on_from_stays_there() -> None:
    """The front was used together with what is saved, and another branch goes on from it."""
    tree = Tree()
    tree.put(1, 1, 2, 2)
    tree.put(1, 1, 1, 1)
    finish(tree, rescue(tree, 1, 1, 1, 1))
    assert on(tree, 1, 1, 1, 1) == (2, 2)
    assert on(tree, 1, 1, 2, 2) == (4, 0)


def test_where_there_is_only_what_somebody_waits_for_nothing_is_saved() -> None:
    tree = Tree(host=2)
    tree.demote(1, 1)
    tree.put(3, 3)
    tree.cache.transfers.keep(key_of((1, 1)))
    assert rescue(tree, 3, 3) is None
    assert on(tree, 1, 1) == (0, 2)
