"""Workers with a host tier behind a real router: what is demoted is matched there, loaded back by its rate, counted and shown."""

import dataclasses
from typing import Any

import pytest

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cache.tier import Tier
from prefixmesh.cli import explain, status
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.router.worker_view import Trust
from prefixmesh.worker_report import PagePool
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

PROMPT = token_request([7] * 300)
BLOCKS, HELD = 4, 256
PREFILL_MS, LOAD_BACK_MS = 0.5, 0.03125
HOST = PagePool(total_pages=4000, free_pages=3000, evictable_pages=900, protected_pages=100)


def has_host_tier(worker: FakeWorker) -> None:
    """From its next report on, and when it is asked."""
    worker.told.host_pool = HOST
    worker.told.rates = {
        "prefill_ms_per_token": PREFILL_MS,
        "decode_step_ms": 30.0,
        "load_back_ms_per_token": LOAD_BACK_MS,
    }
    worker.told._wake()


def held(router: Router, index: int, tier: Tier) -> int:
    """Blocks of a worker that the router knows to be there, once its view is proved."""
    worker = router.workers[index]
    (followed,) = (one for endpoint, one in router.server.core.view if endpoint == worker.address)
    return followed.view.state(tier).count if followed.trust is Trust.EXACT else -1


async def explained(router: Router) -> router_pb2.ExplainResponse:
    stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
    told: router_pb2.ExplainResponse = await stub.Explain(router_pb2.ExplainRequest(request=PROMPT))
    return told


async def demoted(router: Router) -> int:
    """A worker that has computed the prompt, and has it on its host alone; all workers have host tiers. Its number."""
    for worker in router.workers:
        has_host_tier(worker)
    await router.generate(PROMPT)
    (index,) = (number for number, worker in enumerate(router.workers) if worker.received)
    router.workers[index].told.demote()
    await eventually(
        lambda: held(router, index, Tier.DEVICE) == 0 and held(router, index, Tier.HOST) == BLOCKS
    )
    await eventually(lambda: len(router.server.core.view.predictions) == 0)
    await eventually(
        lambda: all(
            entry.report is not None and entry.report.load_back_ms_per_token
            for entry in router.server.core.registry
        )
    )
    return index


async def test_demoted_prompt_goes_back_to_its_holder_and_counts_as_predicted() -> None:
    script = Script(found_on_host=True)
    async with running_router(3, script=script) as router:
        index = await demoted(router)
        told = await explained(router)
        by_id = {one.worker_id: one for one in told.candidates}
        holder = by_id[router.workers[index].worker_id]
        assert told.chosen == holder.worker_id
        assert (holder.device_tokens, holder.host_tokens, holder.counted_tokens) == (0, HELD, HELD)
        assert holder.load_back_ms == pytest.approx(HELD * LOAD_BACK_MS)
        assert holder.prefill_ms == pytest.approx((300 - HELD) * PREFILL_MS)
        others = [one for one in told.candidates if one is not holder]
        assert [(one.host_tokens, one.load_back_ms) for one in others] == [(0, 0.0)] * 2
        assert all(one.total_ms > holder.total_ms for one in others)
        answer = await router.generate(PROMPT)
        assert answer.started.worker_id == holder.worker_id
        assert answer.started.routing.predicted_cached_tokens == HELD
        # The fake's cache has all but the last token, which is no whole block.
        assert (answer.started.cached_tokens.device, answer.started.cached_tokens.host) == (0, 299)
        view = (await router.list_workers())[index]
        assert (view.prompt_tokens, view.cached_tokens) == (600, 299)
        router.server.core.check_invariants()


async def test_explain_shows_the_hosts_part_of_a_match(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_router(2) as router:
        index = await demoted(router)
        explain._print(await explained(router))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (names,) = (line for line in lines if line[:1] == ["worker"])
    assert names[:5] == ["worker", "trust", "device", "host", "counted"]
    (row,) = (line for line in lines if line[:1] == ["*"])
    assert row[1:6] == [f"w{index}", "exact", "0", f"{HELD}", f"{HELD}"]


async def test_status_shows_a_host_tier_and_who_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Its size and use, what it found of all that was asked for, what moved; a worker without one, or of an earlier version, has a dash."""
    row = LedgerRow(2, 400, Hits(device=100, host=50, disk=20), Misses(never_seen=230))
    moved = control.TierCounts(backed_up_tokens=640, loaded_back_tokens=320, disk_bytes=7)
    async with running_router(2) as router:
        worker = router.workers[0]
        worker.script = Script(tiers=moved, counts=encode_cache_counts(row))
        await worker.restart()
        has_host_tier(worker)

        async def is_told() -> bool:
            views = await router.list_workers()
            return views[0].HasField("tiers") and views[0].load_back_ms_per_token > 0

        await eventually(is_told)
        # Reports are newer than what it said when it was asked.
        worker.script.before_describe.shut()
        worker.told.host_pool = dataclasses.replace(HOST, free_pages=2900, evictable_pages=1000)
        worker.told._wake()

        async def is_newer() -> bool:
            return (await router.list_workers())[0].host_pool.free_pages == 2900

        await eventually(is_newer)
        views = await router.list_workers()
        worker.script.before_describe.open()
    first, second = status.as_dict("r:1", None, views)["workers"]
    tier = first["host_tier"]
    assert (tier["total_tokens"], tier["used_tokens"], tier["protected_tokens"]) == (4000, 1100, 100)
    assert tier["load_back_ms_per_token"] == LOAD_BACK_MS
    assert {name: count for name, count in tier["moved"].items() if count} == {
        "backed_up_tokens": 640,
        "loaded_back_tokens": 320,
        "disk_bytes": 7,
    }
    assert first["cache"]["hit_rates"] == {"device": 0.25, "host": 0.125, "disk": 0.05}
    assert second["host_tier"] is None
    status.print_workers(views)
    lines = capsys.readouterr().out.splitlines()
    assert "from host" in lines[0]
    assert "28% of 4,000 tokens" in lines[2]
    assert lines[3].rstrip().endswith("-")
    status.print_workers(views[1:])
    assert "host tier" not in capsys.readouterr().out
