"""The engine's core and its loop, over a fake model: errors stay in their step, and an idle engine sleeps."""

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.config import EngineConfig
from prefixmesh.errors import DeviceLostError
from prefixmesh.worker import engine_builder, engine_loop, engine_process
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_loop import CommandInbox, run_engine_loop
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.framing import FromEngine, Ready
from prefixmesh.worker.messages import (
    Abort,
    Ended,
    Event,
    Flush,
    GetStats,
    Shutdown,
    Stats,
    TokensOut,
)
from tests.support.fake_model import expected_output
from tests.support.scheduling import ENGINE_INFO, Bench, submit_command


class Clock:
    """Ticks a hundredth of a second at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def make_core() -> tuple[EngineCore, Bench]:
    bench = Bench(max_running=1)
    return EngineCore(info=ENGINE_INFO, scheduler=bench.scheduler, runner=bench.model, clock=Clock()), bench


def finish(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events += core.step(0.0)
        core.check_invariants()
    return events


def answer(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, TokensOut) for token in event.token_ids]


@pytest.mark.parametrize("error", [RuntimeError("secret detail"), MemoryError(), KeyError("x")])
def test_an_error_in_a_step_fails_its_requests_and_the_engine_goes_on(error: Exception) -> None:
    core, bench = make_core()
    core.submit(submit_command("bad", [1, 2]), 0.0)
    core.submit(submit_command("good", [1, 2], max_tokens=3), 0.0)
    bench.model.fail_next = error
    events = finish(core)
    ends = {event.request_id: event for event in events if isinstance(event, Ended)}
    assert ends["bad"].reason == "failed"
    assert type(error).__name__ in ends["bad"].error
    assert "secret" not in ends["bad"].error
    assert ends["good"].reason == "length"
    assert answer(events) == expected_output([1, 2], 3)
    stats = core.stats()
    assert stats.free_pages + stats.evictable_pages == stats.total_pages
    assert (stats.running, stats.queued, stats.protected_pages) == (0, 0, 0)


def test_a_lost_gpu_ends_the_engine() -> None:
    """Every later step would fail like this one: the process ends, its streams learn it, and a new one takes its place."""
    core, bench = make_core()
    core.submit(submit_command("any", [1, 2]), 0.0)
    bench.model.fail_next = DeviceLostError("cuda:0 is lost")
    with pytest.raises(DeviceLostError):
        finish(core)


def test_the_process_of_an_engine_that_failed_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its exit code, after what it had to tell: an exit that unloads a lost GPU's libraries might never end."""
    core, bench = make_core()
    bench.model.fail_next = DeviceLostError("cuda:0 is lost")
    monkeypatch.setattr(engine_builder, "build_engine", lambda *_, **__: core)
    inbox, told = CommandInbox(), Told()
    inbox.put(submit_command("any", [1, 2]))
    settings = msgspec.json.encode(EngineConfig()).decode()
    assert engine_process._serve(settings, inbox, told) == engine_process.EXIT_ENGINE_FAILED  # type: ignore[arg-type]
    assert isinstance(told.messages[0], Ready)


class Told:
    """An outbox that keeps what was put."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []

    def put(self, message: FromEngine) -> None:
        self.messages.append(message)


def test_stats_count_what_was_served() -> None:
    core, _ = make_core()
    for name in ("cold", "warm"):
        core.submit(submit_command(name, [1, 2, 3, 4], max_tokens=2), 0.0)
        finish(core)
    [stats] = core.handle(GetStats(), 0.0)
    assert isinstance(stats, Stats)
    assert stats.steps == 4
    assert stats.cache == LedgerRow(2, 8, Hits(device=3), Misses(never_seen=3, tail=2))
    assert stats.cache.cache_hit_rate() == 3 / 8
    assert stats.decode_step_ms == pytest.approx(10.0)
    core.handle(Flush(), 0.0)
    assert core.stats().free_pages == core.stats().total_pages


class NotedRates(EngineRates):
    """Rates that keep what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def record(self, **step: Any) -> None:
        self.told.append(step)


def test_steps_are_rated_by_where_in_the_prompt_they_compute() -> None:
    """In chunks, with decodes beside them, and behind a cached beginning: the squares add up to what was computed."""
    bench, rates = Bench(chunk=5), NotedRates()
    core = EngineCore(
        info=ENGINE_INFO, scheduler=bench.scheduler, runner=bench.model, clock=Clock(), rates=rates
    )
    core.submit(submit_command("a", list(range(12)), max_tokens=8), 0.0)
    for _ in range(3):
        core.step(0.0)
    assert [told["prefill_squares"] for told in rates.told] == [25, 75, 44]
    core.submit(submit_command("b", [*range(8), 20, 21]), 0.0)
    finish(core)
    prefills = [told for told in rates.told[3:] if told["prefill_tokens"]]
    assert [told["prefill_squares"] for told in prefills] == [10**2 - 8**2]


def run_loop(core: EngineCore, inbox: CommandInbox) -> list[Event]:
    events: list[Event] = []
    run_engine_loop(core, inbox, events.extend, Clock())
    return events


def test_the_loop_serves_until_shutdown_in_the_order_of_the_commands() -> None:
    core, _ = make_core()
    inbox = CommandInbox()
    answered = threading.Event()
    events: list[Event] = []

    def send(batch: Sequence[Event]) -> None:
        events.extend(batch)
        if any(isinstance(event, Ended) and event.request_id == "r" for event in batch):
            answered.set()

    thread = threading.Thread(target=run_engine_loop, args=(core, inbox, send, Clock()))
    thread.start()
    inbox.put(submit_command("gone", [1, 2]))
    inbox.put(Abort(request_id="gone"))
    inbox.put(submit_command("r", [1, 2], max_tokens=3))
    assert answered.wait(5)
    inbox.put(Shutdown())
    thread.join(5)
    assert not thread.is_alive()
    assert expected_output([1, 2], 3) == answer(
        [e for e in events if isinstance(e, TokensOut) and e.request_id == "r"]
    )


def test_an_idle_loop_takes_no_step() -> None:
    """It waits for a command; a look at the figures is answered without computing anything."""
    core, bench = make_core()
    inbox = CommandInbox()
    inbox.put(GetStats())
    inbox.put(GetStats())
    inbox.put(Shutdown())
    events = run_loop(core, inbox)
    assert events == []  # the shutdown came in the same batch of commands: nothing is owed after it
    assert not bench.model.plans


def test_the_inbox_bounds_submits_and_never_refuses_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "MAX_INBOX_SUBMITS", 2)
    inbox = CommandInbox()
    assert inbox.put(submit_command("a", [1]))
    assert inbox.put(submit_command("b", [1]))
    assert not inbox.put(submit_command("c", [1]))
    assert inbox.put(Abort(request_id="a"))
    waiting = threading.Thread(target=inbox.put, args=(submit_command("d", [1]),), kwargs={"wait": True})
    waiting.start()
    taken = inbox.take(wait=False)
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(taken) + len(inbox.take(wait=False)) == 4
