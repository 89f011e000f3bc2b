"""KV that comes from elsewhere (a disk, another worker), and host copies that are read for elsewhere: who owns and locks what."""

from collections.abc import Callable

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import MAX_COPIES, Fetch, HostRead
from prefixmesh.errors import DoubleReleaseError, InternalError
from prefixmesh.ids import Epoch, Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B, key_of
from tests.support.event_readers import Listener
from tests.support.tier_kit import Tree

PROMPT = (1, 2, 3, 4, 5)
PUBLIC = RadixKey(NS_A, pack(PROMPT), 2, NS_B)


def fetch(tree: Tree, *tokens: int, beyond: int = 30, owner: str = "") -> Fetch:
    """A fetch of what the device lacks of these tokens, begun."""
    copy = tree.cache.transfers.begin_fetch(key_of(tokens), tree.match(*tokens), beyond, owner)
    assert copy is not None
    tree.check()
    return copy


def finish(tree: Tree, copy: Fetch) -> None:
    tree.cache.transfers.finish_fetch(copy, tree.now)
    tree.check()


def test_what_was_fetched_is_found_on_the_device() -> None:
    """Its pages are the copy's until it has come, and a node's from then on, behind what was there."""
    tree = Tree()
    mine = tree.put(1, 2)
    copy = fetch(tree, *PROMPT)
    assert (copy.start, len(copy.device_pages), tree.cache.copying_pages) == (2, 3, 3)
    assert tree.found(*PROMPT) == (2, 0)
    assert tree.evict(30) == 0, "its parent is locked"
    finish(tree, copy)
    assert tree.match(*PROMPT).device_indices.tolist() == [*mine, *copy.device_pages.tolist()]
    tree.check_at_rest()


def test_what_was_fetched_is_told_on_its_owners_account() -> None:
    """As what was computed: the router learns of its blocks, and whoever it came for pays for it."""
    tree = Tree(events=(listener := Listener(CachePublisher(lambda: Epoch(7)))))
    copy = fetch(tree, *PROMPT, owner="acme")
    assert not listener.blocks[Tier.DEVICE]
    finish(tree, copy)
    assert listener.blocks[Tier.DEVICE].keys() == tree.cache.blocks(Tier.DEVICE)
    assert len(listener.blocks[Tier.DEVICE]) == 2
    assert tree.match(*PROMPT).last_device_node.payer.name == "acme"


def test_a_pin_grows_over_what_was_fetched() -> None:
    tree = Tree()
    tree.put(1, 2)
    tree.cache.pins.add(key_of(PROMPT), "acme", tree.now)
    finish(tree, fetch(tree, *PROMPT))
    assert (tree.cache.pinned_pages, tree.evict(30)) == (5, 0)
    tree.cache.pins.remove(key_of(PROMPT), "acme", tree.now)
    tree.check_at_rest()


def test_whole_pages_of_the_key_are_fetched_and_no_more() -> None:
    tree = Tree(page_size=2)
    tree.put(1, 2)
    assert tree.cache.transfers.begin_fetch(key_of(PROMPT), tree.match(*PROMPT), 1) is None
    copy = tree.cache.transfers.begin_fetch(key_of(PROMPT), tree.match(*PROMPT), 30)
    assert copy is not None
    assert (len(copy.device_pages), copy.key) == (1, key_of(PROMPT[:4]))
    finish(tree, copy)
    assert tree.cache.transfers.begin_fetch(key_of(PROMPT), tree.match(*PROMPT), 30) is None
    tree.check_at_rest()


def test_a_fetch_that_fails_leaves_nothing() -> None:
    tree = Tree()
    tree.put(1, 2)
    copy = fetch(tree, *PROMPT)
    tree.cache.transfers.fail_fetch(copy)
    tree.check()
    assert tree.found(*PROMPT) == (2, 0)
    tree.check_at_rest()


