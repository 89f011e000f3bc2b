"""An engine with a folder for its prefixes: the engine that comes after it finds them, and answers as it did."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.worker.engine_client import EngineClient, RequestEvent
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Stats, Submit, TokensOut
from prefixmesh.worker.process_engine import ProcessEngine
from prefixmesh.worker.tiers import disk_tier
from tests.support.tiny_model import TinyShape, make_tiny_model

PROMPT = [3 + position % 400 for position in range(2000)]
WAIT_S = 120.0
"""Far more than a disk takes, on a machine that is busy with others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


@asynccontextmanager
async def running(
    model: Path,
    folder: Path,
    make: Callable[[EngineConfig], EngineClient] = InProcessEngine,
    *,
    page_size: int = 1,
    disk_cache_size: float = 1.0,
) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        max_total_tokens=8192,
        threads=1,
        page_size=page_size,
        hicache_ratio=1.0,
        disk_cache_dir=str(folder),
        disk_cache_size=disk_cache_size,
    )
    engine = make(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: EngineClient, request_id: str, prompt: list[int], max_tokens: int = 8) -> "Asked":
    sampling = EngineSampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=()
    )
    command = Submit(
        request_id=request_id, namespace=b"n" * 16, tokens=tokens.pack(prompt), sampling=sampling
    )
    return Asked([event async for event in engine.submit(command)])


class Asked:
    """A request and its answer."""

    def __init__(self, events: list[RequestEvent]) -> None:
        assert isinstance(events[0], Admitted)
        assert isinstance(events[-1], Ended), events[-1]
        self.admitted = events[0]
        self.answer = [token for event in events if isinstance(event, TokensOut) for token in event.token_ids]


async def stats_when(engine: EngineClient, holds: Callable[[Stats], bool]) -> Stats:
    async with asyncio.timeout(WAIT_S):
        while not holds(stats := await engine.stats()):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    return stats


def change_every_file(folder: Path) -> None:
    """One bit of the KV in each."""
    for path in folder.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 0x40
        path.write_bytes(raw)


async def fill(model: Path, folder: Path, page_size: int = 1) -> list[int]:
    """Ask once, and wait until the prompt's whole blocks are on the disk; the answer."""
    async with running(model, folder, page_size=page_size) as engine:
        asked = await ask(engine, "first", PROMPT)
        assert asked.admitted.cached_tokens == 0
        stats = await stats_when(engine, lambda stats: stats.tiers.disk_tokens >= 1984)
        assert stats.tiers.disk_written_tokens == stats.tiers.disk_tokens
    return asked.answer


@pytest.mark.parametrize("page_size", [1, 16, 64])
async def test_after_a_restart_the_first_request_has_its_prefix(
    model: Path, tmp_path: Path, page_size: int
) -> None:
    answer = await fill(model, tmp_path, page_size)
    async with running(model, tmp_path, page_size=page_size) as engine:
        asked = await ask(engine, "again", PROMPT)
        assert asked.answer == answer
        assert asked.admitted.cached_tokens >= 0.9 * len(PROMPT)
        assert asked.admitted.disk_tokens == asked.admitted.cached_tokens
        stats = await engine.stats()
        assert stats.cache.hit_tokens.disk == asked.admitted.cached_tokens
        assert stats.tiers.fetched_tokens == asked.admitted.cached_tokens
        warm = await ask(engine, "warm", PROMPT)
        assert warm.answer == answer
        assert (warm.admitted.cached_tokens, warm.admitted.disk_tokens) == (
            1999 // page_size * page_size,
            0,
        )
        await stats_when(engine, lambda stats: stats.protected_pages == stats.tiers.host_protected_pages == 0)


async def test_several_who_want_it_at_once_all_have_it_and_it_is_read_once(
    model: Path, tmp_path: Path
) -> None:
    answer = await fill(model, tmp_path)
    async with running(model, tmp_path) as engine:
        asked = await asyncio.gather(*(ask(engine, f"r{number}", PROMPT) for number in range(4)))
        assert [each.answer for each in asked] == [answer] * 4
        assert all(each.admitted.cached_tokens >= 1984 for each in asked)
        assert (await engine.stats()).tiers.fetched_tokens == 1984


async def test_another_models_weights_find_nothing(model: Path, tmp_path: Path) -> None:
    """F33; in the same namespace, which the router would never give them."""
    await fill(model, tmp_path / "kv")
    other = make_tiny_model(tmp_path / "other", TinyShape(seed=1))
    async with running(other, tmp_path / "cold") as engine:
        cold = await ask(engine, "cold", PROMPT)
    async with running(other, tmp_path / "kv") as engine:
        asked = await ask(engine, "again", PROMPT)
        assert asked.admitted.cached_tokens == 0
        assert asked.answer == cold.answer
        assert (await engine.stats()).tiers.disk_bad_files == 0


async def test_another_page_size_finds_nothing(model: Path, tmp_path: Path) -> None:
    answer = await fill(model, tmp_path, page_size=1)
    async with running(model, tmp_path, page_size=16) as engine:
        asked = await ask(engine, "again", PROMPT)
        assert (asked.admitted.cached_tokens, asked.answer) == (0, answer)


async def test_files_that_were_changed_are_never_answered_from(model: Path, tmp_path: Path) -> None:
    answer = await fill(model, tmp_path)
    change_every_file(tmp_path)
    async with running(model, tmp_path) as engine:
        asked = await ask(engine, "again", PROMPT)
        assert (asked.admitted.cached_tokens, asked.answer) == (0, answer)
        stats = await engine.stats()
        assert stats.tiers.disk_bad_files >= 1
        assert stats.tiers.recomputed_tokens >= 1984


async def test_a_second_engine_on_the_folder_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "LOCK_WAIT_S", 0.0)
    async with running(model, tmp_path) as engine:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            async with running(model, tmp_path):
                pass
        assert (await ask(engine, "served", PROMPT)).answer


async def test_a_conversation_goes_on_after_a_restart(model: Path, tmp_path: Path) -> None:
    """Answers are written, too."""
    first = PROMPT[:500]
    async with running(model, tmp_path) as engine:
        asked = await ask(engine, "first", first, max_tokens=80)
        await stats_when(engine, lambda stats: stats.tiers.disk_tokens >= 576)
    async with running(model, tmp_path) as engine:
        second = await ask(engine, "second", [*first, *asked.answer, 7, 8, 9])
        assert second.admitted.disk_tokens == 576


@pytest.mark.slow
async def test_an_engine_that_is_killed_leaves_what_it_had_written(model: Path, tmp_path: Path) -> None:
    """F32: no close, no flush; the next one opens the folder at once."""
    async with running(model, tmp_path, ProcessEngine) as engine:
        asked = await ask(engine, "first", PROMPT)
        await stats_when(engine, lambda stats: stats.tiers.disk_tokens >= 1024)
        assert isinstance(engine, ProcessEngine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.closed.wait()
    async with running(model, tmp_path, ProcessEngine) as engine:
        again = await ask(engine, "again", PROMPT)
        assert again.answer == asked.answer
        assert again.admitted.disk_tokens >= 1024
        assert (await engine.stats()).tiers.disk_bad_files == 0


@pytest.mark.slow
async def test_an_engine_that_is_ended_has_written_what_waited(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, ProcessEngine) as engine:
        await ask(engine, "first", PROMPT)
        await stats_when(engine, lambda stats: stats.tiers.backed_up_tokens >= 1984)
    async with running(model, tmp_path, ProcessEngine) as engine:
        assert (await engine.stats()).tiers.disk_tokens >= 1984
