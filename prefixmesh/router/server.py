"""A router as a whole: its model's text side, the links to the workers, the gRPC services, and their life from start to stop."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.config import describe
from prefixmesh.errors import ConfigError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.history import NO_HISTORY, History
from prefixmesh.history_file import HistoryFile
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.proto.v1 import inference_pb2, router_pb2
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.adapters.adapter_roster import AdapterRoster
from prefixmesh.router.adapters.fleet_adapters import FleetAdapters
from prefixmesh.router.direct import RouteService
from prefixmesh.router.direct_abort import DirectAborts
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.explain_service import ExplainService
from prefixmesh.router.hand_over import HandOvers
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.heat.watch import HeatWatch
from prefixmesh.router.heat_service import HeatService
from prefixmesh.router.intake import Intake
from prefixmesh.router.model import RouterModel, load_router_model
from prefixmesh.router.open_state import open_store
from prefixmesh.router.operator_service import OperatorService
from prefixmesh.router.pins.fleet_pins import FleetPins
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.prepare import RequestPreparer
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.relay import Relay
from prefixmesh.router.request_recorder import RequestRecorder
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.running import RunningRequests
from prefixmesh.router.service import InferenceService
from prefixmesh.router.state_store import StateStore
from prefixmesh.router.worker_aborts import WorkerAborts
from prefixmesh.router.worker_identity import Expected
from prefixmesh.router.worker_roster import WorkerRoster
from prefixmesh.router.workers import WorkerPool
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import join_address
from prefixmesh.rpc.draining import Drainer
from prefixmesh.rpc.health import HealthService
from prefixmesh.rpc.identity import ApiKeys, is_loopback
from prefixmesh.rpc.server import add_service, make_server
from prefixmesh.side_thread import run_aside

_log = logging.getLogger(__name__)

FIRST_NEWS_S: Final = 0.5
"""How long a router that starts waits to hear whether its workers are there: requests that came sooner would be told that none is. They wait
at the port meanwhile, which is bound already. A worker answers within milliseconds, and where nobody is, that is known at once."""

FAREWELL_S: Final = 0.5
"""How long requests that have been ended may take to tell their callers so."""

ROUTER_ID_BYTES: Final = 8
"""A router's name for itself, for one life: workers report to it what became of the requests that came with its tickets."""

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
ROUTER: Final = router_pb2.DESCRIPTOR.services_by_name["Router"]
_SERVED_NAMES: Final = ("", INFERENCE.full_name, ROUTER.full_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRouter:
    """A router that serves."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``."""
        return join_address(self.host, self.port)


class RouterServer:
    """One life of one router: ``start``, then ``wait_closed`` or ``stop``. Not restartable.

    ``model`` stands in for the configured one in tests.
    """

    def __init__(
        self, config: RouterConfig, secret: FleetSecret, *, model: RouterModel | None = None
    ) -> None:
        """Raises ConfigError when the address may be reached from outside and no API keys guard it."""
        if config.api_keys_file is None and not is_loopback(config.host):
            raise ConfigError(
                f"host {config.host} can be reached from other machines: give --api-keys-file, or bind to 127.0.0.1"
            )
        self._config = config
        self._secret = secret
        self._keys = ApiKeys.from_file(Path(config.api_keys_file)) if config.api_keys_file else None
        self._model = model
        self._router_id = secrets.token_hex(ROUTER_ID_BYTES)
        self._health = HealthService()
        self._running = RunningRequests()
        self.public_prefixes = PublicPrefixes(config.block_size)
        """What every tenant may match: requests are prepared with what is set here."""

        self._drainer = Drainer(self._running, "this router", self._tell_health)
        self._server: grpc.aio.Server | None = None
        self._preparer: RequestPreparer | None = None
        self._adapters: AdapterFinder | None = None
        self._store: StateStore | None = None
        self._pool: WorkerPool | None = None
        self._roster: WorkerRoster | None = None
        self._pins: FleetPins | None = None
        self._fleet_adapters: FleetAdapters | None = None
        self._aborts: WorkerAborts | None = None
        self._hand_overs: HandOvers | None = None
        self._core: RouterCore | None = None
        self._history: HistoryFile | None = None
        self._recorder: RequestRecorder | None = None
        self._ready_changed = asyncio.Event()
        self._telling_health: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    @property
    def core(self) -> RouterCore:
        """The decisions, once started."""
        assert self._core is not None, "start() first"
        return self._core

    async def start(self) -> BoundRouter:
        """Bind the port, load the model's text side, serve. Workers need not be there yet.

        Leaves nothing behind when it fails or is cancelled. Raises ConfigError (a port that is taken), ModelFileError.
        """
        config = self._config
        _log.info("router_starting config=%s", describe(config))
        try:
            # Bound first: a port that is taken should not cost the time of loading a model.
            self._server = make_server()
            port = _bind(self._server, config.host, config.port)
            self._store = open_store(config.state)
            if config.history is not None:
                self._history = HistoryFile(Path(config.history), self._router_id)
            if config.record is not None:
                self._recorder = RequestRecorder(Path(config.record), config.block_size)
            if self._model is None:
                self._model = await run_aside(partial(load_router_model, config), "router-model")
            await self._serve(self._server, self._model, self._store)
        except BaseException:
            await self._release()
            raise
        _log.info("router_listening port=%d model=%s", port, self._model.name)
        return BoundRouter(host=config.host, port=port)

    def add_worker(self, address: str) -> bool:
        """Route to this worker too, for as long as this process lives; False when it is known already."""
        assert self._pool is not None, "start() first"
        return self._pool.add(Endpoint(address))

    def remove_worker(self, address: str) -> bool:
        """Route nothing more to this worker; its running streams end undisturbed. False when it is not known."""
        assert self._pool is not None, "start() first"
        return self._pool.remove(Endpoint(address))

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING and refuse new requests at once, let running ones finish for ``grace_s``, end the rest with UNAVAILABLE.

        May be called again, also while another call is at it; the first one's grace holds.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def wait_closed(self) -> None:
        """Return once ``stop`` has done its work."""
        await self._closed.wait()

    async def _serve(self, server: grpc.aio.Server, model: RouterModel, store: StateStore) -> None:
        config = self._config
        core = self._core = _make_core(config, model, self._history or NO_HISTORY)
        pool = self._pool = WorkerPool(core, self._secret, self._router_id, self._ready_changed.set)
        pool.start()
        preparer = self._preparer = RequestPreparer(
            model,
            namespace_key=self._secret.namespace_key(),
            isolation=config.isolation,
            block_size=config.block_size,
            public=self.public_prefixes,
        )
        aborts = self._aborts = WorkerAborts(self._secret)
        heat = HeatWatch(core, _heat_config(config), config.block_size)
        relay = Relay(
            core=core,
            pool=pool,
            secret=self._secret,
            preparer=preparer,
            prompts=model.prompts,
            model=model.name,
            router_id=self._router_id,
            aborts=aborts,
            history=self._history or NO_HISTORY,
            idle_timeout_s=config.stream_idle_timeout_s,
            on_routed=heat.routed,
            recorder=self._recorder,
        )
        names = AdapterRoster(store)
        adapters = self._adapters = AdapterFinder(core.registry, pool.describe_ready, names)
        roster = self._roster = WorkerRoster(pool, store)
        pins = self._pins = FleetPins(
            core=core,
            pool=pool,
            model=model,
            store=store,
            public=self.public_prefixes,
            adapters=adapters,
            keys=self._keys,
            namespace_key=self._secret.namespace_key(),
            isolation=config.isolation,
            block_size=config.block_size,
            router_id=self._router_id,
            heat=heat,
        )
        fleet_adapters = self._fleet_adapters = FleetAdapters(
            registry=core.registry,
            pool=pool,
            roster=names,
            store=store,
            keys=self._keys,
            clock=pins.clock,
            is_acting=lambda: pins.keeper.is_acting,
        )
        intake = Intake(
            registry=core.registry, model=model, adapters=adapters, preparer=preparer, running=self._running
        )
        inference = InferenceService(
            core=core,
            model=model,
            keys=self._keys,
            intake=intake,
            preparer=preparer,
            relay=relay,
            running=self._running,
            direct_aborts=DirectAborts(core, aborts),
        )
        route = RouteService(
            core=core,
            intake=intake,
            secret=self._secret,
            keys=self._keys,
            router_id=self._router_id,
            model=model.name,
            on_routed=heat.routed,
        )
        explain = ExplainService(core=core, intake=intake, keys=self._keys)
        hot = HeatService(core=core, watch=heat, keys=self._keys, is_acting=lambda: pins.keeper.is_acting)
        hand_overs = self._hand_overs = HandOvers(
            core, pool, is_acting=lambda: pins.keeper.is_acting, pins_left=pins.keeper.pins_to_move
        )
        operator = OperatorService(core, roster, self._secret, self._keys, self._drainer, hand_overs)
        add_service(server, INFERENCE, inference)
        # One on the wire, several questions here.
        add_service(server, ROUTER, route, explain, operator, hot, pins.service, fleet_adapters.service)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*_SERVED_NAMES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._tell_health()
        self._telling_health = asyncio.create_task(self._keep_telling_health())
        await roster.start(config.workers)
        pins.start()
        fleet_adapters.start()
        hand_overs.start()
        await pool.hear_of_all(FIRST_NEWS_S)
        await server.start()

    async def _keep_telling_health(self) -> None:
        while True:
            await self._ready_changed.wait()
            self._ready_changed.clear()
            await self._tell_health()

    async def _tell_health(self) -> None:
        """SERVING when at least one worker is ready, and this router does not drain."""
        states = health_pb2.HealthCheckResponse
        for name in _SERVED_NAMES:
            # As it is by now: of two changes that cross each other, the later one is the last to say so.
            is_serving = self.core.registry.ready and not self._drainer.is_draining
            await self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)

    async def _stop(self, grace_s: float) -> None:
        _log.info("router_stopping running_requests=%d grace_s=%.1f", len(self._running), grace_s)
        self._running.close("this router is stopping")
        await self._health.enter_graceful_shutdown()
        if not await self._running.wait_idle(grace_s):
            _log.warning("router_grace_over running_requests=%d", len(self._running))
        await self._release()
        self._closed.set()
        _log.info("router_stopped")

    async def _release(self) -> None:
        self._running.stop_all("this router is stopping")
        await self._running.wait_idle(FAREWELL_S)
        if self._server is not None:
            await self._server.stop(FAREWELL_S)
        if self._telling_health is not None:
            self._telling_health.cancel()
        if self._aborts is not None:
            await self._aborts.close()
        if self._adapters is not None:
            await self._adapters.close()
        if self._hand_overs is not None:
            await self._hand_overs.close()
        if self._fleet_adapters is not None:
            await self._fleet_adapters.close()
        if self._pins is not None:
            await self._pins.close()
        if self._roster is not None:
            await self._roster.close()
        if self._pool is not None:
            await self._pool.close()
        if self._preparer is not None:
            self._preparer.close()
        if self._store is not None:
            await self._store.close()
        if self._history is not None:
            await asyncio.to_thread(self._history.close)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)


def _make_core(config: RouterConfig, model: RouterModel, history: History) -> RouterCore:
    return RouterCore(
        Expected(
            model_revision=model.revision,
            tokenizer_digest=model.tokenizer_digest,
            protocol_version=PROTOCOL_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
            block_size=config.block_size,
        ),
        PolicyConfig(
            policy=config.policy,
            spill_weight=config.spill_weight,
            affinity_ms=config.affinity_ms,
            slow_start_s=config.slow_start_s,
            max_wait_s=config.max_wait_s,
        ),
        block_size=config.block_size,
        max_tree_blocks=config.max_tree_blocks,
        draw=partial(secrets.randbits, 64),
        history=history,
    )


def _heat_config(config: RouterConfig) -> HeatConfig:
    return HeatConfig(
        enabled=config.heat == "on",
        max_replicas=config.heat_max_replicas,
        max_prefixes=config.heat_max_prefixes,
        max_tokens=config.heat_max_tokens,
    )


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = join_address(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is taken, or the address is not one of this machine"
        ) from error