@pytest.mark.parametrize("inserted", [(1, 2, 3), PROMPT, (1, 2, 3, 4, 5, 6), (1, 2, 3, 9)])
def test_what_somebody_else_has_inserted_meanwhile_keeps_its_pages(inserted: tuple[int, ...]) -> None:
    """F53: one owner per page; the copy's duplicates are freed."""
    tree = Tree()
    tree.put(1, 2)
    copy = fetch(tree, *PROMPT)
    theirs = tree.put(*inserted)
    finish(tree, copy)
    shared = 3 if inserted[3:4] == (9,) else min(len(inserted), 5)
    found = tree.match(*PROMPT).device_indices.tolist()
    assert found == [*theirs[:shared], *copy.device_pages.tolist()[shared - 2 :]]
    assert tree.cache.transfers.duplicate_pages == shared - 2
    tree.check_at_rest()


def test_what_only_the_host_has_gets_the_fetched_pages() -> None:
    """A fetch begins where the device ends, whatever the host has from there on."""
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    tree.put(1, 2)
    finish(tree, fetch(tree, *PROMPT))
    assert (tree.found(*PROMPT), tree.cache.host_pages) == ((5, 0), 4)
    tree.check_at_rest()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("cached", [(), (1, 2)])
def test_nothing_that_was_fetched_enters_the_tree_after_a_flush(
    cached: tuple[int, ...], finished: bool
) -> None:
    """Whether it was to hang below something or at the root: the weights may be others now."""
    tree = Tree()
    if cached:
        tree.put(*cached)
    copy = fetch(tree, *PROMPT)
    tree.cache.flush()
    tree.check()
    if finished:
        assert tree.cache.transfers.finish_fetch(copy, tree.now) is None
    else:
        tree.cache.transfers.fail_fetch(copy)
    tree.check()
    assert tree.found(*PROMPT) == (0, 0)
    assert tree.device.free_pages == 30


def test_a_fetch_may_end_before_behind_or_at_a_public_boundary() -> None:
    """Also where it began before it; nobody in particular pays for what is public."""
    tree = Tree()
    transfers = tree.cache.transfers
    for tokens, found, payer in ((1, 1, ""), (1, 2, ""), (9, 5, "acme")):
        copy = transfers.begin_fetch(PUBLIC, tree.cache.match_prefix(PUBLIC, tree.now), tokens, "acme")
        assert copy is not None
        finish(tree, copy)
        match = tree.cache.match_prefix(PUBLIC, tree.now)
        assert (match.matched_tokens, match.last_device_node.payer.name) == (found, payer)
    odd = PUBLIC._replace(boundary_tokens=3)
    with pytest.raises(InternalError, match="boundary at 3"):
        transfers.begin_fetch(odd, tree.match(8, 9), 5)
    tree.check_at_rest()


def test_no_device_page_means_no_fetch_and_a_count() -> None:
    tree = Tree(device=4)
    tree.put(1, 2)
    assert tree.cache.transfers.begin_fetch(key_of(PROMPT), tree.match(*PROMPT), 30) is None
    assert tree.cache.transfers.without_room == 1
    tree.check()
    assert tree.evict(30) == 2


def test_a_match_of_an_earlier_step_is_not_gone_on_from() -> None:
    """What it found may be evicted, cut shorter, or forgotten."""
    tree = Tree()
    begin = tree.cache.transfers.begin_fetch
    tree.put(1, 2, 3)
    stale = tree.match(*PROMPT)
    tree.evict(1)
    assert begin(key_of(PROMPT), stale, 2) is None
    stale = tree.match(*PROMPT)
    tree.evict(2)
    assert begin(key_of(PROMPT), stale, 2) is None
    stale = tree.match(*PROMPT)
    tree.cache.flush()
    assert begin(key_of(PROMPT), stale, 2) is None
    assert tree.cache.transfers.without_room == 0
    tree.check_at_rest()


def test_what_is_read_from_the_host_stays_until_it_has_been_read() -> None:
    """The whole path, under the name by which it can be found again."""
    tree = Tree()
    tree.demote(*PROMPT)
    tree.match(1, 2, 9)
    read = tree.cache.transfers.begin_read(tree.match(1, 2, 3, 4).last_host_node)
    assert read is not None
    tree.check()
    assert (read.key, len(read.host_pages)) == (key_of(PROMPT[:4]), 4)
    assert (tree.cache.evict_host(30), tree.cache.host_protected_pages) == (1, 4)
    tree.cache.transfers.end_read(read)
    tree.check_at_rest()


