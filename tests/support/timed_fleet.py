"""A router before workers that are real but for their model, all in this process: real sockets, fronts, caches, schedulers and reports; steps
take the time that a timing model says."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prefixmesh import fleet_secret
from prefixmesh.client import Answer, AsyncClient
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.sim.fake_engine import ModelIdentity, RealTime, build_fake_engine
from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.server import WorkerServer
from tests.support.routed_worker import scripted_model
from tests.support.scripted_engine import INFO
from tests.support.servers import byte_text, eventually

CONTEXT = 16_384
QUICK = TimingModel(step_ms=2.0, prefill_ms_per_token=0.01)
"""A step of 512 new tokens takes 7 ms."""


@dataclass(frozen=True, kw_only=True)
class TimedFleet:
    """The running fleet."""

    router: RouterServer
    address: str
    workers: dict[str, WorkerServer]
    """By their ids."""

    def loads(self) -> list[int]:
        """Requests in flight on each worker, as the router counts them."""
        return [entry.load.in_flight for entry in self.router.core.registry]

    async def until_idle(self) -> None:
        """Wait until the router knows of no work anywhere."""
        await eventually(lambda: not any(self.loads()))

    async def until_exact(self) -> None:
        """Wait until the router's views of all caches are proved."""
        registry, view = self.router.core.registry, self.router.core.view

        def is_exact() -> bool:
            followed = [view.get(entry.endpoint) for entry in registry]
            return all(one is not None and one.trust.value == "exact" for one in followed)

        await eventually(is_exact)


def timed_worker(secret: fleet_secret.FleetSecret, number: int, timing: TimingModel) -> WorkerServer:
    """A worker that is not started yet."""
    identity = ModelIdentity(
        name=INFO.model, revision=INFO.model_revision, context_length=CONTEXT, vocab_size=INFO.vocab_size
    )
    settings = EngineConfig(max_total_tokens=1 << 16)
    engine = InProcessEngine(settings, lambda: build_fake_engine(settings, identity, timing, RealTime()).core)
    config = WorkerConfig(engine=settings, worker_id=f"w{number}")
    return WorkerServer(config, secret, engine=engine, text=byte_text())


@asynccontextmanager
async def timed_fleet(count: int, *, timing: TimingModel = QUICK) -> AsyncIterator[TimedFleet]:
    """A router before ``count`` workers, all ready and known exactly."""
    secret = fleet_secret.generate()
    model = scripted_model(CONTEXT)
    async with AsyncExitStack() as stack:
        workers = {f"w{number}": timed_worker(secret, number, timing) for number in range(count)}
        addresses = []
        for worker in workers.values():
            addresses.append((await worker.start()).address)
            stack.push_async_callback(worker.stop, 0.0)
        router = RouterServer(RouterConfig(workers=tuple(addresses), model=model.name), secret, model=model)
        bound = await router.start()
        stack.push_async_callback(router.stop, 0.0)
        fleet = TimedFleet(router=router, address=bound.address, workers=workers)
        await eventually(lambda: len(router.core.registry.ready) == count)
        await fleet.until_exact()
        yield fleet


async def ask(client: AsyncClient, ids: list[int], max_tokens: int = 4) -> Answer:
    """One greedy answer."""
    return await client.generate(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
