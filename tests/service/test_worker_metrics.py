"""A worker's ``/metrics``: that the figures are right, agree with each other, only rise, and tell nothing about callers."""

import asyncio
import itertools
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixmesh import errors, fleet_secret
from prefixmesh.cache.ledger import Hits
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import ConfigError, InternalError, InvalidRequestError, OverloadedError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.worker import metrics
from prefixmesh.worker.call_metrics import outcome_of
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker.messages import EngineInfo, Refused
from prefixmesh.worker.server import WorkerServer
from tests.support.fake_engine import fake_worker
from tests.support.router_kit import token_request
from tests.support.scraping import Page, fetch, scrape
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, byte_text, eventually, failure_of, real_worker, scripted_worker
from tests.support.tiny_model import make_tiny_model

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PROMPT = "Once upon a time there was a prefix that every prompt had in common. " * 4
GREEDY = pb.Sampling(temperature=0, max_tokens=6, ignore_eos=True)
REQUEST = pb.GenerateRequest(text="ping")
MOVES = {"backed_up", "dropped", "loaded_back", "written", "not_written", "fetched", "recomputed"}


@pytest.fixture(autouse=True)
def every_scrape_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LEAST_INTERVAL_S", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def tiny_worker(model: Path, **settings: Any) -> AsyncIterator[Worker]:
    engine = EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=4000, threads=1)
    async with real_worker(engine, metrics_port=0, **settings) as worker:
        yield worker


def url_of(worker: Worker, path: str = "/metrics") -> str:
    assert worker.bound.metrics_url is not None
    return worker.bound.metrics_url.removesuffix("/metrics") + path


async def page_of(worker: Worker) -> Page:
    return await scrape(url_of(worker))


async def until(worker: Worker, name: str, value: float, **labels: str) -> Page:
    """Wait until a metric has a value: a call's handler ends a moment after its caller sees the end."""
    pages: list[Page] = []

    async def holds() -> bool:
        pages.append(await page_of(worker))
        return pages[-1].value(name, **labels) == value

    await eventually(holds)
    return pages[-1]


def check_agreement(page: Page) -> None:
    """F71: the hit rate is its parts', hits and misses are the queries, pages are the pool, and nothing is negative."""
    queries = page.value("prefixmesh_cache_query_tokens_total")
    hits = page.by("prefixmesh_cache_hit_tokens_total", "tier")
    misses = page.by("prefixmesh_cache_miss_tokens_total", "cause")
    assert (set(hits), set(misses)) == (
        set(Hits._fields),
        {"never_seen", "evicted", "other_namespace", "tail"},
    )
    assert sum(hits.values()) + sum(misses.values()) == queries
    assert page.value("prefixmesh_cache_hit_rate") == (sum(hits.values()) / queries if queries else 0.0)
    assert sum(page.by("prefixmesh_kv_pages", "state").values()) == page.value("prefixmesh_kv_pool_pages")
    assert set(page.by("prefixmesh_tier_tokens_total", "move")) == MOVES
    assert min(page.samples().values()) >= 0


def counters(page: Page) -> dict[Any, float]:
    """What may only rise: counters, and the buckets, sums and counts of histograms and summaries."""
    rising = {f.name for f in page.families() if f.type in ("counter", "histogram", "summary")}
    return {
        key: value
        for key, value in page.samples().items()
        if re.sub(r"_(total|bucket|sum|count)$", "", key[0]) in rising
    }


async def test_the_second_of_two_equal_prompts_raises_the_hit_rate(model: Path) -> None:
    """A real worker with a tiny model: all of the second prompt but its last token is found, and the sums say so."""
    async with tiny_worker(model) as worker:
        pages = [await page_of(worker)]
        for _ in range(2):
            answer = await worker.generate(pb.GenerateRequest(text=PROMPT, sampling=GREEDY))
            ended = len(pages)
            pages.append(await until(worker, "prefixmesh_requests_total", ended, outcome="length"))
        rates = [page.value("prefixmesh_cache_hit_rate") for page in pages]
        size = answer.started.prompt_tokens
        assert rates == [0.0, 0.0, (size - 1) / (2 * size)]
        assert pages[2].value("prefixmesh_prompt_tokens_total") == 2 * size
        assert pages[2].value("prefixmesh_completion_tokens_total") == 12
        assert pages[2].by("prefixmesh_cache_miss_tokens_total", "cause")["tail"] == 2
        assert pages[2].value("prefixmesh_first_token_seconds_count") == 2
        assert pages[2].value("prefixmesh_prefill_saved_share_count", part="total") == 2
        saved = pages[2].value("prefixmesh_prefill_saved_share_sum", part="linear")
        assert saved == pytest.approx((size - 1) / size)
        assert pages[2].value("prefixmesh_engine_steps_total") == 12
    for before, after in itertools.pairwise(pages):
        check_agreement(after)
        old, new = counters(before), counters(after)
        assert set(old) == set(new)
        assert all(new[key] >= old[key] for key in old)


