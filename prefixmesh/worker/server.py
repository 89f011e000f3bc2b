"""A worker as a whole: the engine, the gRPC front before it, and their life from start to stop."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prefixmesh.config import WorkerConfig, describe
from prefixmesh.errors import ConfigError, PrefixmeshError, UnavailableError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Epoch, Incarnation, WorkerId
from prefixmesh.model_files.source import resolve_model
from prefixmesh.proto.v1 import inference_pb2, worker_control_pb2
from prefixmesh.rpc.channel import join_address
from prefixmesh.rpc.draining import Drainer
from prefixmesh.rpc.health import HealthService
from prefixmesh.rpc.identity import is_loopback
from prefixmesh.rpc.server import add_service, make_server
from prefixmesh.side_thread import run_aside
from prefixmesh.text.answer_memory import AnswerMemory
from prefixmesh.text.chat_template import ChatTemplate, load_chat_template
from prefixmesh.text.prompts import PromptBuilder, text_digest
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from prefixmesh.worker.cache_watchers import CacheWatchers
from prefixmesh.worker.call_metrics import CountedInference
from prefixmesh.worker.caller import CallerCheck
from prefixmesh.worker.control_service import WorkerControlService, WorkerIdentity
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.front_adapters import FrontAdapters
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.kv_copies.copier import KvCopier
from prefixmesh.worker.kv_copies.grpc_transport import GrpcTransport
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.metrics import METRICS_HOST, METRICS_PATH, WorkerMetrics
from prefixmesh.worker.read_prefix import ReadPrefixService
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker.request_copies import RequestCopies
from prefixmesh.worker.running_calls import RunningCalls
from prefixmesh.worker.service import InferenceService
from prefixmesh.worker.warming import Warming

_log = logging.getLogger(__name__)

ANSWER_MEMORY_BYTES: Final = 16 * 2**20
"""Recent answers whose ids a worker remembers for chats that come to it directly; behind a router, the router does."""

_BYTES_PER_MB: Final = 1e6

FAREWELL_S: Final = 0.5
"""How long calls that have been ended may take to tell their callers so."""

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
CONTROL: Final = worker_control_pb2.DESCRIPTOR.services_by_name["WorkerControl"]

HEALTH_NAMES: Final = ("", INFERENCE.full_name, CONTROL.full_name)
"""What the health service tells of: the server as a whole, and each service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWorker:
    """A worker that serves."""

    host: str
    port: int
    worker_id: WorkerId
    incarnation: Incarnation
    memory_sums: str
    """How the memory was divided, in one line for people."""

    metrics_url: str | None = None
    """Where this machine may read its figures; None where they are not served."""

    @property
    def address(self) -> str:
        """``host:port``."""
        return join_address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns a model's text into tokens and back."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class WorkerServer:
    """One life of one worker: ``start``, then ``wait_closed`` or ``stop``. Not restartable.

    ``engine`` and ``text`` stand in for the model's own in tests, ``make_watchers`` for who tells of the cache.
    """

    def __init__(
        self,
        config: WorkerConfig,
        secret: FleetSecret,
        *,
        engine: EngineClient | None = None,
        text: TextSide | None = None,
        make_watchers: Callable[..., CacheWatchers] = CacheWatchers,
    ) -> None:
        self._config = config
        self._secret = secret
        self._engine = engine if engine is not None else _make_engine(config)
        self._text = text
        self._front_load = FrontLoad()
        self._stats = RecentStats(self._engine, mark=self._front_load.mark)
        self._copies = CopyBooks()
        self._metrics = WorkerMetrics(self._engine, self._stats, self._copies)
        self._incarnation = Incarnation(secrets.randbits(64))
        self._health = HealthService()
        limits = config.engine
        self._calls = RunningCalls(
            limits.max_running_requests + limits.max_queued_requests, queue_limit=limits.max_queued_requests
        )
        self._drainer = Drainer(self._calls, "this worker", self._tell_drain)
        self._copier: KvCopier | None = None
        self._watchers = make_watchers(
            self._stats,
            lambda: Epoch(secrets.randbits(64)),
            load=self._front_load,
            is_draining=lambda: self._drainer.is_draining,
            copy_ms_per_token=lambda: self._copies.ms_per_token,
        )
        self._engine.watch_cache(self._watchers.on_changes)
        self._server: grpc.aio.Server | None = None
        self._inference: InferenceService | None = None
        self._warming: Warming | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._failure: PrefixmeshError | None = None
        self._closed = asyncio.Event()

    async def start(self) -> BoundWorker:
        """Bind the port, load the model, serve. Leaves nothing behind when it fails or is cancelled.

        Raises ConfigError (a port that is taken, a pool that does not fit), ModelFileError, or what else the engine said.
        """
        config = self._config
        _log.info("worker_starting incarnation=%016x config=%s", self._incarnation, describe(config))
        try:
            # A port that is taken should not cost the time of loading a model. It is bound only after that: gRPC has no way
            # to give back a port of a server that never started.
            _probe(config.host, config.port)
            metrics_url = await self._serve_metrics()
            info, text = await self._load()
            self._copies.open(info.kv_layout)
            port = await self._serve(info, text)
            self._metrics.describe(config.worker_id, info)
        except BaseException:
            await self._release()
            raise
        self._watching = asyncio.create_task(self._watch_engine())
        _log.info("worker_ready port=%d model=%s %s", port, info.model, info.memory_sums)
        return BoundWorker(
            host=config.host,
            port=port,
            worker_id=WorkerId(config.worker_id),
            incarnation=self._incarnation,
            memory_sums=info.memory_sums,
            metrics_url=metrics_url,
        )

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING and refuse new calls at once, let running ones finish for ``grace_s``, end the rest with UNAVAILABLE.

        May be called again, also while another call is at it; the first one's grace holds.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def wait_closed(self) -> None:
        """Return once ``stop`` has done its work; raise UnavailableError once the engine has died by itself."""
        await self._closed.wait()
        if self._failure is not None:
            raise self._failure

    async def _load(self) -> tuple[EngineInfo, TextSide]:
        if self._text is not None:
            return await self._engine.start(), self._text
        load = partial(_load_text, self._config.engine.model)
        loading = asyncio.create_task(run_aside(load, "text-side"))
        try:
            return await self._engine.start(), await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _serve_metrics(self) -> str | None:
        if self._config.metrics_port is None:
            return None
        port = await self._metrics.start(self._config.metrics_port)
        url = f"http://{join_address(METRICS_HOST, port)}{METRICS_PATH}"
        _log.info("worker_metrics url=%s", url)
        return url

    async def _serve(self, info: EngineInfo, text: TextSide) -> int:
        config = self._config
        callers = CallerCheck(
            secret=self._secret,
            incarnation=self._incarnation,
            model_revision=info.model_revision,
            isolation=config.isolation,
            tickets_only=config.tickets_only or not is_loopback(config.host),
        )
        adapters = FrontAdapters(self._engine, info.adapters)
        copier = self._copier = KvCopier(
            self._engine,
            self._copies,
            self._stats,
            GrpcTransport(self._secret),
            model_revision=info.model_revision,
            incarnation=self._incarnation,
        )
        self._inference = InferenceService(
            engine=self._engine,
            adapters=adapters,
            info=info,
            worker_id=config.worker_id,
            callers=callers,
            calls=self._calls,
            load=self._front_load,
            prompts=PromptBuilder(
                text.tokenizer,
                text.template,
                AnswerMemory(ANSWER_MEMORY_BYTES),
                context_length=info.context_length,
                vocab_size=info.vocab_size,
            ),
            tokenizer=text.tokenizer,
            copies=RequestCopies(copier, info.page_size),
        )
        self._warming = Warming(
            engine=self._engine,
            adapters=adapters,
            calls=self._calls,
            copier=copier,
            metrics=self._metrics.warms,
        )
        identity = WorkerIdentity(
            worker_id=config.worker_id,
            incarnation=self._incarnation,
            tokenizer_digest=text_digest(text.tokenizer, text.template),
            template_digest=text.template.digest if text.template is not None else "",
        )
        control = WorkerControlService(
            secret=self._secret,
            identity=identity,
            info=info,
            stats=self._stats,
            engine=self._engine,
            adapters=adapters,
            watchers=self._watchers,
            drainer=self._drainer,
            copies=self._copies,
            warming=self._warming,
        )
        server = make_server()
        add_service(server, INFERENCE, CountedInference(self._inference, self._metrics.calls))
        giving = ReadPrefixService(
            secret=self._secret,
            incarnation=self._incarnation,
            info=info,
            engine=self._engine,
            books=self._copies,
            bytes_per_s=config.engine.kv_copy_rate * _BYTES_PER_MB,
        )
        add_service(server, CONTROL, control, giving)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE.full_name, CONTROL.full_name)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        for name in HEALTH_NAMES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        port = _bind(server, config.host, config.port)
        await server.start()
        self._server = server
        return port

    async def _tell_drain(self) -> None:
        """By health, and in the next report."""
        self._watchers.on_load_change()
        states = health_pb2.HealthCheckResponse
        for name in HEALTH_NAMES:
            # As it is by now: of two changes that cross each other, the later one is the last to say so.
            await self._health.set(name, states.NOT_SERVING if self._drainer.is_draining else states.SERVING)

    async def _watch_engine(self) -> None:
        await self._engine.closed.wait()
        if self._stopping is not None:
            return
        self._failure = UnavailableError(
            "the engine of this worker ended unexpectedly; the log has the reason"
        )
        _log.error("engine_died running_calls=%d", len(self._calls))
        self._calls.close("the engine of this worker is gone")
        self._watchers.close(UnavailableError("the engine of this worker is gone"))
        await self._health.enter_graceful_shutdown()
        self._closed.set()

    async def _stop(self, grace_s: float) -> None:
        _log.info("worker_stopping running_calls=%d grace_s=%.1f", len(self._calls), grace_s)
        self._calls.close("this worker is stopping")
        self._watchers.close(UnavailableError("this worker is stopping"))
        await self._health.enter_graceful_shutdown()
        if not await self._calls.wait_idle(grace_s):
            _log.warning("worker_grace_over running_calls=%d", len(self._calls))
        await self._release()
        if self._watching is not None:
            await self._watching
        self._closed.set()
        _log.info("worker_stopped")

    async def _release(self) -> None:
        if self._copier is not None:
            await self._copier.close()
        await self._engine.close()  # calls that still run end in UNAVAILABLE
        await self._calls.wait_idle(FAREWELL_S)
        if self._server is not None:
            await self._server.stop(FAREWELL_S)
        if self._inference is not None:
            self._inference.close()
        await self._metrics.close()


def _probe(host: str, port: int) -> None:
    """Raise ConfigError when the address cannot be listened on now."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from error


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = join_address(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: it was free a moment ago") from error


def _make_engine(config: WorkerConfig) -> EngineClient:
    if config.in_process:
        from prefixmesh.worker.in_process_engine import InProcessEngine  # imports torch

        return InProcessEngine(config.engine)
    from prefixmesh.worker.process_engine import ProcessEngine

    return ProcessEngine(config.engine)


def _load_text(model: str) -> TextSide:
    files = resolve_model(model)
    return TextSide(load_tokenizer(files), load_chat_template(files))
