"""KV that is read from one cache and written to another: equal bytes, whole pages, and nothing held when it ends, however it ends."""

import pytest

from prefixmesh.cache.owners import Quota
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.tokens import pack
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_desk import MAX_WAITING_PARTS, KvDesk
from prefixmesh.worker.messages import TokensOut
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixName, ReadKv, WriteKv
from tests.support.cache_kit import key_of
from tests.support.kv_copying import PAGE, PAGE_BYTES, CopyBench, PagesOfBytes, kv_of, name_of
from tests.support.scheduling import ENGINE_INFO, NAMESPACE_A, Bench, submit_command

PROMPT = list(range(100, 112))


def test_what_one_cache_reads_another_writes_part_by_part() -> None:
    holder, taker = CopyBench(), CopyBench()
    holder.compute([*PROMPT, 7, 7])
    at = 0
    while at < len(PROMPT):
        read = holder.read(PROMPT, at, max_pages=2)
        assert read.held_tokens == len(PROMPT)
        end = at + len(read.kv) // PAGE_BYTES * PAGE
        assert taker.write(PROMPT[:end], at, read.kv).held_tokens == end
        at = end
    assert taker.read(PROMPT).kv == holder.read(PROMPT).kv == kv_of(PROMPT)
    assert holder.read(PROMPT, len(PROMPT)).kv == b""
    assert taker.cache.evictable_pages == len(PROMPT) // PAGE


def test_nothing_is_there_of_another_namespace_or_of_other_tokens() -> None:
    holder = CopyBench()
    holder.compute(PROMPT)
    assert holder.read([*PROMPT[:5], 1, 1]).held_tokens == 4
    other = name_of(PROMPT)
    answer = holder.ask(
        ReadKv(
            question=3,
            prefix=type(other)(b"b" * 16, other.tokens),
            start_tokens=0,
            max_bytes=PAGE_BYTES,
        )
    )
    assert answer.read is not None
    assert (answer.read.held_tokens, answer.read.kv) == (0, b"")


def test_what_is_there_is_told_without_a_use_and_without_a_turn() -> None:
    bench = CopyBench()
    bench.compute(PROMPT[:6])
    before = bench.cache.render()
    answer = bench.desk.take(WriteKv(question=4, prefix=name_of(PROMPT), start_tokens=0), 9.0)
    assert answer is not None
    assert answer.written is not None
    assert answer.written.held_tokens == 6
    assert bench.cache.render() == before
    assert not bench.desk.has_work


def test_a_part_behind_a_gap_is_not_written_and_the_writer_learns_where_the_gap_is() -> None:
    bench = CopyBench()
    bench.compute(PROMPT[:4])
    assert bench.write(PROMPT, 6, kv_of(PROMPT)[3 * PAGE_BYTES :]).held_tokens == 4
    assert bench.bytes.writes == 0


def test_what_is_there_already_is_not_written_again() -> None:
    bench = CopyBench()
    bench.compute(PROMPT)
    pages = bench.cache.owned_pages().tolist()
    assert bench.write(PROMPT, 4, b"\0" * len(kv_of(PROMPT[4:]))).held_tokens == len(PROMPT)
    assert bench.bytes.writes == 0
    assert bench.cache.owned_pages().tolist() == pages


def test_of_a_part_whose_beginning_is_there_only_the_rest_is_written() -> None:
    """Somebody computed it meanwhile."""
    bench = CopyBench()
    bench.compute(PROMPT[:8])
    kv = kv_of(PROMPT)
    assert bench.write(PROMPT, 4, b"\0" * 2 * PAGE_BYTES + kv[4 * PAGE_BYTES :]).held_tokens == len(PROMPT)
    assert bench.read(PROMPT).kv == kv


def test_room_is_made_by_evicting_what_was_used_longest_ago_and_never_what_comes_before() -> None:
    bench = CopyBench(pages=6)
    bench.compute(PROMPT[:4])
    bench.compute([1] * 8)
    assert bench.write(PROMPT, 4, kv_of(PROMPT)[2 * PAGE_BYTES :]).held_tokens == len(PROMPT)
    assert bench.read(PROMPT).kv == kv_of(PROMPT)
    assert bench.read([1] * 8).held_tokens == 0


def test_what_is_found_is_not_given_up_for_what_comes_behind_it() -> None:
    """Four pages are wanted behind two, in a pool of five."""
    bench = CopyBench(pages=5)
    bench.compute(PROMPT[:4])
    assert bench.write(PROMPT, 4, kv_of(PROMPT)[2 * PAGE_BYTES :]).held_tokens == 4
    assert bench.read(PROMPT).kv == kv_of(PROMPT[:4])


def test_what_others_hold_is_not_taken_and_nothing_is_evicted_in_vain() -> None:
    """Two pages are locked, as by a running request, and two could go: not enough for three."""
    bench = CopyBench(pages=4)
    bench.compute([1] * 4)
    receipt = bench.cache.lock(bench.cache.match_prefix(key_of([1] * 4), 5.0).last_device_node)
    bench.compute([2] * 4)
    assert bench.write(PROMPT[:6], 0, kv_of(PROMPT[:6])).held_tokens == 0
    assert bench.read([2] * 4).held_tokens == 4
    assert bench.write(PROMPT[:4], 0, kv_of(PROMPT[:4])).held_tokens == 4
    assert bench.read([1] * 4).held_tokens == 4
    bench.cache.release(receipt)


