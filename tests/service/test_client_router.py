"""The client library and the command line through a real router, in front of fake workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixmesh import fleet_secret
from prefixmesh.cli.main import main
from prefixmesh.client import AsyncClient
from prefixmesh.errors import AccessDeniedError, AuthenticationError
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.router_kit import tiny_model
from tests.support.servers import eventually

HISTORY = [
    {"role": "system", "content": "The policy of this shop. " * 20},
    {"role": "user", "content": "Who is there?"},
]


@asynccontextmanager
async def router_address(api_keys_file: Path | None = None) -> AsyncIterator[str]:
    """A router before two workers; its address once both are ready."""
    secret = fleet_secret.generate()
    workers = [await FakeWorker(secret, f"w{i}").start() for i in range(2)]
    config = RouterConfig(
        workers=tuple(worker.address for worker in workers),
        model=MODEL,
        api_keys_file=None if api_keys_file is None else str(api_keys_file),
    )
    server = RouterServer(config, secret, model=tiny_model())
    bound = await server.start()
    try:
        await eventually(lambda: len(server.core.registry.ready) == len(workers))
        yield bound.address
    finally:
        await server.stop(0.0)
        for worker in workers:
            await worker.kill()


async def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)


async def test_second_turn_finds_the_first_in_the_cache() -> None:
    """Started tells how the router decided; the second turn goes to the same worker, with the first turn cached."""
    async with router_address() as address, AsyncClient(address, tenant="acme") as client:
        first = await client.generate(HISTORY)
        longer = [*HISTORY, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
        second = await client.generate(longer)
    assert first.started.routing is not None
    assert first.started.routing.policy == "cost"
    assert first.cached_tokens == 0
    assert second.worker_id == first.worker_id
    assert second.cached_tokens >= first.prompt_tokens


async def test_key_made_by_the_command_line_opens_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From ``keys new`` through the keys file to an answer; without the key, one line and exit code 1."""
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    keys_file = tmp_path / "keys"
    key = (await run("keys", "new", "--tenant", "acme", "--file", str(keys_file))).stdout.strip()
    async with router_address(keys_file) as address:
        served = await run("generate", "hi", "--address", address, env={"PREFIXMESH_API_KEY": key})
        refused = await run("generate", "hi", "--address", address)
    assert served.exit_code == 0, served.output
    assert "prompt tokens · w" in served.stderr
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: credentials are missing")


async def test_wrong_key_and_foreign_tenant_are_typed_errors(tmp_path: Path) -> None:
    """A tenant named beside a key must be the key's own (F49)."""
    keys_file = tmp_path / "keys"
    key = (await run("keys", "new", "--tenant", "acme", "--file", str(keys_file))).stdout.strip()
    async with router_address(keys_file) as address:
        async with AsyncClient(address, api_key="pm-wrong") as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.generate("hi")
            with pytest.raises(AuthenticationError):
                await stranger.list_models()
        async with AsyncClient(address, api_key=key, tenant="other") as impostor:
            with pytest.raises(AccessDeniedError):
                await impostor.generate("hi")
        async with AsyncClient(address, api_key=key, tenant="acme") as acme:
            assert (await acme.generate("hi")).token_ids
