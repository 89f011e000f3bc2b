"""What a worker's reports say of its load: soon after it has changed, as the front counts it, and to each router of its own requests."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from prefixmesh.proto.cache_news import decode_pool
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.tokens import pack
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker_report import PagePool
from tests.support.cache_following import Follower
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, eventually, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

NEVER_MS = 10_000

"""Between two reports that nothing has caused: longer than any test."""

SOON_MS = 50

BUNDLE_S = 0.05


@pytest.fixture(autouse=True)
def quick_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are told as quickly as to a reader with the usual interval."""
    monkeypatch.setattr("prefixmesh.worker.worker_reports.BUNDLES_PER_INTERVAL", NEVER_MS * 1e-3 / BUNDLE_S)


@dataclass
class OwnView:
    """What a router knows of its own requests by the reports alone."""

    follower: Follower
    accepted: set[str] = field(default_factory=set)
    prefilled: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)

    def told(self, name: str) -> Any:
        """A field of the newest report; None before the first."""
        return getattr(self.follower.report, name, None)

    async def until(self, condition: Any) -> None:
        while not condition():
            report = await self.follower.next_report()
            self.accepted |= set(report.accepted)
            self.prefilled |= set(report.prefilled)
            self.ended += report.ended
            assert report.own_requests == len(self.accepted - set(self.ended))


def follow(worker: Worker, router_id: str = "", report_ms: int = NEVER_MS) -> OwnView:
    return OwnView(Follower(worker, router_id=router_id, report_ms=report_ms))


def ask(worker: Worker, request_id: str, router_id: str = "", *, branches: int = 1) -> "asyncio.Task[Any]":
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([1, 2, 3])), branches=branches)
    ticket = worker.ticket(request_id=request_id, router_id=router_id)

    async def generate() -> list[Any]:
        return [message async for message in worker.inference.Generate(request, metadata=ticket)]

    return asyncio.create_task(generate())


async def test_router_is_told_step_by_step_of_its_own_requests_without_waiting_for_the_interval() -> None:
    engine = ScriptedEngine()
    engine.hold_admission = True
    async with scripted_worker(engine) as worker:
        mine, others = follow(worker, "r"), follow(worker, "s")
        asking = ask(worker, "q1", "r")
        await mine.until(lambda: mine.accepted == {"q1"})
        await mine.until(lambda: mine.told("queued_requests") == 1)
        assert not mine.prefilled
        engine.hold_admission, engine.hold_after_tokens = False, 2
        engine._notify()
        await mine.until(lambda: mine.prefilled == {"q1"})
        await mine.until(lambda: mine.told("running_requests") == 1)
        assert not mine.ended
        engine.release()
        await asking
        await mine.until(lambda: mine.ended == ["q1"])
        await others.until(lambda: others.told("decode_step_ms"))
        assert not others.accepted | others.prefilled
        mine.follower.close()
        others.follower.close()


async def test_each_router_sees_the_load_that_others_put_on_the_worker() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        views = [follow(worker, name) for name in "rs"]
        asking = [ask(worker, f"q{index}", "rs"[index % 2]) for index in range(5)]
        for view in views:
            await view.until(lambda v=view: v.told("running_requests") == 5)
        assert [view.told("own_requests") for view in views] == [3, 2]
        engine.release()
        await asyncio.gather(*asking)
        for view in views:
            await view.until(lambda v=view: v.told("running_requests") == 0)
            assert sorted(view.ended) == sorted(view.accepted)
            view.follower.close()


async def test_reader_that_comes_back_is_told_what_runs_and_what_it_missed() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        first = follow(worker, "r")
        asking = [ask(worker, f"q{index}", "r") for index in range(2)]
        await first.until(lambda: first.prefilled == {"q0", "q1"})
        first.follower.close()
        await eventually(lambda: len(worker.server._watchers) == 0)
        asking[0].cancel()
        await eventually(lambda: len(worker.server._calls) == 1)
        asking.append(ask(worker, "q2", "r"))
        await eventually(lambda: len(worker.server._calls) == 2)
        again = follow(worker, "r")
        report = await again.follower.next_report()
        assert {"q1", "q2"} <= set(report.accepted)
        assert report.ended == ("q0",)
        assert report.own_requests == 2
        engine.release()
        await asyncio.gather(*asking, return_exceptions=True)
        again.follower.close()