async def test_pressure_is_told() -> None:
    """Three answers that do not fit the pool together: somebody gives way; and what a next prompt takes from the cache is counted."""
    settings = EngineConfig(max_total_tokens=60, max_running_requests=3)
    sampling = pb.Sampling(temperature=0, max_tokens=25, ignore_eos=True)
    async with fake_worker(settings, metrics_port=0) as stage:
        requests = [token_request([n] * 10, sampling=sampling) for n in range(3)]
        await asyncio.gather(*map(stage.worker.generate, requests))
        await stage.worker.generate(token_request([9] * 50, sampling=pb.Sampling(max_tokens=0)))
        page = await until(stage.worker, "prefixmesh_requests_total", 4, outcome="length")
        assert page.value("prefixmesh_engine_preemptions_total") == stage.scheduler.preemptions > 0
        assert page.value("prefixmesh_cache_evicted_pages_total") >= 50 - 25
        check_agreement(page)


def test_every_error_that_a_call_may_end_in_has_an_outcome() -> None:
    """Its own reason, or that of the kind of error it is; what only a start or another service raises is none of a call's."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    told = {
        kind.__name__: outcome_of(kind("field", "problem") if kind is InvalidRequestError else kind("x"))
        for kind in kinds
    }
    by_their_kind = {
        "FrameError": "unavailable",
        "LoadBackError": "internal",
        "DoubleReleaseError": "internal",
        "InvariantError": "internal",
        "DeviceLostError": "unavailable",
        "EngineLostError": "unavailable",
        "StoppingError": "unavailable",
        "ForgedTicketError": "unauthenticated",
        "OtherLifeError": "unauthenticated",
        "ExpiredTicketError": "unauthenticated",
        "UsedTicketError": "unauthenticated",
        "TicketLimitError": "unauthenticated",
    }
    elsewhere = {
        "ConfigError": "internal",
        "ModelFileError": "internal",
        "UnsupportedError": "internal",
        "OtherKvError": "internal",
    }
    expected = {kind.__name__: kind.reason.lower() for kind in kinds} | by_their_kind | elsewhere  # type: ignore[attr-defined]
    assert told == expected
    assert outcome_of(KeyError("x")) == "internal"


async def test_how_calls_end_is_counted_and_a_leaving_caller_is_no_error() -> None:
    """F71: stop, length, cancel, deadline, the caller's errors and ours, each under its own name, each once."""
    engine = ScriptedEngine()
    async with scripted_worker(engine, metrics_port=0) as worker:
        await worker.generate(REQUEST)
        await worker.generate(pb.GenerateRequest(text="ping", sampling=pb.Sampling(max_tokens=2)))
        assert isinstance(await failure_of(worker, pb.GenerateRequest()), InvalidRequestError)
        engine.refusal = Refused(request_id="", field="", problem="full")
        assert isinstance(await failure_of(worker, REQUEST), OverloadedError)
        engine.refusal = None
        engine.failure = "numbers went bad"
        assert isinstance(await failure_of(worker, REQUEST), InternalError)
        engine.hold_after_tokens = 1
        call = worker.inference.Generate(REQUEST)
        await call.read()
        assert (await page_of(worker)).value("prefixmesh_requests_in_flight") == 1
        call.cancel()
        late = worker.inference.Generate(REQUEST, timeout=0.1)
        assert (await late.code()).name == "DEADLINE_EXCEEDED"
        page = await until(worker, "prefixmesh_requests_in_flight", 0)
        ended = {name: n for name, n in page.by("prefixmesh_requests_total", "outcome").items() if n}
        assert ended == {
            "stop": 1,
            "length": 1,
            "invalid_request": 1,
            "overloaded": 1,
            "internal": 1,
            "cancelled": 1,
            "deadline_exceeded": 1,
        }


