"""The whole demo: a local fleet with prefix caches, the workload, its policies pinned on every worker; and the workload again without."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from prefixmesh import paths
from prefixmesh.config import DEFAULT_MODEL, EngineConfig
from prefixmesh.demo.passes import OnRow, PassResult, check_policies, run_pass
from prefixmesh.demo.pin_policies import pin_policies
from prefixmesh.demo.pinned import Pinned
from prefixmesh.demo.workload import TenantScript, make_workload
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.fleet import Endpoints, Fleet
from prefixmesh.fleet.keeper import (
    StopSignals,
    fleet_session,
    interruptible,
    prepare_model,
    start_unless_asked_to_stop,
)
from prefixmesh.fleet.plan import FleetRequest, plan_fleet
from prefixmesh.fleet.precheck import check_request
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet_secret import FleetSecret, load_or_create

MAX_TOTAL_TOKENS: Final = 32_768
"""KV of each worker: holds the default workload three times over, in well under 2 GB for the default model."""

STOP_GRACE_S: Final = 5.0
"""Nothing runs any more when a pass is over."""

Caching = Literal["on", "off"]
OnPinned = Callable[[Pinned], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """What the demo runs."""

    model: str = DEFAULT_MODEL
    workers: int = 2
    users: int = 4
    turns: int = 4
    max_tokens: int = 24
    """Tokens of each answer: enough for a sentence, few enough that first tokens dominate."""

    @property
    def requests(self) -> int:
        """Requests of one pass."""
        return sum(len(tenant.users) * self.turns for tenant in self.tenants)

    @property
    def tenants(self) -> tuple[TenantScript, ...]:
        """The workload."""
        return make_workload(self.users, self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Both passes, and the policies pinned between them."""

    cache_on: PassResult
    pinned: Pinned
    cache_off: PassResult


def run_demo(
    settings: DemoSettings,
    report: Report,
    on_pass: Callable[[Caching], None],
    on_row: OnRow,
    on_pinned: OnPinned,
) -> DemoResult:
    """Start a fleet of its own, run both passes, pin between them, leave nothing behind; blocks for a minute or two.

    Raises what made a part or a request fail, and KeyboardInterrupt after a signal.
    """
    tenants = settings.tenants
    with interruptible():
        request = prepare_model(check_request(_request(settings)), report)
        with fleet_session(request, report) as session:
            return asyncio.run(_play(settings, request, tenants, session, report, on_pass, on_row, on_pinned))


def _request(settings: DemoSettings) -> FleetRequest:
    return FleetRequest(
        engine=EngineConfig(model=settings.model, max_total_tokens=MAX_TOTAL_TOKENS),
        workers=settings.workers,
        standby_router=False,  # nobody looks after this fleet: it ends with the demo
    )


async def _play(
    settings: DemoSettings,
    request: FleetRequest,
    tenants: tuple[TenantScript, ...],
    session: RaySession,
    report: Report,
    on_pass: Callable[[Caching], None],
    on_row: OnRow,
    on_pinned: OnPinned,
) -> DemoResult:
    signals = StopSignals()
    signals.install()
    secret = load_or_create(paths.fleet_secret_file())
    stage = _Stage(settings, tenants, session, secret, signals, report, on_row)
    on_pass("on")
    async with stage.fleet(request) as endpoints:
        cache_on = await stage.play(endpoints)
        pinned = await stage.pin(endpoints)
    on_pinned(pinned)
    on_pass("off")
    engine = dataclasses.replace(request.engine, prefix_cache="off")
    async with stage.fleet(dataclasses.replace(request, engine=engine)) as endpoints:
        cache_off = await stage.play(endpoints)
    return DemoResult(cache_on=cache_on, pinned=pinned, cache_off=cache_off)


class _Stage:
    """Runs what the demo shows, each pass on a fresh fleet."""

    def __init__(
        self,
        settings: DemoSettings,
        tenants: tuple[TenantScript, ...],
        session: RaySession,
        secret: FleetSecret,
        signals: StopSignals,
        report: Report,
        on_row: OnRow,
    ) -> None:
        self._settings, self._tenants = settings, tenants
        self._session, self._secret = session, secret
        self._signals, self._report, self._on_row = signals, report, on_row

    @asynccontextmanager
    async def fleet(self, request: FleetRequest) -> AsyncIterator[Endpoints]:
        """A fleet that is up, and gone afterwards."""
        began = time.monotonic()
        fleet = Fleet(plan_fleet(request, self._session.view()), self._session, self._secret, self._report)
        try:
            endpoints = await start_unless_asked_to_stop(fleet, self._signals)
            ready_s = time.monotonic() - began
            self._report(FleetEvent(kind="fleet_ready", detail=endpoints.router, seconds=ready_s))
            yield endpoints
            await fleet.stop(STOP_GRACE_S)
        finally:
            fleet.kill()

    async def play(self, endpoints: Endpoints) -> PassResult:
        """One pass of the workload."""
        if self._settings.model == DEFAULT_MODEL:
            await check_policies(endpoints.router, self._tenants)
        return await self._unless_asked_to_stop(
            run_pass(endpoints.router, self._tenants, self._settings.max_tokens, self._on_row)
        )

    async def pin(self, endpoints: Endpoints) -> Pinned:
        """Every policy on every worker."""
        return await self._unless_asked_to_stop(
            pin_policies(endpoints.router, endpoints.workers, self._tenants, self._settings.max_tokens)
        )

    async def _unless_asked_to_stop(self, doing: Coroutine[Any, Any, _T]) -> _T:
        running = asyncio.create_task(doing)
        asked = asyncio.create_task(self._signals.asked.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            raise KeyboardInterrupt
        return running.result()