def test_the_owner_pays_and_others_floors_are_kept() -> None:
    bench = CopyBench(pages=4, quotas={"acme": Quota(floor_pages=2)})
    bench.compute([1] * 4, owner="acme")
    bench.compute([2] * 4)
    assert bench.write(PROMPT[:6], 0, kv_of(PROMPT[:6]), owner="other").held_tokens == 0
    assert bench.write(PROMPT[:4], 0, kv_of(PROMPT[:4]), owner="other").held_tokens == 4
    assert bench.read([1] * 4).held_tokens == 4
    assert bench.read([2] * 4).held_tokens == 0


def test_a_pin_that_waits_for_a_prefix_holds_it_once_it_is_written() -> None:
    bench = CopyBench()
    bench.cache.pins.add(key_of(PROMPT), "acme", 0.0)
    bench.write(PROMPT, 0, kv_of(PROMPT), owner="acme")
    assert bench.cache.pinned_pages == len(PROMPT) // PAGE
    assert bench.cache.evictable_pages == 0


def test_pages_go_back_when_their_bytes_cannot_be_written() -> None:
    bench = CopyBench()
    bench.compute(PROMPT[:4])
    bench.bytes.failing = True
    answer = bench.ask(
        WriteKv(question=5, prefix=name_of(PROMPT), start_tokens=4, kv=kv_of(PROMPT)[2 * PAGE_BYTES :])
    )
    assert (answer.error, answer.problem) == ("failed", "RuntimeError")
    assert bench.allocator.free_pages == 18
    assert bench.cache.evictable_pages == 2
    bench.bytes.failing = False
    assert bench.write(PROMPT, 4, kv_of(PROMPT)[2 * PAGE_BYTES :]).held_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("start", "tokens", "kv", "field"),
    [
        (1, PROMPT, b"\0" * PAGE_BYTES, "start_tokens"),
        (-2, PROMPT, b"\0" * PAGE_BYTES, "start_tokens"),
        (0, PROMPT[:3], b"\0" * PAGE_BYTES, "prefix.token_ids"),
        (0, PROMPT[:2], b"\0" * (PAGE_BYTES + 1), "kv"),
        (4, PROMPT[:2], b"\0" * PAGE_BYTES, "kv"),
    ],
)
def test_what_is_not_whole_pages_of_the_prefix_is_refused(
    start: int, tokens: list[int], kv: bytes, field: str
) -> None:
    bench = CopyBench()
    answer = bench.ask(WriteKv(question=6, prefix=name_of(tokens), start_tokens=start, kv=kv))
    assert (answer.error, answer.field) == ("invalid", field)
    assert bench.allocator.free_pages == 20


def test_a_boundary_where_the_tree_cannot_divide_is_refused() -> None:
    bench = CopyBench()
    plain = name_of(PROMPT)
    odd = type(plain)(plain.namespace, plain.tokens, 3, b"t" * 16)
    for kv in (b"", kv_of(PROMPT)):
        answer = bench.ask(WriteKv(question=7, prefix=odd, start_tokens=0, kv=kv))
        assert (answer.error, answer.field) == ("invalid", "boundary_tokens")


def test_a_tail_behind_a_public_prefix_is_copied_into_its_own_namespace() -> None:
    holder, taker = CopyBench(), CopyBench()
    plain = name_of(PROMPT)
    behind = type(plain)(plain.namespace, plain.tokens, 4, b"t" * 16)
    kv = kv_of(PROMPT)
    for bench in (holder, taker):
        written = bench.ask(WriteKv(question=8, prefix=behind, start_tokens=0, kv=kv)).written
        assert written is not None
        assert written.held_tokens == len(PROMPT)
        kv_read = bench.ask(ReadKv(question=9, prefix=behind, start_tokens=4, max_bytes=1000)).read
        assert kv_read is not None
        kv_tail = kv_read.kv
        assert kv_tail == kv[2 * PAGE_BYTES :]
        assert bench.read(PROMPT).held_tokens == 4


