"""The desk between table and files: threads that fail, commands in crowds, and requests that go while they wait."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, InvalidRequestError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.worker import adapter_desk
from prefixmesh.worker.adapter_desk import AdapterDesk, AdapterShop
from prefixmesh.worker.messages import AdapterAnswer, ListAdapters, LoadAdapter, Refused, UnloadAdapter
from tests.support.peft_adapters import write_adapter
from tests.support.scheduling import submit_command
from tests.unit.test_lora import SIZES


class FakeSlots:
    """Weights are the path; reading can be held up, or fail."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def read(self, path: str, digest: str) -> Any:
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return path

    def put(self, slot: int, weights: Any) -> None:
        self.held[slot] = weights

    def drop(self, slot: int) -> None:
        del self.held[slot]


def make_desk(root: Path, slots: FakeSlots, max_resident: int = 1) -> AdapterDesk:
    for seed, name in enumerate("ab"):
        write_adapter(root / name, SIZES, seed=seed)
    return AdapterDesk(
        AdapterShop(
            root=AdapterRoot(str(root)),
            sizes=SIZES,
            slots=slots,
            element_bytes=4,
            max_resident=max_resident,
            budget_bytes=2**20,
            max_waiting=10,
        )
    )


def load(desk: AdapterDesk, name: str, path: str) -> AdapterAnswer:
    desk.handle(LoadAdapter(question=1, name=name, path=path))
    desk.collect(None)
    [answer] = desk.take_events()
    assert isinstance(answer, AdapterAnswer)
    return answer


def enter(desk: AdapterDesk, request_id: str, digest: str) -> None:
    desk.enter(msgspec.structs.replace(submit_command(request_id, [1, 2]), adapter=digest), 0.0, None)


def ready(desk: AdapterDesk) -> list[str]:
    return [waiting.command.request_id for waiting in desk.take_ready()]


def test_the_engine_goes_on_while_weights_are_read(tmp_path: Path) -> None:
    """A request waits for its own adapter's weights only, and no method blocks meanwhile."""
    slots = FakeSlots()
    desk = make_desk(tmp_path, slots, max_resident=2)
    a = load(desk, "a", "a").adapters[0].digest
    slots.gate.clear()
    b = load_only_named(desk, "b")
    enter(desk, "rb", b)
    enter(desk, "ra", a)
    desk.collect(0.0)
    assert ready(desk) == ["ra"]
    assert len(desk) == 1
    assert desk.is_reading
    slots.gate.set()
    desk.collect(None)
    assert ready(desk) == ["rb"]
    assert sorted(slots.held.values()) == ["a", "b"]


def load_only_named(desk: AdapterDesk, name: str) -> str:
    """Load and take the answer, while weights cannot be read."""
    desk.handle(LoadAdapter(question=2, name=name, path=name))
    while True:
        desk.collect(0.01)
        for event in desk.take_events():
            assert isinstance(event, AdapterAnswer)
            return event.adapters[0].digest


def test_a_request_that_goes_while_its_weights_are_read_leaves_nothing(tmp_path: Path) -> None:
    slots = FakeSlots()
    desk = make_desk(tmp_path, slots)
    slots.gate.clear()
    digest = load_only_named(desk, "a")
    enter(desk, "r", digest)
    desk.leave("r")
    desk.handle(UnloadAdapter(question=3, name="a"))
    assert desk.take_events() == [AdapterAnswer(question=3)]
    slots.gate.set()
    desk.collect(None)
    assert (len(desk), ready(desk), slots.held) == (0, [], {})
    desk.table.check_invariants()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequestError("path", "not what it was"), "not what it was"),
        (OSError("a path of the machine"), "the adapter's weights could not be read: OSError"),
        (MemoryError(), "the adapter's weights could not be read: MemoryError"),
    ],
)
def test_weights_that_cannot_be_read_refuse_who_waits_and_the_next_is_served(
    tmp_path: Path, error: Exception, told: str
) -> None:
    slots = FakeSlots()
    slots.error = error
    desk = make_desk(tmp_path, slots)
    digest = load(desk, "a", "a").adapters[0].digest
    enter(desk, "r", digest)
    desk.collect(None)
    assert desk.take_events() == [Refused(request_id="r", field="adapter", problem=told)]
    slots.error = None
    enter(desk, "s", digest)
    desk.collect(None)
    assert ready(desk) == ["s"]


def test_an_error_that_nobody_expected_is_told_by_its_kind_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk(tmp_path, FakeSlots())
    monkeypatch.setattr(adapter_desk, "read_digest", lambda *_: 1 / 0)
    answer = load(desk, "a", "a")
    assert (answer.error, answer.problem) == ("invalid", "it could not be read: ZeroDivisionError")


def test_loads_in_crowds_are_refused_beyond_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_desk, "MAX_LOADS", 2)
    desk = make_desk(tmp_path, FakeSlots())
    for question in range(3):
        desk.handle(LoadAdapter(question=question, name="a", path="a"))
    [refused] = desk.take_events()
    assert isinstance(refused, AdapterAnswer)
    assert (refused.question, refused.error) == (2, "overloaded")
    desk.collect(None)
    assert [event.error for event in desk.take_events() if isinstance(event, AdapterAnswer)] == [None, None]


def test_a_name_that_is_none_is_refused_by_the_engine_too(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, FakeSlots())
    answer = load(desk, "../x", "a")
    assert (answer.error, answer.field) == ("invalid", "name")
    desk.handle(ListAdapters(question=9))
    assert desk.take_events() == [AdapterAnswer(question=9)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"adapters": ("a=b",)}, "adapters need an adapter_root"),
        ({"adapters": ("a",), "adapter_root": "x"}, "adapters must be NAME=PATH each"),
        ({"adapters": ("=b",), "adapter_root": "x"}, "adapters must be NAME=PATH each"),
        ({"adapters": ("a=",), "adapter_root": "x"}, "adapters must be NAME=PATH each"),
        ({"adapters": ("a b=c",), "adapter_root": "x"}, "adapters must be NAME=PATH each"),
        ({"max_resident_adapters": 0}, "max_resident_adapters must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(**settings)


def test_time_of_a_load_is_measured_from_its_beginning_until_the_weights_can_be_used(tmp_path: Path) -> None:
    """A router pays it for each adapter that is not in memory."""
    desk = make_desk(tmp_path, FakeSlots())
    times = iter((1.0, 1.2, 5.0, 5.1))
    desk._clock = lambda: next(times)
    assert desk.load_ms == 0.0
    a = load(desk, "a", "a").adapters[0].digest
    assert desk.load_ms == pytest.approx(200.0)
    assert desk.table.resident == (a,)
    b = load(desk, "b", "b").adapters[0].digest
    enter(desk, "r", b)
    desk.collect(None)
    assert desk.load_ms == pytest.approx(200.0 + adapter_desk.LOAD_WEIGHT * (100.0 - 200.0))
    assert desk.table.resident == (b,)
