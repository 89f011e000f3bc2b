"""Public prefixes with private tails in the tree: who shares what, who pays, what protects what, and what goes with what."""

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InternalError
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack, unpack
from tests.support.cache_kit import take
from tests.support.public_kit import ACME, GLOBEX, PUBLIC, SHAPES, Shape, Worker, cut, tenant

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
SMALL = Shape(1, 4)


class Office:
    """A worker with one public pin of two units, and two tenants with equal prompts of three more pages behind it."""

    def __init__(self, shape: Shape, **options: int | dict[str, Quota]) -> None:
        self.shape = shape
        self.worker = Worker(shape, **options)  # type: ignore[arg-type]
        self.cache = self.worker.cache
        self.pinned = shape.units(2)
        self.boundary = len(self.pinned)
        self.own = shape.pages(3, 1000)
        self.prompt = [*self.pinned, *self.own]
        self.pin = self.worker.prefix(self.pinned)
        self.acme = self.pin.key(ACME, pack(self.prompt))
        self.globex = self.pin.key(GLOBEX, pack(self.prompt))
        self.public = RadixKey(PUBLIC, pack(self.pinned))

    def node_of(self, key: RadixKey) -> TreeNode:
        """Where a key ends, all of which is cached."""
        match = self.worker.match(key)
        assert match.matched_tokens * 4 == len(key.tokens)
        return match.last_device_node


@each_shape
def test_a_tail_hangs_below_the_public_node_which_is_on_nobodys_account(shape: Shape) -> None:
    office = Office(shape)
    result = office.worker.compute(office.acme, "acme")
    assert (result.prefix_tokens, result.inserted_tokens) == (0, len(office.prompt))
    public, tail = office.worker.nodes()
    assert tail is result.last_device_node
    assert (tail.parent, tail.start) == (public, office.boundary)
    assert unpack(public.key).tolist() == office.pinned
    assert unpack(tail.key).tolist() == office.own
    assert (public.payer.name, tail.payer.name) == ("", "acme")
    assert office.worker.paid_by("acme") == 3
    page_bytes = shape.page * 4
    assert public.edge == PUBLIC + public.key[:page_bytes]
    assert tail.edge == office.acme.tail + tail.key[:page_bytes]
    office.worker.check()