async def test_calls_that_name_an_adapter_are_counted_among_all_without_its_name() -> None:
    """By how they end; an adapter that is not there is the caller's error."""
    async with scripted_worker(ScriptedEngine(), metrics_port=0) as worker:
        load = control.LoadAdapterRequest(name="hush", path="p")
        await worker.control.LoadAdapter(load, metadata=worker.control_metadata())
        await worker.generate(REQUEST)
        await worker.generate(pb.GenerateRequest(text="ping", adapter="hush"))
        await failure_of(worker, pb.GenerateRequest(text="ping", adapter="hushhush"))
        page = await until(worker, "prefixmesh_requests_total", 1, outcome="invalid_request")
        by_name = {
            name: n for name, n in page.by("prefixmesh_adapter_requests_total", "outcome").items() if n
        }
        assert by_name == {"stop": 1, "invalid_request": 1}
        assert page.value("prefixmesh_requests_total", outcome="stop") == 2
        assert "hush" not in page.text


async def test_times_and_tokens_are_those_that_callers_are_told() -> None:
    """The histograms hold what ``Finished`` says, and an answer without a token has no first one."""
    async with scripted_worker(ScriptedEngine("abc"), metrics_port=0) as worker:
        told = (await worker.generate(REQUEST)).finished.timings
        await worker.generate(pb.GenerateRequest(text="ping", sampling=pb.Sampling(max_tokens=0)))
        page = await until(worker, "prefixmesh_queue_seconds_count", 2)
        for name, told_ms in (("first_token", told.first_token_ms), ("decode", 4.0), ("prefill", 2.0)):
            assert page.value(f"prefixmesh_{name}_seconds_sum") == pytest.approx(told_ms / 1e3)
            assert page.value(f"prefixmesh_{name}_seconds_count") == 1
        assert page.value("prefixmesh_decode_seconds_bucket", le="0.005") == 1
        assert page.value("prefixmesh_completion_tokens_total") == 3


