"""LoRA adapters of a real model over the wire: right answers, whatever is cached, loaded anew, or sent through a router."""

import asyncio
import importlib.util
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import pytest
import torch

from prefixmesh.client import AsyncClient
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.fleet_secret import generate
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack, unpack
from prefixmesh.worker.server import WorkerServer
from tests.support.peft_adapters import write_adapter
from tests.support.servers import Worker, eventually, real_worker, rest_of
from tests.support.tiny_model import TinyShape, make_tiny_model

ROOT = Path(__file__).parents[2]
PROMPT = [int(token) for token in torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(5))]
LONG = 100
"""Tokens of an answer during which other things can happen."""

STRENGTH = 2.0
"""Large enough that an adapter's greedy tokens differ from the base's and from another's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and adapters ``one`` and ``other`` below ``adapters``."""
    folder = tmp_path_factory.mktemp("adapters-real")
    model = make_tiny_model(folder / "tiny")
    sizes = LinearSizes.of(read_model_config(resolve_model(str(model))))
    for seed, name in enumerate(("one", "other")):
        write_adapter(folder / "adapters" / name, sizes, seed=seed, strength=STRENGTH)
    return folder


def engine(folder: Path, *adapters: str, **settings: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192, "threads": 1} | settings
    return EngineConfig(
        model=str(folder / "tiny"), adapter_root=str(folder / "adapters"), adapters=adapters, **fields
    )


def request_for(adapter: str, tokens: int = 8, ids: list[int] = PROMPT) -> pb.GenerateRequest:
    sampling = pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(ids)), adapter=adapter, sampling=sampling)


async def load(worker: Worker, name: str, path: str) -> control.Adapter:
    try:
        answer = await worker.control.LoadAdapter(
            control.LoadAdapterRequest(name=name, path=path), metadata=worker.control_metadata()
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    adapter: control.Adapter = answer.adapter
    return adapter


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int]]:
    """What base, ``one`` and ``other`` say, ``LONG`` tokens each, without any cache."""

    async def ask() -> dict[str, list[int]]:
        config = engine(folder, "one=one", "other=other", prefix_cache="off")
        async with real_worker(config) as worker:
            names = ("", "one", "other")
            answers = await asyncio.gather(*(worker.generate(request_for(name, LONG)) for name in names))
            return {name: answer.token_ids for name, answer in zip(names, answers, strict=True)}

    return asyncio.run(ask())