def test_what_is_read_is_known_by_its_public_prefix_and_its_tail() -> None:
    tree = Tree()
    tree.cache.insert(PUBLIC, tree.take(5), tree.now, owner="acme")
    backup = tree.cache.transfers.begin_offload(tree.cache.match_prefix(PUBLIC, 1.0).last_device_node)
    assert backup is not None
    tree.cache.transfers.finish_offload(backup)
    read = tree.cache.transfers.begin_read(tree.cache.match_prefix(PUBLIC, 2.0).last_device_node)
    assert read is not None
    assert read.key == PUBLIC
    tree.cache.transfers.end_read(read)
    tree.check_at_rest()


def test_only_what_is_on_the_host_can_be_read_there() -> None:
    tree = Tree()
    tree.put(1, 2)
    tree.back_up(1, 2)
    tree.put(*PROMPT)
    begin_read = tree.cache.transfers.begin_read
    node = tree.match(*PROMPT).last_device_node
    assert begin_read(node) is None
    backed_up = tree.match(1, 2).last_device_node
    tree.cache.flush()
    assert begin_read(backed_up) is None
    tree.check_at_rest()


def test_a_flush_leaves_what_is_read_until_it_has_been_read() -> None:
    tree = Tree()
    tree.demote(*PROMPT)
    read = tree.cache.transfers.begin_read(tree.match(*PROMPT).last_host_node)
    assert read is not None
    tree.cache.flush()
    tree.check()
    assert (tree.device.free_pages, tree.host.free_pages) == (30, 25)
    tree.cache.transfers.end_read(read)
    tree.check()
    assert tree.host.free_pages == 30


def end_of_fetch(tree: Tree) -> Callable[[], object]:
    copy = fetch(tree, 1, 2, 9)
    return lambda: tree.cache.transfers.finish_fetch(copy, tree.now)


def failure_of_fetch(tree: Tree) -> Callable[[], object]:
    copy = fetch(tree, 1, 2, 9)
    return lambda: tree.cache.transfers.fail_fetch(copy)


def end_of_read(tree: Tree) -> Callable[[], object]:
    read = tree.cache.transfers.begin_read(tree.match(1, 2).last_host_node)
    assert isinstance(read, HostRead)
    return lambda: tree.cache.transfers.end_read(read)


@pytest.mark.parametrize("begin", [end_of_fetch, failure_of_fetch, end_of_read])
def test_each_ends_once(begin: Callable[[Tree], Callable[[], object]]) -> None:
    tree = Tree()
    tree.put(1, 2)
    tree.back_up(1, 2)
    end = begin(tree)
    end()
    with pytest.raises(DoubleReleaseError):
        end()
    tree.check_at_rest()


def test_copies_in_flight_are_bounded() -> None:
    """Whoever begins them faster than they end is refused, and told so by a count."""
    tree = Tree()
    tree.demote(1, 2)
    transfers = tree.cache.transfers
    node = tree.match(1, 2).last_host_node
    reads = [transfers.begin_read(node) for _ in range(MAX_COPIES)]
    assert transfers.begin_read(node) is None
    assert transfers.begin_fetch(key_of(PROMPT), tree.match(*PROMPT), 3) is None
    assert transfers.without_room == 2
    for read in reads:
        assert read is not None
        transfers.end_read(read)
    tree.check_at_rest()


def test_a_drawing_shows_copies_without_their_tokens() -> None:
    tree = Tree()
    tree.demote(1, 2)
    copies = tree.cache.transfers
    fetch(tree, 77, 78)
    assert copies.begin_read(tree.match(1, 2).last_host_node) is not None
    assert copies.begin_restore(tree.match(1, 2)) is not None
    assert tree.cache.render().splitlines()[-3:] == [
        "fetch from token 0 device [0, 1] own",
        "hostread from token 0 host [0, 1] locked",
        "restore from token 0 device [2, 3] own host [0, 1] locked",
    ]


def test_namespaces_are_kept_apart() -> None:
    tree = Tree()
    finish(tree, fetch(tree, *PROMPT))
    assert tree.cache.peek(RadixKey(Namespace(NS_B), pack(PROMPT))) == 0
