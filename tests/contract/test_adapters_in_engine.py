"""LoRA adapters in a whole engine over a tiny real model: names, contents, slots, namespaces and answers, from a folder on disk (F47)."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prefixmesh import tokens
from prefixmesh.cache.namespace import derive_namespace
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.messages import (
    AdapterAnswer,
    AdapterInfo,
    Admitted,
    Ended,
    Event,
    ListAdapters,
    LoadAdapter,
    Refused,
    Submit,
    TokensOut,
    UnloadAdapter,
)
from tests.support.peft_adapters import write_adapter
from tests.support.scheduling import greedy
from tests.support.tiny_model import make_tiny_model

PROMPT = [5, 9, 2, 14, 7, 11, 3, 8, 21, 34]


class Driver:
    """An engine's core, driven step by step; every event is kept."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.events: list[Event] = []
        self.questions = 0

    def submit(
        self, request_id: str, adapter: str = "", *, max_tokens: int = 6, prompt: Sequence[int] = PROMPT
    ) -> None:
        namespace = derive_namespace(
            b"k" * 16, tenant="t", adapter_digest=adapter, model_revision="r", caller_key=""
        )
        command = Submit(
            request_id=request_id,
            namespace=namespace,
            tokens=tokens.pack(prompt),
            sampling=greedy(max_tokens),
            adapter=adapter,
        )
        self.events += self.core.submit(command, 0.0)

    def step(self) -> None:
        self.events += self.core.step(0.0)
        self.core.check_invariants()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def answer(self, request_id: str) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, TokensOut) and event.request_id == request_id
            for token in event.token_ids
        ]

    def ask(self, adapter: str = "") -> list[int]:
        """One request alone."""
        self.questions += 1
        name = f"ask-{self.questions}"
        self.submit(name, adapter)
        self.run()
        [ended] = [e for e in self.events if isinstance(e, Ended) and e.request_id == name]
        assert ended.reason == "length", ended
        return self.answer(name)

    def cached_tokens(self) -> int:
        """Of the last request that was admitted."""
        return [event for event in self.events if isinstance(event, Admitted)][-1].cached_tokens

    def begin(self, command: type[LoadAdapter | UnloadAdapter], **fields: object) -> int:
        self.questions += 1
        self.events += self.core.handle(command(question=self.questions, **fields), 0.0)  # type: ignore[arg-type]
        return self.questions

    def answered(self, question: int) -> AdapterAnswer | None:
        found = [e for e in self.events if isinstance(e, AdapterAnswer) and e.question == question]
        return found[0] if found else None

    def load(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        question = self.begin(LoadAdapter, name=name, path=path, pinned=pinned)
        self.run()
        answer = self.answered(question)
        assert answer is not None
        assert answer.error is None, answer
        return answer.adapters[0]

    def unload(self, name: str) -> None:
        question = self.begin(UnloadAdapter, name=name)
        self.run()
        answer = self.answered(question)
        assert answer is not None
        assert answer.error is None, answer

    def list(self) -> tuple[AdapterInfo, ...]:
        [answer] = self.core.handle(ListAdapters(question=-1), 0.0)
        assert isinstance(answer, AdapterAnswer)
        return answer.adapters


@dataclasses.dataclass(frozen=True)
class Shop:
    """A model, and a folder of adapters for it."""

    model: Path
    root: Path
    sizes: LinearSizes

    def engine(self, **settings: object) -> Driver:
        config = EngineConfig(
            model=str(self.model),
            dtype="float32",
            device="cpu",
            max_total_tokens=512,
            adapter_root=str(self.root),
            **settings,  # type: ignore[arg-type]
        )
        return Driver(build_engine(config))

    def write(self, name: str, seed: int) -> None:
        write_adapter(self.root / name, self.sizes, seed=seed, strength=2.0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shop(tiny: Path, tmp_path: Path) -> Iterator[Shop]:
    sizes = LinearSizes.of(read_model_config(resolve_model(str(tiny))))
    shop = Shop(tiny, tmp_path, sizes)
    for seed, name in enumerate(("a", "b", "c")):
        shop.write(name, seed)
    yield shop
    shutil.rmtree(tmp_path)


@pytest.fixture
def driver(shop: Shop) -> Driver:
    return shop.engine(max_resident_adapters=2)


def test_each_adapter_answers_in_its_own_way_and_shares_no_kv(driver: Driver) -> None:
    """F47: adapter A then B on one worker: separate. Alone, or all in one batch, the answers are the same."""
    digests = ["", driver.load("a", "a").digest, driver.load("b", "b").digest]
    alone = []
    for digest in digests:
        alone.append(driver.ask(digest))
        assert driver.cached_tokens() == 0
    assert len(set(map(tuple, alone))) == 3
    for digest, expected in zip(digests, alone, strict=True):
        assert driver.ask(digest) == expected
        assert driver.cached_tokens() == len(PROMPT) - 1
    for index in range(6):
        driver.submit(f"batch-{index}", digests[index % 3])
    driver.run()
    assert [driver.answer(f"batch-{index}") for index in range(6)] == [alone[index % 3] for index in range(6)]


def test_other_weights_under_the_same_name_are_another_adapter(driver: Driver, shop: Shop) -> None:
    """F47: loaded, used, reloaded with other weights: 0 cached tokens and the new answer, while who runs keeps the old weights."""
    old = driver.load("x", "a")
    old_answer = driver.ask(old.digest)
    driver.submit("running", old.digest)
    driver.step()
    shop.write("x", seed=9)
    new = driver.load("x", "x")
    assert new.digest != old.digest
    new_answer = driver.ask(new.digest)
    assert driver.cached_tokens() == 0
    assert new_answer != old_answer
    assert driver.answer("running") == old_answer
    driver.submit("late", old.digest)
    assert driver.events[-1] == Refused(
        request_id="late",
        field="adapter",
        problem="no adapter of this content is loaded here",
        adapter_left=True,
    )
    assert [info.digest for info in driver.list()] == [new.digest]


def test_equal_content_under_another_name_is_the_same_adapter(driver: Driver, shop: Shop) -> None:
    """Nothing is computed or read again: the digest is the content's, whatever it is called and wherever it lies."""
    shutil.copytree(shop.root / "a", shop.root / "copy")
    one, two = driver.load("one", "a"), driver.load("two", "copy")
    assert one.digest == two.digest
    driver.ask(one.digest)
    driver.ask(two.digest)
    assert driver.cached_tokens() == len(PROMPT) - 1
    driver.unload("one")
    assert driver.ask(two.digest)


def test_more_adapters_than_slots_take_turns(driver: Driver) -> None:
    """Three adapters in two slots: all are answered, the least recently used one leaves, and nothing else changes."""
    infos = [driver.load(name, name) for name in "abc"]
    assert [info.resident for info in driver.list()] == [True, True, False]
    answers = {info.digest: driver.ask(info.digest) for info in infos}
    assert [info.resident for info in driver.list()] == [False, True, True]
    for round_ in range(3):
        for info in infos:
            driver.submit(f"{round_}-{info.name}", info.digest, max_tokens=6)
    driver.run()
    for round_ in range(3):
        for info in infos:
            assert driver.answer(f"{round_}-{info.name}") == answers[info.digest]


def test_a_pinned_adapter_stays_and_others_take_turns_beside_it(driver: Driver) -> None:
    """Pinned: never replaced. When all slots are pinned, others are refused with the numbers."""
    driver.load("a", "a", pinned=True)
    b, c = driver.load("b", "b"), driver.load("c", "c")
    for _ in range(2):
        driver.ask(b.digest)
        driver.ask(c.digest)
        assert driver.list()[0].resident
    driver.load("b", "b", pinned=True)
    driver.submit("x", c.digest)
    [refused] = [e for e in driver.events if isinstance(e, Refused)]
    assert refused.field == "", "a matter of room, not of the request"
    assert "2 of" in refused.problem
    question = driver.begin(LoadAdapter, name="c", path="c", pinned=True)
    driver.run()
    answer = driver.answered(question)
    assert answer is not None
    assert answer.error == "over_budget"
    assert "3 adapters" in answer.problem


def test_an_unload_refuses_at_once_and_answers_when_the_running_have_ended(driver: Driver) -> None:
    digest = driver.load("a", "a").digest
    expected = driver.ask(digest)
    driver.submit("running", digest)
    driver.step()
    question = driver.begin(UnloadAdapter, name="a")
    assert driver.list() == ()
    driver.submit("late", digest)
    assert isinstance(driver.events[-1], Refused)
    driver.step()
    assert driver.answered(question) is None
    driver.run()
    assert driver.answer("running") == expected
    order = [type(event) for event in driver.events[-2:]]
    assert order == [Ended, AdapterAnswer]
    again = driver.begin(UnloadAdapter, name="a")
    answer = driver.answered(again)
    assert answer is not None
    assert answer.error == "not_found"


def test_files_that_changed_since_are_never_read_as_the_old_ones(driver: Driver, shop: Shop) -> None:
    """A content that left memory is read again: what is no longer it is refused, and when it is back, served."""
    a, b, c = (driver.load(name, name) for name in "abc")
    expected = driver.ask(a.digest)
    driver.ask(b.digest)
    driver.ask(c.digest)
    shop.write("a", seed=7)
    driver.submit("x", a.digest)
    driver.run()
    [refused] = [e for e in driver.events if isinstance(e, Refused)]
    assert refused.field == "adapter"
    assert "have changed since" in refused.problem
    shop.write("a", seed=0)
    assert driver.ask(a.digest) == expected


def test_an_aborted_request_gives_its_adapter_back_in_whatever_state_it_is(driver: Driver) -> None:
    digests = [driver.load(name, name).digest for name in "abc"]
    driver.submit("r0", digests[0], max_tokens=50)
    driver.submit("r1", digests[1], max_tokens=50)
    driver.submit("waits", digests[2], max_tokens=50)
    driver.step()
    assert [info.running_requests for info in driver.list()] == [1, 1, 1]
    assert not driver.answer("waits")
    for name in ("waits", "r0", "r1"):
        driver.events += driver.core.abort(name, 0.0)
        assert driver.events[-1].request_id == name  # type: ignore[union-attr]
    assert [info.running_requests for info in driver.list()] == [0, 0, 0]
    driver.run()


def test_a_request_waits_for_a_slot_no_longer_than_its_queue_timeout(driver: Driver) -> None:
    """And it is told so, while those before it run on."""
    digests = [driver.load(name, name).digest for name in "abc"]
    driver.submit("r0", digests[0], max_tokens=50)
    driver.submit("r1", digests[1], max_tokens=50)
    driver.step()
    command = Submit(
        request_id="waits",
        namespace=b"n" * 16,
        tokens=tokens.pack(PROMPT),
        sampling=greedy(3),
        adapter=digests[2],
        queue_timeout_s=2.0,
    )
    driver.events += driver.core.submit(command, 10.0)
    driver.events += driver.core.step(11.0)
    assert not [e for e in driver.events if isinstance(e, Ended)]
    driver.events += driver.core.step(12.0)
    [ended] = [e for e in driver.events if isinstance(e, Ended)]
    assert (ended.request_id, ended.reason) == ("waits", "queue_timeout")
    driver.run()
    assert len(driver.answer("r0")) == len(driver.answer("r1")) == 50


def test_adapters_named_in_the_settings_are_there_at_the_start(shop: Shop) -> None:
    driver = shop.engine(adapters=("one=a", "two=b"))
    assert [info.name for info in driver.core.info.adapters] == ["one", "two"]
    assert all(info.resident for info in driver.core.info.adapters)
    assert "adapters" in driver.core.info.memory_sums
    with pytest.raises(ConfigError, match=r"adapter x=nowhere cannot be loaded: path: there is no folder"):
        shop.engine(adapters=("x=nowhere",))
    with pytest.raises(ConfigError, match="adapter_root must be a folder"):
        build_engine(EngineConfig(model=str(shop.model), adapter_root=str(shop.root / "none")))


def test_without_an_adapter_root_there_are_no_adapters(shop: Shop) -> None:
    driver = shop.engine()
    bare = Driver(
        build_engine(EngineConfig(model=str(shop.model), dtype="float32", device="cpu", max_total_tokens=512))
    )
    question = bare.begin(LoadAdapter, name="a", path="a")
    bare.run()
    answer = bare.answered(question)
    assert answer is not None
    assert answer.error == "invalid"
    assert "without an adapter_root" in answer.problem
    bare.submit("x", driver.load("a", "a").digest)
    assert isinstance(bare.events[-1], Refused)
    assert bare.ask() == driver.ask()
