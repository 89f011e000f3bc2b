"""Bringing KV from others: whatever a source does, what came before stays, the next source goes on from there, and nothing is left behind."""

import asyncio

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.worker.kv_copies import copier as copier_module
from prefixmesh.worker.kv_copies.copier import MAX_COPIES, Brought
from prefixmesh.worker.kv_copies.transport import CopiedPart
from tests.support.kv_copying import PAGE_BYTES, kv_of, name_of
from tests.support.scripted_copies import OWN, CopierBench, Source
from tests.support.servers import eventually

pytestmark = pytest.mark.asyncio(loop_scope="function")

PROMPT = list(range(100, 120))
SIZE = len(PROMPT)


async def test_a_prefix_comes_part_by_part() -> None:
    bench = CopierBench(a=Source(SIZE))
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme") == Brought(0, SIZE)
    assert bench.cache.read(PROMPT).kv == kv_of(PROMPT)
    assert (bench.books.copied_tokens, bench.books.copied_bytes) == (SIZE, SIZE // 2 * PAGE_BYTES)
    assert bench.books.failed_copies == 0
    bench.check_rest(SIZE)


async def test_only_what_is_missing_is_asked_for_and_nothing_where_nothing_is() -> None:
    source = Source(SIZE)
    bench = CopierBench(a=source)
    bench.cache.compute(PROMPT[:8])
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme") == Brought(8, SIZE - 8)
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme") == Brought(SIZE, 0)
    assert source.asked == [8]
    bench.check_rest(SIZE)


async def test_a_source_that_dies_half_way_is_followed_by_one_that_goes_on_there() -> None:
    first, second = Source(SIZE), Source(SIZE)
    first.dies_after = 2
    bench = CopierBench(a=first, b=second)
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a"), bench.source("b")], "acme")
    assert brought == Brought(0, SIZE)
    assert (first.asked, second.asked) == ([0], [8])
    assert bench.books.failed_copies == 1
    assert bench.cache.read(PROMPT).kv == kv_of(PROMPT)
    bench.check_rest(SIZE)


async def test_what_came_before_the_last_source_died_stays_and_why_it_is_not_all_is_told() -> None:
    source = Source(SIZE)
    source.dies_after = 3
    bench = CopierBench(a=source)
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    assert brought == Brought(0, 12, "a:1: connection reset")
    bench.check_rest(12)


async def test_a_source_that_has_evicted_the_rest_ends_its_stream_well_and_is_no_all() -> None:
    bench = CopierBench(a=Source(8), b=Source(SIZE - 4))
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a"), bench.source("b")], "acme")
    assert brought == Brought(0, SIZE - 4, "b:1 has no more of it")
    assert bench.books.failed_copies == 2
    bench.check_rest(SIZE - 4)


@pytest.mark.parametrize(
    ("field", "garbled"),
    [
        ("part.start_tokens", lambda part: part._replace(start_tokens=part.start_tokens + 2)),
        ("part.tokens", lambda part: part._replace(tokens=part.tokens - 1)),
        ("part.tokens", lambda part: part._replace(tokens=1000)),
        ("part.tokens", lambda part: part._replace(tokens=0)),
        ("part.kv", lambda part: part._replace(kv=part.kv[:-1])),
        ("part.checksum", lambda part: part._replace(kv=bytes([part.kv[0] ^ 1]) + part.kv[1:])),
        ("part.checksum", lambda part: part._replace(checksum=part.checksum ^ 1)),
    ],
)
async def test_a_part_that_is_not_what_it_should_be_is_not_written(field: str, garbled: object) -> None:
    """The third part of the first source. The second source sends it as it is."""
    source = Source(SIZE)

    def garble(part: CopiedPart) -> CopiedPart:
        return garbled(part) if part.start_tokens == 8 else part  # type: ignore[operator]

    source.garble = garble
    bench = CopierBench(a=source, b=Source(SIZE))
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    assert (brought.found, brought.copied) == (0, 8)
    assert brought.problem.startswith(f"a:1: {field}")
    bench.check_rest(8)
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("b")], "acme") == Brought(8, SIZE - 8)
    assert bench.cache.read(PROMPT).kv == kv_of(PROMPT)