async def test_adapters_and_base_answer_as_if_alone_whoever_came_before(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    """F46, F47, F48: each warm within itself and cold after the others; tokens equal those of a worker without a cache."""
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    async with real_worker(engine(folder, "one=one")) as worker:
        digest = (await load(worker, "other", "other")).digest
        for expected_cached in (0, len(PROMPT) - 1):
            for name in ("one", "", "other"):
                answer = await worker.generate(request_for(name))
                assert answer.started.cached_tokens.device == expected_cached, name
                assert answer.token_ids == alone[name][:8], name
        assert answer.started.adapter_digest == digest


async def test_a_name_loaded_anew_while_requests_run(folder: Path, alone: dict[str, list[int]]) -> None:
    """F47: those that run keep their weights to the end, those that come get the new ones and nothing of the old one's cache."""
    async with real_worker(engine(folder, "x=one")) as worker:
        old = worker.inference.Generate(request_for("x", LONG))
        assert (await old.read()).HasField("started")
        await load(worker, "x", "other")
        new = await worker.generate(request_for("x", LONG))
        assert new.started.cached_tokens.device == 0
        assert new.token_ids == alone["other"]
        rest = [int(token) for message in await rest_of(old) for token in unpack(message.delta.token_ids)]
        assert rest == alone["one"]


async def test_unloading_waits_for_what_runs_and_refuses_what_comes(folder: Path) -> None:
    """The running answer is whole and right; the name is unknown from the first moment."""
    async with real_worker(engine(folder, "x=one")) as worker:
        call = worker.inference.Generate(request_for("x", LONG))
        await call.read()
        unloading = asyncio.ensure_future(
            worker.control.UnloadAdapter(
                control.UnloadAdapterRequest(name="x"), metadata=worker.control_metadata()
            )
        )
        await eventually(lambda: _lists(worker, []))
        with pytest.raises(InvalidRequestError, match="no adapter 'x' is loaded here"):
            await worker.generate(request_for("x"))
        messages = await rest_of(call)
        assert messages[-1].finished.usage.completion_tokens == LONG
        await unloading


async def _lists(worker: Worker, names: list[str]) -> bool:
    models = await worker.inference.ListModels(pb.ListModelsRequest())
    return list(models.models[0].adapters) == names


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n." * 100)


def _wrong_rank(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', '"r": 5'))


def _not_lora(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"LORA"', '"IA3"'))


def _link_outside(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (_pickle, "never opened"),
        (_cut, ""),
        (_garbage, ""),
        (_wrong_rank, "rank"),
        (_not_lora, "LORA"),
        (_link_outside, "outside the adapter root"),
    ],
)
async def test_what_is_no_safe_adapter_is_refused_over_the_wire(
    folder: Path, break_: Callable[[Path], None], words: str
) -> None:
    """F73: the path is named as the field, the adapter that has the name stays, and the next request is served."""
    broken = folder / "adapters" / "broken"
    shutil.copytree(folder / "adapters" / "other", broken)
    try:
        break_(broken)
        async with real_worker(engine(folder, "x=one")) as worker:
            before = await worker.generate(request_for("x"))
            for path in ("broken", "../adapters/broken", str(broken), "..", "/etc", "none", ""):
                with pytest.raises(InvalidRequestError) as caught:
                    await load(worker, "x", path)
                assert caught.value.field == "path"
                if path == "broken":
                    assert words in caught.value.problem
            with pytest.raises(InvalidRequestError) as caught:
                await load(worker, "../x", "other")
            assert caught.value.field == "name"
            after = await worker.generate(request_for("x"))
            assert after.token_ids == before.token_ids
            assert after.started.cached_tokens.device == len(PROMPT) - 1
    finally:
        shutil.rmtree(broken)


@asynccontextmanager
async def fleet(folder: Path, *adapters: tuple[str, ...]) -> AsyncIterator[tuple[str, list[Worker]]]:
    """A router before one worker for each set of adapters."""
    secret = generate()
    async with AsyncExitStack() as stack:
        workers = []
        for index, names in enumerate(adapters):
            config = WorkerConfig(engine=engine(folder, *names), worker_id=f"worker-{index}", in_process=True)
            server = WorkerServer(config, secret)
            bound = await server.start()
            stack.push_async_callback(server.stop, 0.0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(bound.address))
            workers.append(Worker(server=server, bound=bound, secret=secret, channel=channel))
        addresses = tuple(worker.bound.address for worker in workers)
        router = RouterServer(RouterConfig(workers=addresses, model=str(folder / "tiny")), secret)
        bound_router = await router.start()
        stack.push_async_callback(router.stop, 0.0)
        await eventually(lambda: len(router.core.registry.ready) == len(workers))
        yield bound_router.address, workers


@pytest.mark.slow
async def test_a_router_before_two_workers_of_which_one_has_the_adapter(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    """Every request for it is answered there and rightly, while it is loaded anew there, too; the base model is served by both."""
    async with fleet(folder, ("x=one",), ()) as (address, workers), AsyncClient(address) as client:

        async def ask(adapter: str, ids: list[int] = PROMPT) -> Any:
            return await client.generate(ids, adapter=adapter, max_tokens=8, temperature=0, ignore_eos=True)

        for expected_cached in (0, len(PROMPT) - 1):
            answer = await ask("x")
            assert (answer.worker_id, answer.cached_tokens) == ("worker-0", expected_cached)
            assert list(answer.token_ids) == alone["one"][:8]
        bases = await asyncio.gather(*(ask("", [seed, *PROMPT]) for seed in range(10, 26)))
        assert {answer.worker_id for answer in bases} == {"worker-0", "worker-1"}
        await load(workers[0], "x", "other")
        answer = await ask("x")
        assert (answer.worker_id, answer.cached_tokens) == ("worker-0", 0)
        assert list(answer.token_ids) == alone["other"][:8]
        await load(workers[1], "y", "one")
        assert list((await ask("y")).token_ids) == alone["one"][:8]
        with pytest.raises(InvalidRequestError, match="no adapter 'z' is loaded here"):
            await ask("z")


def program(path: str) -> ModuleType:
    """A script or example as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_the_example_shows_right_answers_apart_and_wrong_ones_where_kv_is_shared(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    """What `examples/adapters_apart.py` does to a real adapter, on tiny ones: with the adapter left out of the key each answers from
    the other's KV, and wrongly; and nothing of that stays behind."""
    example = program("examples/adapters_apart.py")
    async with (
        real_worker(engine(folder, "x=one")) as worker,
        AsyncClient(worker.bound.address) as client,
    ):
        shown = await example.compare(client, PROMPT, "x", caches="first")
        everyone = (shown.base, shown.adapter, shown.adapter_on_base, shown.base_on_adapter)
        assert [said.cached_tokens for said in everyone] == [0, 0, len(PROMPT) - 1, len(PROMPT) - 1]
        for said, right in ((shown.base, alone[""]), (shown.adapter, alone["one"])):
            assert list(said.token_ids) == right[: len(said.token_ids)]
        for said, right in ((shown.adapter_on_base, alone["one"]), (shown.base_on_adapter, alone[""])):
            assert list(said.token_ids) != right[: len(said.token_ids)]
        assert (await worker.generate(request_for(""))).started.cached_tokens.device == 0
        assert (await worker.generate(request_for("x"))).started.cached_tokens.device == 0


@pytest.mark.slow
async def test_the_sample_adapters_maker_fits_a_model_as_the_worker_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model: what the maker's own forward pass says with the adapter is what a worker answers with the file it wrote."""
    maker = program("scripts/make_sample_adapter.py")
    monkeypatch.setattr(maker, "STEPS", 6)
    monkeypatch.setattr(maker, "FACTS", dict(list(maker.FACTS.items())[:2]))
    model = make_tiny_model(tmp_path / "tiny", TinyShape(num_layers=3, tie_word_embeddings=True))
    files = resolve_model(str(model))
    trainee = maker.Trainee(files, read_model_config(files), torch.float32)
    lesson = maker.make_lesson(files)
    with torch.no_grad():
        first = trainee.logits(trainee.layers(trainee.embed(lesson.ids), 0, 3)[lesson.asked])
    wanted = torch.roll(lesson.ids, -1, 1)[lesson.asked]
    assert maker.fit(trainee, lesson) < torch.nn.functional.cross_entropy(first, wanted) - 0.1
    for _, b in trainee.lora.values():
        b.data.mul_(8.0)  # so few steps change little; here the answer must change
    maker.save(trainee, "tiny", tmp_path / "adapters" / "sample")
    ids = lesson.ids[0, : int(lesson.asked[0].nonzero()[0]) + 1].tolist()
    expected = list(ids)
    with torch.no_grad():
        for _ in range(8):
            hidden = trainee.layers(trainee.embed(torch.tensor([expected])), 0, 3)
            expected.append(int(trainee.logits(hidden[0, -1:]).argmax()))
    async with real_worker(engine(tmp_path, "sample=sample")) as worker:
        answer = await worker.generate(request_for("sample", 8, ids))
        base = await worker.generate(request_for("", 8, ids))
    assert answer.token_ids == expected[len(ids) :]
    assert base.token_ids != answer.token_ids
