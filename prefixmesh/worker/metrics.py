"""A worker's ``/metrics``: which figures there are, and the page that shows them.

The page is for operators and served on loopback only: why a prompt was not found tells what others have cached. It asks the engine
one question at a time and never waits long for the answer, so an engine in a long step, or stuck in one, holds up no scrape.
"""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from prefixmesh.http_pages import PageServer, Reply
from prefixmesh.worker.call_metrics import CallMetrics
from prefixmesh.worker.copy_metrics import CopyMetrics
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.engine_metrics import EngineMetrics
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker.warm_metrics import WarmMetrics

METRICS_HOST: Final = "127.0.0.1"
METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/-/healthy"

LEAST_INTERVAL_S: Final = 0.1
"""Within so much of each other, all scrapes get one page: a page costs the front a millisecond or two, whoever asks how often."""


class WorkerMetrics:
    """Every figure of one worker. The front's event loop owns it."""

    def __init__(
        self,
        engine: EngineClient,
        recent: RecentStats,
        copies: CopyBooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = CallMetrics()
        self.warms = WarmMetrics()
        self._recent = recent
        self._engine = engine
        self._clock = clock
        self._identity = _Identity()
        self._page = Reply(b"")
        self._made_at: float | None = None
        self._is_ready = False
        self._registry = CollectorRegistry()
        for collector in (EngineMetrics(recent), self.calls, self.warms, CopyMetrics(copies), self._identity):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        ProcessCollector(namespace="prefixmesh_engine", pid=lambda: _pid_of(engine), registry=self._registry)
        self._server = PageServer({METRICS_PATH: self.page, HEALTH_PATH: self.health})

    async def start(self, port: int) -> int:
        """Serve on loopback; returns the port. Raises ConfigError when it is taken."""
        return await self._server.start(METRICS_HOST, port)

    async def close(self) -> None:
        """Serve no more."""
        await self._server.close()

    def describe(self, worker_id: str, info: EngineInfo) -> None:
        """Tell who this worker is, once it is ready."""
        self._identity.tell(worker_id, info)
        self._is_ready = True

    async def page(self) -> Reply:
        """All figures in Prometheus' text format, at most ``LEAST_INTERVAL_S`` and one question to the engine old."""
        if self._made_at is None or self._clock() - self._made_at >= LEAST_INTERVAL_S:
            if self._is_ready and not self._engine.closed.is_set():
                await self._recent.refresh()
            self._page = Reply(generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)
            self._made_at = self._clock()
        return self._page

    async def health(self) -> Reply:
        """Whether there is an engine that serves."""
        if self._is_ready and not self._engine.closed.is_set():
            return Reply(b"healthy\n")
        problem = b"the engine is gone\n" if self._is_ready else b"starting\n"
        return Reply(problem, status=HTTPStatus.SERVICE_UNAVAILABLE)


class _Identity(Collector):
    """Figures that stay as they are."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def tell(self, worker_id: str, info: EngineInfo) -> None:
        labels = {
            "worker_id": worker_id,
            "model": info.model,
            "model_revision": info.model_revision,
            "device": info.device,
            "dtype": info.dtype,
            "prefix_cache": info.prefix_cache,
            "page_size": str(info.page_size),
        }
        self._families = [
            InfoMetricFamily("prefixmesh_worker", "Who this worker is.", value=labels),
            GaugeMetricFamily("prefixmesh_kv_pool_pages", "Size of the KV pool.", info.total_pages),
        ]

    def collect(self) -> list[Metric]:
        return self._families


def _pid_of(engine: EngineClient) -> int | str:
    """Process id of an engine that has a process of its own; else a name that no process has."""
    pid: int | None = getattr(engine, "pid", None)
    return "none" if pid is None else pid