async def test_a_source_that_stands_still_is_waited_for_as_long_as_computing_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With patience that is over at once, so that no clock is waited for."""
    source = Source(SIZE)
    source.stalls_after = 2
    bench = CopierBench(a=source)
    monkeypatch.setattr(copier_module, "patience_s", lambda *_: 0.05)
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    assert brought == Brought(0, 8, "the copy took longer than to compute it")
    bench.check_rest(8)


async def test_a_warming_is_patient_but_not_with_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(SIZE)
    source.stalls_after = 1
    bench = CopierBench(ms_per_token=1e-9, a=source, b=Source(SIZE))
    monkeypatch.setattr(copier_module, "PART_WAIT_S", 0.05)
    sources = [bench.source("a"), bench.source("b")]
    assert await bench.copier.bring(name_of(PROMPT), sources, "acme", must=True) == Brought(0, SIZE)
    bench.check_rest(SIZE)


async def test_a_part_that_does_not_come_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(SIZE)
    source.stalls_after = 1
    bench = CopierBench(a=source)
    monkeypatch.setattr(copier_module, "PART_WAIT_S", 0.05)
    alone = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme", must=True)
    assert alone == Brought(0, 4, "a:1: no part came in time")
    bench.check_rest(4)


async def test_whatever_else_a_source_makes_go_wrong_is_its_own() -> None:
    """No request may fail by it: the next source is asked."""
    source = Source(SIZE)

    def garble(part: CopiedPart) -> CopiedPart:
        raise AttributeError("what nobody thought of")

    source.garble = garble
    bench = CopierBench(a=source, b=Source(SIZE))
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme") == Brought(
        0, 0, "a:1: AttributeError"
    )
    sources = [bench.source("a"), bench.source("b")]
    assert await bench.copier.bring(name_of(PROMPT), sources, "acme") == Brought(0, SIZE)
    assert bench.books.failed_copies == 2
    bench.check_rest(SIZE)


async def test_a_request_that_finds_a_warmings_copy_under_way_waits_no_longer_than_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(SIZE)
    source.stalls_after = 2
    bench = CopierBench(a=source)
    wanted = name_of(PROMPT), [bench.source("a")], "acme"
    warming = asyncio.create_task(bench.copier.bring(*wanted, must=True))
    await source.reached.wait()
    monkeypatch.setattr(copier_module, "patience_s", lambda *_: 0.05)
    assert await bench.copier.bring(*wanted) == Brought(0, 8, "the copy took too long")
    assert await bench.copier.bring(*wanted, wait_s=0.0) == Brought(0, 8, "the copy took too long")
    assert source.open == 1
    warming.cancel()
    await asyncio.wait({warming})
    await bench.at_rest()
    bench.check_rest(8)


async def test_who_can_compute_it_sooner_copies_nothing() -> None:
    source = Source(SIZE)
    bench = CopierBench(ms_per_token=1e-9, a=source)
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    assert brought == Brought(0, 0, "to compute it is quicker")
    assert (source.asked, bench.books.unpaid_copies) == ([], 1)
    bench.check_rest(0)


async def test_a_caller_that_leaves_ends_its_copy_at_once() -> None:
    source = Source(SIZE)
    source.stalls_after = 2
    bench = CopierBench(a=source)
    task = asyncio.create_task(bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme"))
    await source.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.at_rest()
    bench.check_rest(8)


async def test_the_last_who_waits_for_a_copy_ends_it() -> None:
    source = Source(SIZE)
    source.stalls_after = 2
    bench = CopierBench(a=source)
    wanted = name_of(PROMPT), [bench.source("a")], "acme"
    tasks = [asyncio.create_task(bench.copier.bring(*wanted)) for _ in range(3)]
    await source.reached.wait()
    assert source.asked == [0]
    for task in tasks[:2]:
        task.cancel()
        await asyncio.wait({task})
        assert source.open == 1
    assert await bench.copier.bring(*wanted, wait_s=0.0) == Brought(0, 8, "the copy took too long")
    assert source.open == 1
    tasks[2].cancel()
    await asyncio.wait(tasks)
    await bench.at_rest()
    bench.check_rest(8)


async def test_what_is_evicted_meanwhile_ends_the_copy() -> None:
    bench = CopierBench(a=Source(SIZE), b=Source(SIZE))
    written = 0

    def evict() -> None:
        nonlocal written
        written += 1
        if written == 3:
            bench.cache.cache.evict(2)

    bench.engine.before_write = evict
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a"), bench.source("b")], "acme")
    assert brought.problem == "this worker has no room for it, or gave up meanwhile what came before"
    assert bench.transport.sources["b:1"].asked == []
    bench.check_rest(4)


@pytest.mark.parametrize("parts_before", [0, 1])
async def test_nothing_of_a_copy_that_began_before_a_flush_comes_after_it(parts_before: int) -> None:
    """Also of its first part, which no gap would keep out: a flush is to forget what was computed before, here and elsewhere."""
    bench = CopierBench(a=Source(SIZE))
    written = 0

    def flush() -> None:
        nonlocal written
        if written == parts_before:
            bench.cache.kv.flush()
        written += 1

    bench.engine.before_write = flush
    brought = await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    assert brought.problem == "this worker has no room for it, or gave up meanwhile what came before"
    bench.check_rest(0)
    assert await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme") == Brought(0, SIZE)


async def test_where_there_is_no_room_it_ends_and_the_next_source_is_not_asked() -> None:
    bench = CopierBench(pages=5, a=Source(SIZE), b=Source(SIZE))
    for ids in (PROMPT, PROMPT[::-1]):
        brought = await bench.copier.bring(name_of(ids), [bench.source("a"), bench.source("b")], "acme")
        assert brought.copied == 8
        assert "no room" in brought.problem
    assert bench.transport.sources["b:1"].asked == []
    bench.check_rest(10)


async def test_a_worker_never_asks_itself_nor_more_than_a_few() -> None:
    sources = {name: Source(0) for name in "abcdef"}
    bench = CopierBench(**sources)  # type: ignore[arg-type]
    named = [
        bench.source("a", incarnation=OWN),
        bench.source("b"),
        bench.source("b"),
        bench.source("c", tokens=0),
    ]
    named += [bench.source(name) for name in "def"]
    brought = await bench.copier.bring(name_of(PROMPT), named, "acme", must=True)
    assert brought.copied == 0
    assert {name: len(source.asked) for name, source in sources.items()} == dict(
        zip("abcdef", (0, 1, 0, 1, 1, 1), strict=True)
    )
    bench.check_rest(0)


async def test_more_copies_than_a_worker_makes_at_once_are_computed_and_warmings_wait() -> None:
    source = Source(SIZE)
    source.stalls_after = 0
    bench = CopierBench(a=source, b=Source(SIZE))
    prompts = [[number, *PROMPT[1:]] for number in range(MAX_COPIES)]
    tasks = [
        asyncio.create_task(bench.copier.bring(name_of(ids), [bench.source("a")], "acme")) for ids in prompts
    ]
    await eventually(lambda: source.open == MAX_COPIES)
    refused = await bench.copier.bring(name_of(PROMPT), [bench.source("b")], "acme")
    assert refused.problem == f"{MAX_COPIES} copies are under way here, which is the limit"
    waiting = asyncio.create_task(bench.copier.bring(name_of(PROMPT), [bench.source("b")], "acme", must=True))
    await asyncio.sleep(0)
    assert bench.transport.sources["b:1"].asked == []
    tasks[0].cancel()
    assert await waiting == Brought(0, SIZE)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await bench.at_rest()
    bench.check_rest(SIZE)


async def test_a_worker_that_stops_ends_its_copies_and_tells_who_waits() -> None:
    source = Source(SIZE)
    source.stalls_after = 1
    bench = CopierBench(a=source)
    task = asyncio.create_task(bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme"))
    await source.reached.wait()
    await bench.copier.close()
    assert await task == Brought(0, 4, "the worker is stopping")
    assert (await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")).copied == 0
    assert bench.transport.closed
    bench.check_rest(4)


async def test_an_engine_that_is_gone_is_the_callers_error() -> None:
    bench = CopierBench(a=Source(SIZE))
    bench.engine.gone = True
    with pytest.raises(UnavailableError):
        await bench.copier.bring(name_of(PROMPT), [bench.source("a")], "acme")
    bench.engine.gone = False
    bench.check_rest(0)
