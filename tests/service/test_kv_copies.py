"""KV copied between two workers through their sockets: the same bytes, the same answers, and whatever goes wrong is computed."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prefixmesh.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OtherKvError,
    OverloadedError,
    PrefixmeshError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from prefixmesh.worker import read_prefix
from prefixmesh.worker.kv_copies import choice, parts
from tests.support.copying_workers import (
    TOKEN_KV,
    ask,
    copier,
    fleet,
    holder_process,
    kv_of,
    pages_of,
    prefix,
    read,
    read_request,
    source,
    two_workers,
)
from tests.support.servers import Worker, eventually
from tests.support.silent_proxy import proxy_before

pytestmark = pytest.mark.asyncio(loop_scope="function")

PROMPT = [3 + i * 7 % 400 for i in range(200)]
OTHER = [5 + i * 11 % 400 for i in range(200)]
SMALL_PARTS = 16
"""Tokens in a part, where a test wants several."""


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is tiny: to compute it would be quicker. Nor is a loaded machine to give up."""
    monkeypatch.setattr(choice, "BEGIN_MS", -1e9)
    monkeypatch.setattr(choice, "LEAST_PATIENCE_MS", 60_000.0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is ``SMALL_PARTS`` pages: of the tiny model, 512 bytes a token."""
    monkeypatch.setattr(parts, "PART_BYTES", SMALL_PARTS * TOKEN_KV)


async def refusal_of(
    worker: Worker, request: control.ReadPrefixRequest, metadata: Any = None
) -> PrefixmeshError:
    call = worker.control.ReadPrefix(
        request, metadata=worker.control_metadata() if metadata is None else metadata
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def test_a_request_whose_ticket_names_a_holder_computes_only_what_that_has_not(
    tiny_model_folder: Path,
) -> None:
    async with two_workers(tiny_model_folder) as (holder, taker):
        computed = await ask(holder, PROMPT)
        copied = await ask(taker, PROMPT, source(holder, len(PROMPT)))
        assert copied.token_ids == computed.token_ids
        for told in (copied.started.cached_tokens, copied.finished.usage.cached_tokens):
            assert (told.device, told.host, told.disk, told.peer) == (0, 0, 0, len(PROMPT) - 1)
        assert await kv_of(taker, PROMPT) == await kv_of(holder, PROMPT)
        again = await ask(taker, PROMPT, source(holder, len(PROMPT)), number=1)
        assert (again.started.cached_tokens.device, again.started.cached_tokens.peer) == (len(PROMPT) - 1, 0)


async def test_both_sides_tell_what_was_copied_and_given(tiny_model_folder: Path, small_parts: None) -> None:
    async with two_workers(tiny_model_folder) as (holder, taker):
        await ask(holder, PROMPT)
        await ask(taker, PROMPT, source(holder, len(PROMPT)))
        size = len(PROMPT) - 1
        metadata = holder.control_metadata()
        gave = (await holder.control.Describe(control.DescribeRequest(), metadata=metadata)).copies
        took = (await taker.control.Describe(control.DescribeRequest(), metadata=metadata)).copies
        assert (gave.given_tokens, gave.given_bytes, gave.copied_tokens) == (size, size * TOKEN_KV, 0)
        assert (took.copied_tokens, took.copied_bytes, took.given_tokens) == (size, size * TOKEN_KV, 0)
        assert (took.failed_copies, took.copying) == (0, 0)


async def test_the_parts_of_a_stream_follow_each_other_and_can_be_asked_for_from_any_page_on(
    tiny_model_folder: Path, small_parts: None
) -> None:
    async with fleet(tiny_model_folder, [{"page_size": 4}]) as (holder,):
        await ask(holder, PROMPT)
        header, *sent = await read(holder, [*PROMPT, 1, 2, 3])
        told = header.header
        assert (told.held_tokens, told.layout.page_size, told.incarnation) == (
            200,
            4,
            holder.bound.incarnation,
        )
        at = 0
        for message in sent:
            part = message.part
            assert part.start_tokens == at
            at += part.tokens
            assert part.checksum == parts.checksum(pack(PROMPT), at, part.kv)
            assert len(part.kv) == part.tokens * TOKEN_KV
        assert at == len(PROMPT)
        assert len(sent) == 13
        _, *later = await read(holder, PROMPT, 160)
        assert (
            b"".join(one.part.kv for one in later) == b"".join(one.part.kv for one in sent)[160 * TOKEN_KV :]
        )


async def test_what_is_not_the_same_kv_is_refused_before_a_byte_is_sent(tiny_model_folder: Path) -> None:
    async with two_workers(tiny_model_folder, page_size=4) as (holder, _):
        await ask(holder, PROMPT)
        others: tuple[dict[str, Any], ...] = (
            {"model_revision": "other"},
            {"layout_digest": "other"},
            {"incarnation": holder.bound.incarnation ^ 1},
        )
        for wrong in others:
            error = await refusal_of(holder, await read_request(holder, PROMPT, **wrong))
            assert isinstance(error, OtherKvError), error
        malformed: tuple[tuple[dict[str, Any], str], ...] = (
            ({"start_tokens": 2}, "start_tokens"),
            ({"start_tokens": -4}, "start_tokens"),
            ({"start_tokens": 200}, "start_tokens"),
            ({"prefix": control.Prefix(namespace=b"short", token_ids=pack(PROMPT))}, "prefix.namespace"),
            ({"prefix": control.Prefix(namespace=b"n" * 16, token_ids=b"abc")}, "prefix.token_ids"),
        )
        for wrong, field in malformed:
            error = await refusal_of(holder, await read_request(holder, PROMPT, **wrong))
            assert isinstance(error, InvalidRequestError), error
            assert error.field == field
        error = await refusal_of(holder, await read_request(holder, PROMPT), metadata=())
        assert isinstance(error, AuthenticationError)


async def test_more_readers_than_a_worker_takes_are_sent_away(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_prefix, "MAX_READERS", 0)
    async with two_workers(tiny_model_folder) as (holder, taker):
        computed = await ask(holder, PROMPT)
        assert isinstance(await refusal_of(holder, await read_request(holder, PROMPT)), OverloadedError)
        answer = await ask(taker, PROMPT, source(holder))
        assert (answer.token_ids, answer.started.cached_tokens.peer) == (computed.token_ids, 0)


async def test_a_draining_worker_gives_what_it_has(tiny_model_folder: Path) -> None:
    """That is what its drain waits for."""
    async with two_workers(tiny_model_folder) as (holder, taker):
        await ask(holder, PROMPT)
        await holder.control.Drain(control.DrainRequest(), metadata=holder.control_metadata())
        answer = await ask(taker, PROMPT, source(holder))
        assert answer.started.cached_tokens.peer == len(PROMPT) - 1


async def test_a_holder_of_another_layout_gives_nothing_and_the_request_is_computed(
    tiny_model_folder: Path,
) -> None:
    async with fleet(tiny_model_folder, [{"page_size": 4}, {}]) as (holder, taker):
        computed = await ask(holder, PROMPT)
        brought = await copier(taker).bring(prefix(PROMPT), [source(holder)], "acme")
        assert "KV lies otherwise here" in brought.problem
        answer = await ask(taker, PROMPT, source(holder))
        assert (answer.token_ids, answer.started.cached_tokens.peer) == (computed.token_ids, 0)
        assert (await pages_of(taker))[2] == 0


async def test_sources_that_are_gone_or_hold_less_are_followed_by_the_next(tiny_model_folder: Path) -> None:
    """A life that is over, an address where nobody is, one that has half, and one that has all."""
    async with fleet(tiny_model_folder, [{}, {}, {}]) as (half, whole, taker):
        await ask(half, PROMPT[:100], max_tokens=0)
        await ask(whole, PROMPT, max_tokens=0)
        sources = [
            source(whole, incarnation=1),
            source(half, address="127.0.0.1:1"),
            source(half),
            source(whole, address=f"localhost:{whole.bound.port}"),
        ]
        brought = await copier(taker).bring(prefix(PROMPT), sources, "acme")
        assert brought == (0, len(PROMPT), "")
        books = taker.server._copies
        assert (books.copied_tokens, books.failed_copies) == (len(PROMPT), 3)
        assert half.server._copies.given_tokens == 100
        assert whole.server._copies.given_tokens == 100


async def test_one_copy_of_a_prefix_is_under_way_at_a_time(tiny_model_folder: Path) -> None:
    async with two_workers(tiny_model_folder) as (holder, taker):
        await ask(holder, PROMPT, max_tokens=0)
        answers = await asyncio.gather(
            *(ask(taker, PROMPT, source(holder, len(PROMPT)), number=number) for number in range(4))
        )
        assert {answer.started.cached_tokens.peer for answer in answers} == {len(PROMPT) - 1}
        assert taker.server._copies.copied_tokens == len(PROMPT) - 1
        assert not len(copier(taker))


async def test_an_abort_or_a_caller_that_leaves_ends_the_wait_for_a_copy_at_once(
    tiny_model_folder: Path,
) -> None:
    """The holder stands still behind a proxy; the taker has nothing to compute yet, and nothing afterwards."""
    async with two_workers(tiny_model_folder) as (holder, taker), proxy_before(holder.bound.address) as proxy:
        await ask(holder, PROMPT, max_tokens=0)
        free = await pages_of(taker)
        proxy.stall()
        stalled = source(holder, len(PROMPT), address=proxy.address)
        aborted = asyncio.create_task(ask(taker, PROMPT, stalled))
        await eventually(lambda: taker.server._copies.copying)
        ticket = taker.ticket(request_id="r-0")
        await taker.inference.Abort(pb.AbortRequest(request_id="r-0"), metadata=ticket)
        with pytest.raises(CancelledError):
            await aborted
        left = asyncio.create_task(ask(taker, PROMPT, stalled, number=1))
        await eventually(lambda: taker.server._copies.copying)
        left.cancel()
        await eventually(lambda: not taker.server._copies.copying and not len(taker.server._calls))
        assert not len(copier(taker))
        assert await pages_of(taker) == free


async def test_an_abort_while_a_prompt_is_built_is_not_lost(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied yet, and the engine does not know the request: it never will."""
    async with fleet(tiny_model_folder, [{}]) as (taker,):
        inference = taker.server._inference
        assert inference is not None
        build, reached, goes_on = inference._build, asyncio.Event(), asyncio.Event()

        async def slow_build(*prompt: Any) -> Any:
            reached.set()
            await goes_on.wait()
            return await build(*prompt)

        monkeypatch.setattr(inference, "_build", slow_build)
        aborted = asyncio.create_task(ask(taker, PROMPT))
        await reached.wait()
        for tenant in ("other", "acme"):
            ticket = taker.ticket(request_id="r-0", tenant=tenant)
            await taker.inference.Abort(pb.AbortRequest(request_id="r-0"), metadata=ticket)
        goes_on.set()
        with pytest.raises(CancelledError):
            await aborted
        assert (await taker.server._engine.stats()).steps == 0


async def test_a_request_whose_deadline_passes_while_it_is_copied_ends_by_it(tiny_model_folder: Path) -> None:
    async with two_workers(tiny_model_folder) as (holder, taker), proxy_before(holder.bound.address) as proxy:
        await ask(holder, PROMPT, max_tokens=0)
        proxy.stall()
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(PROMPT)))
        ticket = taker.ticket(sources=(source(holder, address=proxy.address),))
        with pytest.raises(DeadlineError):
            await taker.generate(request, ticket, timeout_s=0.2)
        await eventually(lambda: not len(copier(taker)) and not len(taker.server._calls))


