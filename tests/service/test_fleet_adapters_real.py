"""Adapters of a fleet with real workers, put at the router by the command: loaded, rolled over, refused and given to a worker that restarts, with
the very tokens that each of them answers alone."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from prefixmesh import fleet_secret
from prefixmesh.cli.main import main
from prefixmesh.client import AsyncClient
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import InvalidRequestError, UnavailableError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.worker.server import WorkerServer
from tests.support.free_ports import free_ports
from tests.support.peft_adapters import write_adapter
from tests.support.servers import eventually
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

PROMPT = [int(token) for token in torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(5))]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and adapters ``one`` and ``other`` below ``adapters``."""
    folder = tmp_path_factory.mktemp("fleet-adapters")
    model = make_tiny_model(folder / "tiny")
    sizes = LinearSizes.of(read_model_config(resolve_model(str(model))))
    for seed, name in enumerate(("one", "other")):
        write_adapter(folder / "adapters" / name, sizes, seed=seed, strength=2.0)
    return folder


@dataclass
class Fleet:
    """Two workers at ports of their own, and a router before them."""

    folder: Path
    secret: FleetSecret = field(default_factory=fleet_secret.generate)
    ports: tuple[int, ...] = field(default_factory=lambda: tuple(free_ports(2)))
    workers: dict[int, WorkerServer] = field(default_factory=dict)
    address: str = ""

    async def start(self, number: int) -> None:
        engine = EngineConfig(
            model=str(self.folder / "tiny"),
            adapter_root=str(self.folder / "adapters"),
            dtype="float32",
            max_total_tokens=4096,
            threads=1,
        )
        config = WorkerConfig(
            engine=engine, worker_id=f"worker-{number}", port=self.ports[number], in_process=True
        )
        self.workers[number] = WorkerServer(config, self.secret)
        await self.workers[number].start()

    async def stop(self, number: int) -> None:
        await self.workers.pop(number).stop(0.0)

    async def run(self, *arguments: str) -> Result:
        """``prefixmesh adapter`` with the rest; its error where it fails."""
        command = ("adapter", *arguments, "--router", self.address)
        return await asyncio.to_thread(CliRunner().invoke, main, command)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    fleet = Fleet(folder)
    router = RouterServer(
        RouterConfig(workers=tuple(f"127.0.0.1:{port}" for port in fleet.ports), model=str(folder / "tiny")),
        fleet.secret,
    )
    try:
        for number in range(2):
            await fleet.start(number)
        fleet.address = (await router.start()).address
        await eventually(lambda: len(router.core.registry.ready) == 2, WAIT_S)
        async with AsyncClient(fleet.address) as client:
            yield fleet, client
    finally:
        await router.stop(0.0)
        for number in list(fleet.workers):
            await fleet.stop(number)


async def said(client: AsyncClient, adapter: str, first: int = 3) -> tuple[int, ...]:
    """An answer's tokens."""
    answer = await client.generate(
        [first, *PROMPT], adapter=adapter, max_tokens=6, temperature=0, ignore_eos=True
    )
    return tuple(answer.token_ids)


async def test_adapters_are_loaded_rolled_over_and_given_to_a_worker_that_restarts(folder: Path) -> None:
    async with running(folder) as (fleet, client):
        for name in ("one", "other"):
            loaded = await fleet.run("load", name, name)
            assert loaded.exit_code == 0, loaded.output
        base, one, other = [await said(client, name) for name in ("", "one", "other")]
        assert len({base, one, other}) == 3

        # Other weights under a name, while it is asked for all the time.
        assert (await fleet.run("load", "x", "one")).exit_code == 0
        answers: set[tuple[int, ...]] = set()
        rolling = asyncio.create_task(fleet.run("load", "x", "other"))
        while not rolling.done():
            answers.add(await said(client, "x"))
        assert (await rolling).exit_code == 0, (await rolling).output
        assert answers <= {one, other}
        assert await said(client, "x") == other

        # What no worker can load changes nothing.
        refused = await fleet.run("load", "x", "nowhere")
        assert refused.exit_code == 2
        assert "path" in refused.stderr
        assert await said(client, "x") == other
        broken = folder / "adapters" / "broken"
        shutil.copytree(folder / "adapters" / "other", broken)
        (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
        assert (await fleet.run("load", "x", "broken")).exit_code == 2
        assert await said(client, "x") == other

        # Both restart: nobody tells them but the router.
        for number in range(2):
            await fleet.stop(number)
        for number in range(2):
            await fleet.start(number)

        async def is_back() -> bool:
            try:
                return await said(client, "x") == other and await said(client, "one") == one
            except UnavailableError:
                return False

        await eventually(is_back, WAIT_S)
        unloaded = await fleet.run("unload", "x")
        assert unloaded.exit_code == 0, unloaded.output
        with pytest.raises(InvalidRequestError, match="no adapter 'x' is loaded here"):
            await said(client, "x")