def test_what_only_the_host_has_is_read_from_there() -> None:
    bench = CopyBench(host_pages=10)
    bench.compute(PROMPT)
    copy = bench.cache.transfers.begin_offload(bench.cache.match_prefix(key_of(PROMPT), 3.0).last_device_node)
    assert copy is not None
    for device, host in zip(copy.device_pages.tolist(), copy.host_pages.tolist(), strict=True):
        bench.bytes.host[host] = bench.bytes.device[device]
    bench.cache.transfers.finish_offload(copy)
    bench.cache.evict(4)
    for start in range(0, len(PROMPT), PAGE):
        for pages in (1, 3, 100):
            read = bench.read(PROMPT, start, pages)
            assert read.held_tokens == len(PROMPT)
            assert read.kv == kv_of(PROMPT)[start // PAGE * PAGE_BYTES :][: pages * PAGE_BYTES]
    told = bench.ask(WriteKv(question=1, prefix=name_of(PROMPT), start_tokens=0)).written
    assert told is not None
    assert (told.held_tokens, told.host_tokens) == (4, 8)


def test_a_read_is_a_use() -> None:
    bench = CopyBench(pages=4)
    bench.compute([1] * 4)
    bench.compute([2] * 4)
    bench.read([1] * 4)
    bench.compute([3] * 4)
    assert bench.read([1] * 4).held_tokens == 4


def test_a_copy_is_no_hit_at_either_end_however_many_parts_it_has() -> None:
    """Hits say what prompts have found: what is handed over, and which second hit is backed up, goes by them."""
    holder, taker = CopyBench(), CopyBench()
    holder.compute(PROMPT)
    for end in range(PAGE, len(PROMPT) + 1, PAGE):
        taker.write(PROMPT[:end], end - PAGE, holder.read(PROMPT, end - PAGE, max_pages=1).kv)
    for bench in (holder, taker):
        assert not bench.cache.hot_prefixes(bench.now, max_prefixes=9, max_tokens=99)
        assert bench.cache.match_prefix(key_of(PROMPT), bench.now).matched_tokens == len(PROMPT)
        (hot,) = bench.cache.hot_prefixes(bench.now, max_prefixes=9, max_tokens=99)
        assert hot.hits == 1


def test_parts_wait_for_their_turns_and_no_more_than_a_bound() -> None:
    bench = CopyBench()
    for number in range(MAX_WAITING_PARTS):
        part = ReadKv(question=number, prefix=name_of(PROMPT), start_tokens=0, max_bytes=8)
        assert bench.desk.take(part, 0.0) is None
    refused = bench.desk.take(ReadKv(question=99, prefix=name_of(PROMPT), start_tokens=0, max_bytes=8), 0.0)
    assert refused is not None
    assert (refused.question, refused.error) == (99, "over_budget")
    assert [bench.desk.turn(0.0).question for _ in range(MAX_WAITING_PARTS)] == list(range(MAX_WAITING_PARTS))
    assert not bench.desk.has_work


def test_a_stream_of_parts_holds_up_no_answer_by_more_than_one_part_a_step() -> None:
    """Ten parts to be read come at once, while an answer is decoded: each step gives a token, and reads one of them."""
    bench = Bench()
    cache = bench.cache
    assert isinstance(cache, RadixCache)
    store = PagesOfBytes(CopyLayout(dtype="float16", layers=1, kv_heads=1, head_dim=1, page_size=1))
    store.device = dict.fromkeys(range(64), b"\x00" * 4)
    desk = KvDesk(cache, bench.scheduler.kv, store)
    core = EngineCore(info=ENGINE_INFO, scheduler=bench.scheduler, runner=bench.model, copies=desk)
    core.handle(submit_command("r", [5, 6, 7], max_tokens=20), 0.0)
    core.step(0.0)
    for number in range(10):
        part = ReadKv(
            question=number, prefix=PrefixName(NAMESPACE_A, pack([5, 6, 7])), start_tokens=0, max_bytes=8
        )
        assert core.handle(part, 0.0) == []
    for number in range(10):
        told = core.step(0.0)
        assert [event.question for event in told if isinstance(event, PrefixAnswer)] == [number]
        assert sum(len(event.token_ids) for event in told if isinstance(event, TokensOut)) == 1
    while is_busy(core):
        core.step(0.0)
    core.handle(
        ReadKv(question=10, prefix=PrefixName(NAMESPACE_A, pack([5])), start_tokens=0, max_bytes=4), 0.0
    )
    assert is_busy(core)
    assert [event for event in core.step(0.0) if isinstance(event, PrefixAnswer)]
    assert not is_busy(core)


def is_busy(core: EngineCore) -> bool:
    """Whether its loop would step."""
    return core.has_work


def test_what_is_copied_takes_no_page_from_who_runs() -> None:
    """A pool of 24 pages: 8 a request runs in, and all others are filled with copies while it grows by 15. It never gives way."""
    bench = Bench(total_pages=24)
    cache = bench.cache
    assert isinstance(cache, RadixCache)
    store = PagesOfBytes(CopyLayout(dtype="float16", layers=1, kv_heads=1, head_dim=1, page_size=1))
    desk = KvDesk(cache, bench.scheduler.kv, store)
    core = EngineCore(info=ENGINE_INFO, scheduler=bench.scheduler, runner=bench.model, copies=desk)
    core.handle(submit_command("r", list(range(8)), max_tokens=15), 0.0)
    number = 0
    while bench.scheduler.has_work:
        number += 1
        ids = [30 + number % 60, *range(20, 23)]
        core.handle(
            WriteKv(
                question=number, prefix=PrefixName(NAMESPACE_A, pack(ids)), start_tokens=0, kv=b"\0" * 16
            ),
            0.0,
        )
        core.step(0.0)
        core.check_invariants()
    assert bench.scheduler.preemptions == 0
    assert store.writes > 10