async def test_no_count_is_off_after_copies_that_were_cut_at_any_part(
    tiny_model_folder: Path, small_parts: None
) -> None:
    """F12, F19: callers that leave while their copies are anywhere; then the pages add up, and an answer is what it was."""
    async with two_workers(tiny_model_folder) as (holder, taker):
        computed = await ask(holder, PROMPT)
        for number in range(30):
            call = asyncio.create_task(ask(taker, PROMPT, source(holder, len(PROMPT)), number=number))
            for _ in range(number * 3):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            await eventually(lambda: not len(copier(taker)) and not len(taker.server._calls))
            await taker.control.Flush(control.FlushRequest(), metadata=taker.control_metadata())
        free, evictable, protected = await pages_of(taker)
        assert (free, evictable, protected) == (4096, 0, 0)
        assert (await ask(taker, PROMPT, source(holder), number=99)).token_ids == computed.token_ids
        await eventually(lambda: not holder.server._copies.giving)


@pytest.mark.slow
async def test_a_holder_that_is_killed_half_way_leaves_a_request_that_is_computed(
    tiny_model_folder: Path,
) -> None:
    """A process, killed between two parts. What came is used, the rest computed, the answer the same, and every page comes back."""
    async with (
        two_workers(tiny_model_folder) as (other, taker),
        holder_process(tiny_model_folder, taker.secret, SMALL_PARTS * TOKEN_KV) as holder,
    ):
        computed = await ask(other, PROMPT)
        await holder.warm(PROMPT)
        asked = asyncio.create_task(ask(taker, PROMPT, holder.source(len(PROMPT))))
        await eventually(lambda: taker.server._copies.copied_tokens)
        holder.kill()
        answer = await asked
        assert answer.token_ids == computed.token_ids
        assert 0 < answer.started.cached_tokens.peer < len(PROMPT) - 1
        assert taker.server._copies.failed_copies == 1
        assert not len(copier(taker))
        await taker.control.Flush(control.FlushRequest(), metadata=taker.control_metadata())
        assert await pages_of(taker) == (4096, 0, 0)
