"""Which prefixes a folder holds, in which files, and which files go: no file is opened."""

import random

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.cache.public import public_boundary
from prefixmesh.ids import Namespace
from prefixmesh.worker.tiers.disk_index import DiskIndex, StoredFile
from prefixmesh.worker.tiers.disk_runs import KvLayout, UnitNames, file_stem, run_of, unit_names
from tests.support.disk_kit import IDENTITY, LAYOUT, NAMESPACE, OTHER_NAMESPACE, key_of, long_key


def names(key: RadixKey, layout: KvLayout = LAYOUT) -> UnitNames:
    return unit_names(key, layout)


def keep(index: DiskIndex, key: RadixKey, size_bytes: int = 10) -> list[str]:
    """Write all that is missing of a key; names of what had to go."""
    units = names(key)
    gone: list[str] = []
    for first, last in index.missing(units):
        run = run_of(units, first, last, LAYOUT)
        file = StoredFile(
            file_stem(run, IDENTITY), size_bytes, units.names[first:last], run.start_tokens, is_written=False
        )
        evicted = index.begin(file)
        assert evicted is not None
        gone += [each.name for each in evicted]
        index.finish(file, size_bytes)
        index.check_invariants()
    index.use(units)
    return gone


def found_tokens(index: DiskIndex, key: RadixKey, from_tokens: int = 0) -> int:
    parts = index.find(names(key), from_tokens)
    at = from_tokens
    for part in parts:
        assert part.start_tokens == at
        at = part.end_tokens
    return at - from_tokens


def test_a_prefix_is_found_from_any_page_on_in_whole_units() -> None:
    index = DiskIndex(LAYOUT, 1000)
    keep(index, long_key(22))
    assert found_tokens(index, long_key(22)) == 20
    assert found_tokens(index, long_key(40)) == 20
    assert found_tokens(index, long_key(22), 6) == 14
    assert found_tokens(index, long_key(11)) == 8
    assert found_tokens(index, long_key(22), 20) == 0


def test_nothing_is_found_in_another_namespace_or_behind_other_tokens() -> None:
    index = DiskIndex(LAYOUT, 1000)
    keep(index, long_key(16))
    assert found_tokens(index, long_key(16, namespace=OTHER_NAMESPACE)) == 0
    assert found_tokens(index, key_of(100, 101, 102, 103, 9, 9, 9, 9)) == 4
    assert found_tokens(index, key_of(1, *range(101, 116))) == 0


def test_a_run_has_at_most_eight_blocks_and_a_file_more_is_begun() -> None:
    index = DiskIndex(LAYOUT, 1000)
    units = names(long_key(4 * 19))
    assert index.missing(units) == [(0, 8), (8, 16), (16, 19)]
    assert index.layout.run_units == 8


def test_what_is_there_already_is_not_written_again() -> None:
    index = DiskIndex(LAYOUT, 1000)
    keep(index, long_key(12))
    assert index.missing(names(long_key(28))) == [(3, 7)]
    keep(index, long_key(28))
    assert len(index) == 2
    assert found_tokens(index, long_key(28)) == 28


def test_what_is_being_written_is_neither_served_nor_written_twice() -> None:
    index = DiskIndex(LAYOUT, 1000)
    units = names(long_key(8))
    file = StoredFile("a", 10, units.names, 0, is_written=False)
    assert index.begin(file) == []
    assert index.find(units, 0) == []
    assert index.missing(units) == []
    index.remove(file)  # it could not be written
    index.check_invariants()
    assert index.missing(units) == [(0, 2)]
    assert index.total_bytes == 0


def test_pages_larger_than_a_block_make_the_unit_a_page() -> None:
    layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, page_size=256)
    assert (layout.unit_tokens, layout.run_units) == (256, 2)
    units = names(long_key(2000), layout)
    assert len(units.names) == 7
    assert [last - first for first, last in DiskIndex(layout, 1000).missing(units)] == [2, 2, 2, 1]


def test_a_prompt_of_2000_tokens_keeps_at_least_nine_tenths_at_every_page_size() -> None:
    for page_size in (1, 2, 4, 8, 16, 32, 64, 128):
        layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, page_size=page_size)
        assert len(names(long_key(2000), layout).names) * layout.unit_tokens >= 0.9 * 2000