async def test_what_moves_between_the_tiers_is_told() -> None:
    """Each figure under its own name; the wait for what came from the host only of answers that had some."""
    engine = ScriptedEngine()
    engine.tiers = TierCounts(
        host_total_pages=86,
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
    engine.load_back_ms_per_token, engine.load_back_ms = 0.125, 2.5
    async with scripted_worker(engine, metrics_port=0) as worker:
        await worker.generate(REQUEST)
        engine.host_tokens = 3
        await worker.generate(REQUEST)
        engine.host_tokens, engine.disk_tokens = 0, 3
        await worker.generate(REQUEST)
        page = await until(worker, "prefixmesh_requests_total", 3, outcome="stop")
    assert page.value("prefixmesh_load_back_seconds_count") == 1
    assert page.value("prefixmesh_load_back_seconds_sum") == 0.0025
    pages = page.by("prefixmesh_host_pages", "state")
    assert pages == {"free": 50, "evictable": 20, "protected": 10, "arriving": 6}
    assert page.by("prefixmesh_tier_tokens_total", "move") == {
        "backed_up": 11,
        "dropped": 12,
        "loaded_back": 13,
        "fetched": 14,
        "recomputed": 15,
        "written": 20,
        "not_written": 22,
    }
    assert page.value("prefixmesh_tier_failed_copies_total") == 16
    assert page.value("prefixmesh_tier_copies_in_flight") == 17
    assert page.value("prefixmesh_engine_load_back_tokens_per_second") == 8000
    assert page.value("prefixmesh_disk_tokens") == 18
    assert page.value("prefixmesh_disk_bytes") == 19
    assert page.value("prefixmesh_disk_bad_files_total") == 21


async def test_a_stuck_engine_holds_up_no_scrape() -> None:
    """The page shows what was told last and how old it is; figures that come late count."""
    engine = ScriptedEngine()
    async with scripted_worker(engine, metrics_port=0) as worker:
        first = await page_of(worker)
        engine.hold_stats, engine.steps = True, 5
        async with asyncio.timeout(5):
            stuck = [await page_of(worker) for _ in range(2)]
        assert [page.value("prefixmesh_engine_steps_total") for page in (first, *stuck)] == [0, 0, 0]
        ages = [page.value("prefixmesh_engine_stats_age_seconds") for page in (first, *stuck)]
        assert ages == sorted(ages)
        assert ages[-1] > 0.1
        engine.release()
        await until(worker, "prefixmesh_engine_steps_total", 5)


async def test_scrapes_in_close_order_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is read, the engine is asked at a bounded rate."""
    monkeypatch.setattr(metrics, "LEAST_INTERVAL_S", 3600.0)
    engine = ScriptedEngine()
    async with scripted_worker(engine, metrics_port=0) as worker:
        pages = {(await page_of(worker)).text for _ in range(5)}
        assert (len(pages), engine.stats_told) == (1, 1)


async def test_nothing_that_callers_send_or_are_is_told() -> None:
    """F74: prompt, answer, key, tenant and ids are in no page, and a page has as many series after 30 tenants as after none."""
    engine = ScriptedEngine("hushanswer")
    async with scripted_worker(engine, metrics_port=0) as worker:
        before = await page_of(worker)
        for i in range(30):
            request = pb.GenerateRequest(text="hushprompt", extra_key=f"hushkey{i}", request_id="hushid")
            answer = await worker.generate(request, (("x-prefixmesh-tenant", f"hushtenant{i}"),))
            await failure_of(worker, pb.GenerateRequest(text="x", model=f"hushmodel{i}"))
        after = await page_of(worker)
        assert "hush" not in after.text
        assert answer.started.request_id not in after.text
        assert answer.started.namespace_digest not in after.text
        assert set(before.samples()) == set(after.samples())


async def test_other_paths_and_methods_and_hosts_are_refused() -> None:
    """Two pages and nothing else; and a name that somebody made lead to this machine is not this worker's."""
    async with scripted_worker(ScriptedEngine(), metrics_port=0) as worker:
        url = url_of(worker)
        assert await fetch(url_of(worker, "/-/healthy")) == (200, "healthy\n")
        for path in ("/", "/metrics/", "/metrics/x", "/../metrics", "/favicon.ico"):
            assert (await fetch(url_of(worker, path)))[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert (await fetch(url, method=method))[0] == 405
        assert (await fetch(url, {"Host": "rebound.example:80"}))[0] == 421
        assert (await fetch(url, {"Host": "localhost:80"}))[0] == 200
        assert (await fetch(url + "?name[]=x"))[0] == 200


async def test_health_is_told_as_it_is() -> None:
    """A worker whose engine has died says so, and its figures are still there."""
    engine = ScriptedEngine()
    async with scripted_worker(engine, metrics_port=0) as worker:
        await page_of(worker)
        engine.die()
        status, body = await fetch(url_of(worker, "/-/healthy"))
        assert (status, body) == (503, "the engine is gone\n")
        check_agreement(await page_of(worker))


async def test_while_the_model_loads_it_says_so() -> None:
    """The page is there before the engine is, without the engine's figures."""

    class SlowStart(ScriptedEngine):
        loading, loaded = asyncio.Event(), asyncio.Event()

        async def start(self) -> EngineInfo:
            self.loading.set()
            await self.loaded.wait()
            return await super().start()

    engine = SlowStart()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = WorkerConfig(metrics_port=port)
    server = WorkerServer(config, fleet_secret.generate(), engine=engine, text=byte_text())
    starting = asyncio.create_task(server.start())
    await engine.loading.wait()
    assert await fetch(f"http://127.0.0.1:{port}/-/healthy") == (503, "starting\n")
    names = {name for name, _ in (await scrape(f"http://127.0.0.1:{port}/metrics")).samples()}
    assert "prefixmesh_requests_total" in names
    assert "prefixmesh_cache_hit_rate" not in names
    engine.loaded.set()
    await starting
    assert (await fetch(f"http://127.0.0.1:{port}/-/healthy"))[0] == 200
    await server.stop(0.0)


async def test_a_taken_port_is_named_before_the_model_is_loaded_and_none_is_open_by_default() -> None:
    """The setting is named; without it nothing listens; a stopped worker's port is free again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = ScriptedEngine()
        config = WorkerConfig(metrics_port=port)
        server = WorkerServer(config, fleet_secret.generate(), engine=engine, text=byte_text())
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await server.start()
        assert not engine.started
    async with scripted_worker(ScriptedEngine(), metrics_port=port) as worker:
        assert worker.bound.metrics_url == f"http://127.0.0.1:{port}/metrics"
    async with scripted_worker(ScriptedEngine(), metrics_port=port):
        pass
    async with scripted_worker(ScriptedEngine()) as worker:
        assert worker.bound.metrics_url is None
    with pytest.raises(ConfigError, match="metrics_port"):
        WorkerConfig(metrics_port=70000)


@pytest.mark.slow
async def test_the_page_is_what_the_documentation_says(model: Path) -> None:
    """Every metric of a worker with its engine in a process of its own is in docs/metrics.md, by name, type and labels, and no other."""
    async with tiny_worker(model, in_process=False) as worker:
        page = await page_of(worker)
        check_agreement(page)
    assert told_by(page) == documented()


def told_by(page: Page) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels by the name that a reader would ask for."""
    told = {}
    for family in page.families():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        told[name] = (family.type, frozenset(labels))
    return told


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """The same from the tables."""
    told = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                assert name not in told, f"{name} is documented twice"
                told[name] = (cells[1], frozenset(re.findall(r"`(\w+)`", cells[2])))
    return told