async def test_caller_that_leaves_is_off_the_load_at_once_and_the_engine_is_told() -> None:
    """F13, the worker's side: a silent engine keeps nobody on the books whose caller has left."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        view = follow(worker, "r")
        asking = ask(worker, "q1", "r")
        await view.until(lambda: view.prefilled == {"q1"})
        asking.cancel()
        await view.until(lambda: view.ended == ["q1"])
        assert view.told("running_requests") == view.told("queued_requests") == 0
        await engine.until(lambda: engine.aborted == ["q1"])
        view.follower.close()


async def test_request_whose_answer_is_still_being_read_has_ended_for_the_load() -> None:
    """A caller that reads slowly takes nothing of the engine any more, and a router must not wait for it."""
    engine = ScriptedEngine(answer="x" * 900)
    engine.tokens_per_step = 900
    async with scripted_worker(engine) as worker:
        view = follow(worker, "r")
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(ids=pack([1])), sampling=pb.Sampling(max_tokens=900)
        )
        metadata = worker.ticket(request_id="q1", router_id="r")
        call = worker.inference.Generate(request, metadata=metadata)
        await view.until(lambda: view.ended == ["q1"])
        messages = [message async for message in call]
        assert messages[-1].HasField("finished")
        view.follower.close()


async def test_branches_count_as_requests_and_have_one_reservation() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        view = follow(worker, "r")
        asking = ask(worker, "q1", "r", branches=3)
        await view.until(lambda: view.told("running_requests") == 3)
        assert view.told("own_requests") == 1
        engine.release()
        await asking
        await view.until(lambda: view.ended == ["q1"])
        view.follower.close()


async def test_same_client_id_twice_in_parallel_are_two_requests() -> None:
    """F60, the worker's side: what a caller calls its request is for logs."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        view = follow(worker, "r")
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([1])), request_id="the-same")
        calls = [
            worker.inference.Generate(request, metadata=worker.ticket(request_id=name, router_id="r"))
            for name in ("q1", "q2")
        ]
        reading = [asyncio.create_task(call.read()) for call in calls]
        await view.until(lambda: view.prefilled == {"q1", "q2"})
        engine.release()
        ids = {(await one).started.request_id for one in reading}
        assert ids == {"q1", "q2"}
        for call in calls:
            call.cancel()
        view.follower.close()


async def test_changes_while_a_report_is_not_due_yet_travel_in_one_bundle() -> None:
    """A storm of short requests costs a reader a few reports, not three for each request."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        view = follow(worker, "r")
        await view.follower.next_report()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for index in range(60):
            await ask(worker, f"q{index}", "r")
        await view.until(lambda: len(view.ended) == 60)
        took_s = loop.time() - began
        assert view.follower.kinds.count("report") <= 4 + took_s / BUNDLE_S
        view.follower.close()


async def test_report_tells_the_clock_that_tickets_expire_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixmesh.worker.cache_watchers.unix_ms", lambda: 123_456)
    async with scripted_worker(ScriptedEngine()) as worker:
        view = follow(worker)
        assert (await view.follower.next_report()).unix_ms == 123_456
        view.follower.close()


TIERS = TierCounts(
    host_total_pages=80,
    host_free_pages=50,
    host_evictable_pages=20,
    host_protected_pages=10,
    backed_up_tokens=11,
    dropped_tokens=12,
    loaded_back_tokens=13,
    fetched_tokens=14,
    recomputed_tokens=15,
    failed_copies=16,
    copies_in_flight=17,
    disk_tokens=18,
    disk_bytes=19,
    disk_written_tokens=20,
    disk_bad_files=21,
    disk_dropped_tokens=22,
)
"""Every number another, so that none is taken for another."""


async def test_a_host_tier_is_told_in_reports_and_to_who_asks() -> None:
    """Its pages and its speed to routers in every report; what moved, to whoever asks. Nothing of it where there is none."""
    engine = ScriptedEngine()
    engine.tiers, engine.load_back_ms_per_token = TIERS, 0.125
    async with scripted_worker(engine) as worker:
        view = follow(worker, report_ms=SOON_MS)
        await view.until(lambda: view.told("host_pool"))
        pool = PagePool(total_pages=80, free_pages=50, evictable_pages=20, protected_pages=10)
        assert view.told("host_pool") == pool
        assert view.told("load_back_ms_per_token") == 0.125
        view.follower.close()
        told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
    assert decode_pool(told.host_pool, "host_pool") == pool
    assert told.rates.load_back_ms_per_token == 0.125
    assert [value for _, value in told.tiers.ListFields()] == list(range(11, 23))


async def test_a_worker_without_a_host_tier_tells_of_none() -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        view = follow(worker, report_ms=SOON_MS)
        await view.until(lambda: view.told("decode_step_ms"))
        assert view.told("host_pool") is None
        view.follower.close()
        told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
    assert not told.HasField("host_pool")
    assert not told.HasField("tiers")


async def test_describe_tells_digests_clock_and_state() -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
        assert told.tokenizer_digest != told.template_digest != ""
        assert told.block_size == 64
        assert told.pool.total_pages == 4000
        assert told.unix_ms > 10**12
        assert not told.draining
