"""Adapters through ``EngineClient``: both makers answer alike, what is no adapter is refused before the engine hears of it (F73), no
pickle is ever opened (F72), and a thousand loads leave nothing behind (F35)."""

import contextlib
import gc
import pickle
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    BudgetError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PrefixmeshError,
)
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.peft_adapter import WEIGHTS_FILE
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.adapter_calls import AdapterCalls
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import (
    AdapterAnswer,
    AdapterCommand,
    AdapterProblem,
    LoadAdapter,
    Submit,
    TokensOut,
)
from prefixmesh.worker.process_engine import ProcessEngine
from tests.contract.test_adapters_in_engine import PROMPT, Shop
from tests.support.peft_adapters import write_adapter
from tests.support.scheduling import greedy
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shop(tiny: Path, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tiny, tmp_path / "root", LinearSizes.of(read_model_config(resolve_model(str(tiny)))))
    for seed, name in enumerate(("a", "b", "c")):
        shop.write(name, seed)
    yield shop
    shutil.rmtree(tmp_path)


def config_of(shop: Shop) -> EngineConfig:
    return EngineConfig(
        model=str(shop.model),
        dtype="float32",
        device="cpu",
        max_total_tokens=512,
        threads=1,
        adapter_root=str(shop.root),
        max_resident_adapters=2,
    )


@contextlib.asynccontextmanager
async def running(engine: EngineClient) -> AsyncIterator[EngineClient]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: EngineClient, request_id: str, digest: str) -> list[int]:
    command = Submit(
        request_id=request_id,
        namespace=digest[:16].encode().rjust(16),
        tokens=tokens.pack(PROMPT),
        sampling=greedy(4),
        adapter=digest,
    )
    return [
        token
        async for event in engine.submit(command)
        if isinstance(event, TokensOut)
        for token in event.token_ids
    ]


@pytest.mark.parametrize(
    "make", [InProcessEngine, pytest.param(ProcessEngine, marks=pytest.mark.slow)], ids=["thread", "process"]
)
async def test_both_engines_load_list_and_unload(
    shop: Shop, make: type[InProcessEngine | ProcessEngine]
) -> None:
    async with running(make(config_of(shop))) as engine:
        assert await engine.list_adapters() == ()
        a = await engine.load_adapter("a", "a", pinned=True)
        b = await engine.load_adapter("b", "b")
        assert await answer(engine, "1", a.digest) != await answer(engine, "2", b.digest)
        assert [(info.name, info.pinned) for info in await engine.list_adapters()] == [
            ("a", True),
            ("b", False),
        ]
        with pytest.raises(InvalidRequestError, match="path: there is no folder"):
            await engine.load_adapter("x", "nowhere")
        with pytest.raises(InvalidRequestError, match="name: must have"):
            await engine.load_adapter("no name", "a")
        await engine.load_adapter("b", "b", pinned=True)
        with pytest.raises(BudgetError, match="3 adapters"):
            await engine.load_adapter("c", "c", pinned=True)
        await engine.unload_adapter("a")
        with pytest.raises(NotFoundError, match="no adapter has the name 'a'"):
            await engine.unload_adapter("a")
        assert [info.name for info in await engine.list_adapters()] == ["b"]


async def never_asked(_: Callable[[int], AdapterCommand]) -> AdapterAnswer:
    raise AssertionError("the engine was asked")


def calls(
    shop: Shop, ask: Callable[[Callable[[int], AdapterCommand]], Awaitable[AdapterAnswer]]
) -> AdapterCalls:
    adapters = AdapterCalls(str(shop.root), ask)
    adapters.linear_sizes = shop.sizes
    return adapters


async def test_what_is_no_adapter_is_refused_before_the_engine_hears_of_it(shop: Shop) -> None:
    """F73: so that a long step of the engine does not hold up the answer."""
    write_adapter(shop.root / "odd", shop.sizes)
    (shop.root / "odd" / WEIGHTS_FILE).write_bytes(b"junk" * 1000)
    for path in ("odd", "../..", "nowhere"):
        with pytest.raises(InvalidRequestError):
            await calls(shop, never_asked).load("x", path, pinned=False)
    with pytest.raises(AssertionError, match="was asked"):
        await calls(shop, never_asked).load("x", "a", pinned=False)


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        ("invalid", InvalidRequestError),
        ("not_found", NotFoundError),
        ("over_budget", BudgetError),
        ("overloaded", OverloadedError),
    ],
)
async def test_what_the_engine_refuses_is_told_as_an_error_of_its_kind(
    shop: Shop, problem: AdapterProblem, error: type[PrefixmeshError]
) -> None:
    async def refused(make: Callable[[int], AdapterCommand]) -> AdapterAnswer:
        return AdapterAnswer(question=make(5).question, error=problem, field="path", problem="because")

    with pytest.raises(error, match="because"):
        await calls(shop, refused).load("x", "a", pinned=False)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self._target,))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"])
@pytest.mark.parametrize("how", ["torch", "plain"])
async def test_a_pickle_bomb_in_an_adapters_folder_runs_nothing(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """F72: whatever it is called, and however it was pickled; ``torch.load`` is not even tried."""
    target, folder = tmp_path / "boom", shop.root / "bomb"
    write_adapter(folder, shop.sizes)
    if name.endswith(".bin"):
        (folder / WEIGHTS_FILE).unlink()
    if how == "torch":
        torch.save(Bomb(target), folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Bomb(target)))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    for module in (pickle.loads, pickle.load, pickle.Unpickler):
        monkeypatch.setattr(pickle, module.__name__, lambda *_, **__: pytest.fail("something was unpickled"))
    with pytest.raises(InvalidRequestError):
        await calls(shop, never_asked).load("x", "bomb", pinned=False)
    driver = shop.engine()
    question = driver.begin(LoadAdapter, name="x", path="bomb", pinned=False)
    driver.run()
    told = driver.answered(question)
    assert told is not None
    assert told.error == "invalid"
    assert not target.exists(), "the bomb went off"


def check_flat(shop: Shop, cycles: int) -> None:
    """Load, answer, unload, in turns over three adapters and two slots; after some for warm-up nothing grows any more."""
    driver = shop.engine(max_resident_adapters=2)
    process = psutil.Process()

    def state() -> tuple[int, int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_threads(), process.num_fds()

    def cycle(number: int) -> None:
        name = "abc"[number % 3]
        driver.ask(driver.load(name, name).digest)
        driver.unload(name)
        driver.events.clear()

    for number in range(30):
        cycle(number)
    memory, threads, descriptors = state()
    for number in range(cycles):
        cycle(number)
    after = state()
    assert after[1:] == (threads, descriptors)
    assert after[0] - memory < 8 * 2**20, f"{(after[0] - memory) / cycles:.0f} bytes a cycle are left"
    assert driver.list() == ()


@pytest.mark.slow
def test_loads_and_unloads_leave_nothing_behind(shop: Shop) -> None:
    """F35, with fewer."""
    check_flat(shop, 60)


@pytest.mark.deep
def test_a_thousand_loads_and_unloads_leave_nothing_behind(shop: Shop) -> None:
    """F35: memory, threads and descriptors are flat after warm-up."""
    check_flat(shop, 1000)