@each_shape
def test_two_tenants_share_the_public_part_and_not_a_token_behind_it(shape: Shape) -> None:
    """Equal tokens on both sides: the other finds the boundary, its own, and never what the first has added."""
    office = Office(shape)
    worker = office.worker
    mine = worker.compute(office.acme, "acme")
    match = worker.match(office.globex)
    assert match.matched_tokens == office.boundary
    assert match.device_indices.tolist() == mine.device_indices[: office.boundary // shape.page].tolist()
    theirs = worker.compute(office.globex, "globex")
    assert theirs.prefix_tokens == office.boundary
    assert set(theirs.device_indices[-3:].tolist()).isdisjoint(mine.device_indices[-3:].tolist())
    assert worker.matched(office.acme) == worker.matched(office.globex) == len(office.prompt)
    assert (worker.paid_by("acme"), worker.paid_by("globex")) == (3, 3)
    assert worker.paid_by("") == office.boundary // shape.page


@each_shape
def test_what_a_tenant_adds_is_seen_under_no_other_key(shape: Shape) -> None:
    """Not in public, not in plain namespaces (its own among them), not behind another boundary."""
    office = Office(shape)
    office.worker.compute(office.acme, "acme")
    whole = pack(office.prompt)
    shorter = office.worker.prefix(office.pinned[: shape.unit])
    for key, found in (
        (RadixKey(PUBLIC, whole), office.boundary),
        (RadixKey(ACME, whole), 0),
        (RadixKey(GLOBEX, whole), 0),
        (RadixKey(office.acme.tail, whole), 0),
        (RadixKey(office.acme.tail, pack(office.own)), 0),
        (shorter.key(ACME, whole), shape.unit),
        (office.pin.key(tenant("other"), whole), office.boundary),
        (office.acme, len(office.prompt)),
    ):
        assert office.worker.matched(key) == found


@each_shape
def test_a_public_node_that_a_longer_prompt_goes_on_from_keeps_both_apart(shape: Shape) -> None:
    """The same tokens go on in public and in a tail: two nodes, and each key follows its own."""
    office = Office(shape)
    longer = RadixKey(PUBLIC, office.acme.tokens)
    office.worker.compute(office.acme, "acme")
    office.worker.compute(longer)
    assert office.worker.paid_by("") == office.boundary // shape.page + 3
    for key in (office.acme, longer):
        assert office.worker.matched(key) == len(office.prompt)
    pages = {int(office.worker.match(key).device_indices[-1]) for key in (office.acme, longer)}
    assert len(pages) == 2
    assert office.worker.matched(office.globex) == office.boundary


@each_shape
def test_a_locked_tail_locks_the_public_node_and_no_other_tail(shape: Shape) -> None:
    """However much room is wanted, what a running request reads stays, and only that."""
    office = Office(shape)
    worker, cache = office.worker, office.cache
    worker.compute(office.acme, "acme")
    worker.compute(office.globex, "globex")
    node = office.node_of(office.acme)
    receipt = cache.lock(node)
    public = node.parent
    assert public is not None
    assert (node.lock_ref, public.lock_ref) == (1, 1)
    assert cache.evict(1000) == 3
    worker.check()
    assert worker.matched(office.acme) == len(office.prompt)
    assert worker.matched(office.globex) == office.boundary
    cache.release(receipt)
    assert cache.evict(1000) == len(office.prompt) // shape.page
    assert (cache.node_count, worker.pool.free_pages) == (0, worker.pool.total_pages)


@each_shape
@pytest.mark.parametrize("public_used_last", [True, False])
def test_tails_go_before_the_public_node_does_and_all_go_with_it(
    shape: Shape, public_used_last: bool
) -> None:
    """Page by page: no tail is left without what it continues."""
    office = Office(shape)
    worker, cache = office.worker, office.cache
    worker.compute(office.acme, "acme")
    worker.compute(office.globex, "globex")
    if public_used_last:
        worker.matched(office.public)
    for _ in range(6):
        assert worker.paid_by("") == office.boundary // shape.page
        assert cache.evict(1) == 1
        worker.check()
    assert [node.payer.name for node in worker.nodes()] == [""]
    cache.evict(1)
    assert worker.matched(office.acme) == office.boundary - shape.page
    cache.evict(1000)
    assert cache.node_count == 0
    assert worker.heard.blocks[Tier.DEVICE].keys() == set()


@each_shape
def test_a_flush_takes_public_prefixes_and_tails_alike(shape: Shape) -> None:
    """What is read stays readable till it is released, and matches no more; the same prompt begins anew."""
    office = Office(shape)
    worker, cache = office.worker, office.cache
    worker.compute(office.acme, "acme")
    worker.compute(office.globex, "globex")
    receipt = cache.lock(office.node_of(office.acme))
    cache.flush()
    worker.check()
    assert cache.evictable_pages == 0
    assert cache.protected_pages == len(office.prompt) // shape.page
    assert worker.matched(office.acme) == worker.matched(office.globex) == 0
    cache.release(receipt)
    assert worker.pool.free_pages == worker.pool.total_pages
    worker.compute(office.acme, "acme")
    assert (worker.matched(office.acme), worker.matched(office.globex)) == (
        len(office.prompt),
        office.boundary,
    )


@each_shape
def test_a_boundary_inside_a_public_edge_splits_it_without_an_event(shape: Shape) -> None:
    """A longer public prompt was there first: its edge becomes two, and goes on matching whole."""
    office = Office(shape)
    worker = office.worker
    long = RadixKey(PUBLIC, pack([*office.pinned, *shape.units(1, 500)]))
    pages = worker.compute(long).device_indices
    told = len(worker.heard.events)
    assert worker.matched(office.globex) == office.boundary
    assert len(worker.nodes()) == 2
    assert len(worker.heard.events) == told
    worker.compute(office.acme, "acme")
    front, *below = worker.nodes()
    assert {node.parent for node in below} == {front}
    assert worker.match(long).device_indices.tolist() == pages.tolist()
    assert worker.matched(office.acme) == len(office.prompt)


@each_shape
def test_an_insert_alone_splits_a_public_edge_at_the_boundary(shape: Shape) -> None:
    """Computed in parallel with the longer public prompt: what is there already is handed back, and the tail kept."""
    office = Office(shape)
    worker = office.worker
    longer = worker.compute(RadixKey(PUBLIC, pack([*office.pinned, *shape.units(1, 500)])))
    free = worker.pool.free_pages
    result = worker.cache.insert(
        office.acme, take(worker.pool, len(office.prompt) // shape.page), 1.0, owner="acme"
    )
    shared = office.boundary // shape.page
    assert result.prefix_tokens == office.boundary
    assert result.device_indices[:shared].tolist() == longer.device_indices[:shared].tolist()
    assert worker.pool.free_pages == free - 3
    worker.check()


@each_shape
def test_a_public_part_that_a_tenant_computes_in_chunks_becomes_public(shape: Shape) -> None:
    """Nothing was cached, and nobody had computed the pin: after each chunk others find exactly its public part."""
    office = Office(shape)
    worker = office.worker
    pages = take(worker.pool, len(office.prompt) // shape.page)
    for end in range(shape.page, len(office.prompt) + 1, shape.page):
        worker.cache.insert(cut(office.acme, end), pages[: end // shape.page], 1.0, owner="acme")
        assert worker.cache.peek(office.globex) == min(end, office.boundary)
        assert worker.cache.peek(office.acme) == end
        worker.check(elsewhere=len(pages) - end // shape.page)
    assert worker.paid_by("") == office.boundary // shape.page
    assert worker.paid_by("acme") == 3


@each_shape
def test_two_tenants_that_compute_the_public_part_at_once_end_up_with_one(shape: Shape) -> None:
    """Rule 7: the later one's duplicates are free, and it reads the earlier one's pages before the boundary."""
    office = Office(shape)
    worker = office.worker
    wanted, shared = len(office.prompt) // shape.page, office.boundary // shape.page
    first, second = take(worker.pool, wanted), take(worker.pool, wanted)
    worker.cache.insert(office.acme, first, 1.0, owner="acme")
    result = worker.cache.insert(office.globex, second, 1.0, owner="globex")
    assert result.device_indices.tolist() == [*first[:shared].tolist(), *second[shared:].tolist()]
    assert worker.pool.total_pages - worker.pool.free_pages == wanted + 3
    worker.check()


@each_shape
@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["page_before", "at", "page_after"])
def test_a_prompt_that_ends_near_the_boundary(shape: Shape, offset: int) -> None:
    """One that ends before it does not have the pin for a prefix, and is private. Its chunks, and the part that is matched, are
    another thing: those end anywhere, and go on."""
    office = Office(shape)
    worker = office.worker
    end = office.boundary + offset * shape.page
    prompt = office.prompt[:end]
    key = worker.key(ACME, prompt, [office.pin])
    assert key.boundary_tokens == (office.boundary if offset >= 0 else 0)
    worker.compute(key, "acme")
    assert worker.matched(key) == end
    assert worker.cache.peek(office.globex) == (office.boundary if offset >= 0 else 0)
    assert worker.paid_by("acme") == (end // shape.page, 0, 1)[offset + 1]
    chunk = cut(office.acme, end)
    worker.compute(chunk, "acme")
    assert worker.matched(chunk) == end
    assert worker.cache.peek(office.globex) == min(end, office.boundary)
    worker.compute(office.acme, "acme")
    assert worker.matched(office.acme) == len(office.prompt)


@each_shape
def test_a_boundary_that_is_not_at_whole_pages_and_blocks_is_our_own_bug(shape: Shape) -> None:
    """The insert says so before it changes anything."""
    office = Office(shape)
    pages = take(office.worker.pool, len(office.prompt) // shape.page)
    for wrong in (office.boundary + 1, -office.boundary, office.boundary - 1):
        with pytest.raises(InternalError, match="boundary"):
            office.cache.insert(office.acme._replace(boundary_tokens=wrong), pages, 1.0)
    with pytest.raises(InternalError, match="boundary"):
        office.cache.insert(office.acme._replace(tail=Namespace(b"short")), pages, 1.0)
    assert office.cache.node_count == 0


@each_shape
def test_old_tails_behind_a_shorter_boundary_still_hit_after_a_longer_public_pin(shape: Shape) -> None:
    """Two boundaries in one public path, each with tails of its own, of one tenant and of two."""
    worker = Worker(shape)
    pinned = shape.units(2)
    short, long = worker.prefix(pinned[: shape.unit]), worker.prefix(pinned)
    prompt = pack([*pinned, *shape.pages(2, 1000)])
    old = short.key(ACME, prompt)
    worker.compute(old, "acme")
    worker.compute(RadixKey(PUBLIC, pack(pinned)))
    assert worker.matched(old) * 4 == len(prompt)
    new = long.key(ACME, prompt)
    assert worker.matched(new) == 2 * shape.unit
    worker.compute(new, "acme")
    worker.compute(long.key(GLOBEX, prompt), "globex")
    for key in (old, new, long.key(GLOBEX, prompt)):
        assert worker.matched(key) * 4 == len(prompt)
    assert worker.matched(short.key(GLOBEX, prompt)) == shape.unit
    tails = [node for node in worker.nodes() if node.payer.name]
    assert sorted(node.start for node in tails) == [shape.unit, 2 * shape.unit, 2 * shape.unit]


@each_shape
def test_a_tail_is_told_of_as_a_chain_of_its_own(shape: Shape) -> None:
    """Public blocks from the public namespace, the tail's from the tail's, without a parent; and it goes as it came."""
    office = Office(shape)
    worker = office.worker
    tail = shape.units(2, 3000)
    key = office.pin.key(ACME, pack([*office.pinned, *tail]))
    worker.compute(key, "acme")
    public_names = tuple(block_fingerprints(PUBLIC, pack(office.pinned), shape.block))
    tail_names = tuple(block_fingerprints(key.tail, pack(tail), shape.block))
    assert worker.heard.events == [
        ("stored", Tier.DEVICE, None, public_names),
        ("stored", Tier.DEVICE, None, tail_names),
    ]
    grown = office.pin.key(ACME, pack([*office.pinned, *tail, *shape.units(1, 4000)]))
    worker.compute(grown, "acme")
    more = tuple(block_fingerprints(key.tail, pack([*tail, *shape.units(1, 4000)]), shape.block))
    assert worker.heard.events[2:] == [("stored", Tier.DEVICE, tail_names[-1], more[len(tail_names) :])]
    worker.cache.evict(3 * shape.unit // shape.page)
    gone = [name for kind, _, _, names in worker.heard.events[3:] if kind == "removed" for name in names]
    assert sorted(gone) == sorted(more)
    assert worker.heard.blocks[Tier.DEVICE].keys() == set(public_names)
    worker.check()


@each_shape
def test_a_tail_that_is_trimmed_loses_the_names_of_what_went(shape: Shape) -> None:
    office = Office(shape)
    worker = office.worker
    tail = shape.units(3, 3000)
    key = office.pin.key(ACME, pack([*office.pinned, *tail]))
    worker.compute(key, "acme")
    for left in range(3 * shape.unit - shape.page, 0, -shape.page):
        worker.cache.evict(1)
        worker.check()
        names = block_fingerprints(key.tail, pack(tail[:left]), shape.block)
        assert worker.nodes()[-1].hash_value == tuple(names)
        assert worker.cache.peek(key) == office.boundary + left


@each_shape
def test_a_tail_goes_to_the_host_and_comes_back_for_its_tenant_alone(shape: Shape) -> None:
    """With the public part above it, which others find there too; accounts stay as they were."""
    office = Office(shape)
    worker, cache = office.worker, office.cache
    node = worker.compute(office.acme, "acme").last_device_node
    offload = cache.transfers.begin_offload(node)
    assert offload is not None
    assert len(offload.host_pages) == len(office.prompt) // shape.page
    cache.transfers.finish_offload(offload)
    worker.check()
    cache.evict(1000)
    worker.check()
    assert cache.match_prefix(office.acme, 2.0).host_hit_length == len(office.prompt)
    assert cache.match_prefix(office.globex, 2.0).host_hit_length == office.boundary
    assert cache.match_prefix(RadixKey(PUBLIC, office.acme.tokens), 2.0).host_hit_length == office.boundary
    assert cache.match_prefix(RadixKey(ACME, office.acme.tokens), 2.0).host_hit_length == 0
    restore = cache.transfers.begin_restore(cache.match_prefix(office.acme, 3.0), "acme")
    assert restore is not None
    worker.check()
    cache.transfers.finish_restore(restore)
    assert worker.matched(office.acme) == len(office.prompt)
    assert worker.matched(office.globex) == office.boundary
    assert (worker.paid_by("acme"), worker.paid_by("")) == (3, office.boundary // shape.page)


@each_shape
def test_a_tenant_that_computes_again_what_the_host_has_puts_it_on_the_accounts_it_was_on(
    shape: Shape,
) -> None:
    """The public nodes are there, on the host alone: another tenant's insert brings them back, for nobody in particular."""
    office = Office(shape)
    worker, cache = office.worker, office.cache
    node = worker.compute(office.acme, "acme").last_device_node
    offload = cache.transfers.begin_offload(node)
    assert offload is not None
    cache.transfers.finish_offload(offload)
    cache.evict(1000)
    worker.compute(office.globex, "globex")
    worker.check()
    assert worker.matched(office.globex) == len(office.prompt)
    match = cache.match_prefix(office.acme, 2.0)
    assert (match.matched_tokens, match.host_hit_length) == (office.boundary, len(office.own))
    accounts = {name: worker.paid_by(name) for name in ("", "acme", "globex")}
    assert accounts == {"": office.boundary // shape.page, "acme": 0, "globex": 3}
    assert cache.evict_host(1000) == len(office.prompt) // shape.page
    worker.check()
    assert worker.matched(office.acme) == office.boundary


@each_shape
def test_a_restore_of_a_tail_that_ends_after_a_flush_brings_nothing(shape: Shape) -> None:
    office = Office(shape)
    worker, cache = office.worker, office.cache
    offload = cache.transfers.begin_offload(worker.compute(office.acme, "acme").last_device_node)
    assert offload is not None
    cache.transfers.finish_offload(offload)
    cache.evict(3)
    restore = cache.transfers.begin_restore(cache.match_prefix(office.acme, 3.0), "acme")
    assert restore is not None
    cache.flush()
    cache.transfers.finish_restore(restore)
    worker.check()
    assert (worker.pool.free_pages, worker.host.free_pages) == (400, 200)
    assert worker.matched(office.acme) == 0


@each_shape
def test_a_tail_below_its_owners_floor_keeps_the_public_node_it_continues(shape: Shape) -> None:
    """Others cannot have the tail, so neither what is above it; its owner may give it up."""
    office = Office(shape, quotas={"acme": Quota(floor_pages=3)})
    office.worker.compute(office.acme, "acme")
    office.worker.compute(office.globex, "globex")
    assert office.cache.evict(1000, "globex") == 3
    assert office.worker.matched(office.acme) == len(office.prompt)
    assert office.cache.evict(1000, "acme") == len(office.prompt) // shape.page


@each_shape
def test_a_public_part_counts_towards_no_tenants_ceiling(shape: Shape) -> None:
    """A tenant with room for its tail alone, which also computed the pin, gives nothing when others want room first."""
    office = Office(shape, quotas={"acme": Quota(ceiling_pages=3)})
    worker = office.worker
    worker.compute(RadixKey(GLOBEX, pack(shape.pages(1, 8000))), "globex")
    worker.compute(office.acme, "acme")
    assert office.cache.evict(1, "globex") == 1
    assert worker.matched(office.acme) == len(office.prompt)
    assert worker.matched(RadixKey(GLOBEX, pack(shape.pages(1, 8000)))) == 0


@each_shape
def test_a_pin_of_the_public_prefix_keeps_it_and_no_tail(shape: Shape) -> None:
    """It grows with what a tenant computes, and stops at the boundary. A tenant's own pin keeps its tail, and its alone."""
    office = Office(shape)
    worker, pins = office.worker, office.cache.pins
    pins.add(office.public, "admin", 0.0)
    worker.compute(office.acme, "acme")
    worker.compute(office.globex, "globex")
    status = pins.status(office.public, "admin")
    assert status is not None
    assert (status.held_tokens, status.missing_tokens) == (office.boundary, 0)
    pins.add(office.acme, "acme", 0.0)
    assert office.cache.evict(1000) == 3
    assert worker.matched(office.acme) == len(office.prompt)
    pins.remove(office.acme, "acme", 1.0)
    assert office.cache.evict(1000) == 3
    assert worker.matched(office.acme) == office.boundary


# A name is a page's bytes, or a namespace's and a page's: of two lengths, so that one is never the other.


@pytest.mark.parametrize("short", range(4))
def test_a_tail_whose_namespace_is_a_pages_bytes_is_not_that_page(short: int) -> None:
    """Pages of 4 tokens are as long as a namespace. The public prefix goes on with the very page that the tail is called: no
    prompt behind the boundary finds it, not one that ends there, not one with less than a page, nor one with that page."""
    worker = Worker(Shape(4, 4))
    pinned, name = [1, 2, 3, 4], [5, 6, 7, 8]
    tail = Namespace(pack(name))
    worker.compute(RadixKey(PUBLIC, pack([*pinned, *name, *name])))
    worker.matched(RadixKey(PUBLIC, pack(pinned)))  # a node ends there
    for rest in (name[:short], [*name, *name[:short]], [*name, *name, *name[:short]]):
        key = RadixKey(PUBLIC, pack([*pinned, *rest]), 4, tail)
        assert worker.matched(key) == 4
    for rest in ([*name, *name[:short]], [*name, *name, *name[:short]]):
        key = RadixKey(PUBLIC, pack([*pinned, *rest]), 4, tail)
        result = worker.compute(key, "acme")
        assert worker.matched(key) == result.inserted_tokens == 4 + len(rest) - short
    assert worker.matched(RadixKey(PUBLIC, pack([*pinned, *name, *name]))) == 12
    assert worker.paid_by("acme") == 2


def test_a_public_page_is_not_found_in_a_tail_of_that_name() -> None:
    """The other way round: the tail is there, and the public prefix does not go on."""
    worker = Worker(Shape(4, 4))
    tail = Namespace(pack([5, 6, 7, 8]))
    worker.compute(RadixKey(PUBLIC, pack([1, 2, 3, 4, 9, 9, 9, 9]), 4, tail), "acme")
    for rest in ([5, 6, 7, 8], [5, 6, 7, 8, 9, 9, 9, 9], [9, 9, 9, 9]):
        assert worker.matched(RadixKey(PUBLIC, pack([1, 2, 3, 4, *rest]))) == 4
    assert worker.matched(RadixKey(tail, pack([9, 9, 9, 9]))) == 0


@pytest.mark.parametrize("rest", range(8))
def test_part_of_a_page_behind_a_tails_namespace_is_not_a_longer_page(rest: int) -> None:
    """Pages of 8 tokens: namespace and half a page are as long as a page, and the public prefix goes on with just those bytes."""
    worker = Worker(Shape(8, 8))
    pinned, half = list(range(8)), [5, 6, 7, 8]
    tail = Namespace(pack(half))
    worker.compute(RadixKey(PUBLIC, pack([*pinned, *half, *half, *half, *half])))
    worker.matched(RadixKey(PUBLIC, pack(pinned)))
    key = RadixKey(PUBLIC, pack([*pinned, *(half * 2)[:rest]]), 8, tail)
    assert worker.matched(key) == 8
    assert worker.compute(key, "acme").inserted_tokens == 8
    assert len(worker.nodes()) == 2
    worker.check()


def test_a_tail_of_that_name_is_kept_apart_on_the_host_and_for_pins_too() -> None:
    """Pages of 4 tokens again, through the other two ways into the tree."""
    worker = Worker(Shape(4, 4))
    cache = worker.cache
    name = [5, 6, 7, 8]
    tail = Namespace(pack(name))
    public = RadixKey(PUBLIC, pack([1, 2, 3, 4, *name, *name]))
    mine = RadixKey(PUBLIC, pack([1, 2, 3, 4, *name]), 4, tail)
    cache.pins.add(mine, "acme", 0.0)
    offload = cache.transfers.begin_offload(worker.compute(public).last_device_node)
    assert offload is not None
    cache.transfers.finish_offload(offload)
    status = cache.pins.status(mine, "acme")
    assert status is not None
    assert status.held_tokens == 4
    cache.evict(1000)
    for end in range(4, 9):
        match = cache.match_prefix(cut(mine, end), 1.0)
        assert (match.matched_tokens, match.host_hit_length) == (4, 0)
        worker.check()
    worker.compute(mine, "acme")
    status = cache.pins.status(mine, "acme")
    assert status is not None
    assert status.held_tokens == 8
    match = cache.match_prefix(public, 1.0)
    assert (match.matched_tokens, match.host_hit_length) == (4, 8)
    worker.check()