def test_the_least_recently_used_file_goes_first() -> None:
    index = DiskIndex(LAYOUT, 30)
    keep(index, long_key(8, first=100))
    keep(index, long_key(8, first=200))
    keep(index, long_key(8, first=300))
    index.use(names(long_key(8, first=100)))
    keep(index, long_key(8, first=400))
    assert [found_tokens(index, long_key(8, first=first)) for first in (100, 200, 300, 400)] == [8, 0, 8, 8]
    assert index.total_bytes == 30


def test_of_a_prefix_its_end_goes_before_its_beginning() -> None:
    index = DiskIndex(LAYOUT, 40)
    for size in (8, 16, 24):  # a conversation that grows: the beginning was written first
        keep(index, long_key(size))
    keep(index, long_key(8, first=500))
    keep(index, long_key(8, first=600))
    assert found_tokens(index, long_key(24)) == 16


def test_files_that_cannot_be_served_count_to_the_bound_and_go_in_their_turn() -> None:
    index = DiskIndex(LAYOUT, 30)
    foreign = StoredFile("foreign", 20, is_written=True)
    assert index.found([foreign]) == []
    keep(index, long_key(8))
    assert keep(index, long_key(8, first=300)) == ["foreign"]
    assert index.total_bytes == 20


def test_a_bad_file_goes_before_all_others() -> None:
    index = DiskIndex(LAYOUT, 30)
    keep(index, long_key(8, first=100))
    keep(index, long_key(8, first=200))
    (part,) = index.find(names(long_key(8, first=200)), 0)
    index.put_away(part.file, "bad")
    index.check_invariants()
    assert found_tokens(index, long_key(8, first=200)) == 0
    keep(index, long_key(8, first=300))
    assert keep(index, long_key(8, first=400)) == ["bad"]
    assert found_tokens(index, long_key(8, first=100)) == 8


def test_more_than_the_bound_is_refused_and_changes_nothing() -> None:
    index = DiskIndex(LAYOUT, 30)
    keep(index, long_key(8))
    assert index.begin(StoredFile("large", 31, is_written=False)) is None
    assert index.begin(StoredFile("a", 20, is_written=False)) == []
    assert (
        index.begin(StoredFile("b", 20, is_written=False)) is None
    )  # what is being written cannot make room
    index.check_invariants()
    assert found_tokens(index, long_key(8)) == 8


def test_a_full_count_of_files_lets_the_oldest_go() -> None:
    index = DiskIndex(LAYOUT, 1000, max_files=2)
    for first in (100, 200, 300):
        keep(index, long_key(4, first=first))
    assert len(index) == 2
    assert found_tokens(index, long_key(4, first=100)) == 0


def test_behind_a_public_boundary_the_tail_has_names_of_its_own() -> None:
    index = DiskIndex(LAYOUT, 1000)
    tokens = long_key(24).tokens
    public = public_boundary(OTHER_NAMESPACE, tokens[: 12 * 4], page_size=2, block_size=4)
    assert public is not None
    mine = public.key(NAMESPACE, tokens)
    runs = [run_of(names(mine), first, last, LAYOUT) for first, last in index.missing(names(mine))]
    keep(index, mine)
    assert [run.namespace for run in runs] == [
        OTHER_NAMESPACE,
        tail_namespace(NAMESPACE, public.fingerprint),
    ]
    assert found_tokens(index, mine) == 24
    assert (
        found_tokens(index, public.key(Namespace(b"x" * 16), tokens)) == 12
    )  # the public part is everybody's
    assert found_tokens(index, RadixKey(NAMESPACE, tokens)) == 0


def test_any_order_of_writes_uses_and_losses_keeps_the_books_and_the_bound() -> None:
    chance = random.Random(7)
    index = DiskIndex(LAYOUT, 120)
    for _ in range(600):
        key = long_key(chance.randrange(4, 60), first=chance.choice((0, 0, 0, 1000)))
        if chance.random() < 0.5:
            keep(index, key, chance.randrange(5, 30))
        elif parts := index.find(names(key), 0):
            file = chance.choice(parts).file
            if chance.random() < 0.5:
                index.remove(file)
            else:
                index.put_away(file, f"{file.name}.bad")
        index.check_invariants()
        assert index.total_bytes <= 120
