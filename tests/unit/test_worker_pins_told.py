"""What a router keeps of what workers tell of their pins: only figures that can be reckoned with, and only of workers that there are."""

import asyncio
from typing import Any

import pytest

from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.errors import UnavailableError
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.pins.budgets import owner_use
from prefixmesh.router.pins.worker_pins import MAX_TOKENS, NOT_TOLD, ToldPins, WorkerPins
from prefixmesh.router.pins.workers_seen import seen_workers
from prefixmesh.router.worker_identity import Expected, Rates, WorkerFacts
from tests.support.servers import eventually

A = Endpoint("host-a:1")
MOST = 2**63 - 1


class Link:
    """A connection to a worker that answers so, or not at all."""

    def __init__(self) -> None:
        self.answer: pb.WorkerPinsResponse | None = pb.WorkerPinsResponse(budget_pages=50)

    def find_link(self, _: Endpoint) -> "Link":
        return self

    async def control(self, *_: object) -> pb.WorkerPinsResponse:
        if self.answer is None:
            raise UnavailableError("it is gone")
        return self.answer


@pytest.fixture
def fleet() -> FleetState:
    """One worker, whose pages have 16 tokens."""
    expected = Expected(
        model_revision="r",
        tokenizer_digest="t",
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
    )
    facts = WorkerFacts(
        worker_id=WorkerId("w0"),
        incarnation=Incarnation(1),
        model="m",
        model_revision="r",
        tokenizer_digest="t",
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
        context_length=4096,
        max_running_requests=8,
        match_unit=16,
        rates=Rates(1000.0, 10.0),
        page_size=16,
    )
    made = FleetState(expected, max_blocks=1000)
    made.add(A, 0.0)
    made.described(A, facts, 0.0)
    return made


class Asking:
    """A router that asks one worker, whenever ``ask`` is called."""

    def __init__(self, fleet: FleetState) -> None:
        self.fleet, self.link, self.now, self.news = fleet, Link(), 100.0, 0
        self.pins = WorkerPins(fleet.registry, self.link, self._count)  # type: ignore[arg-type]

    async def ask(self) -> ToldPins:
        before, self.now = self.news, self.now + 60.0
        self.pins.refresh(lambda: self.now)
        await eventually(lambda: self.news > before)
        entry = self.fleet.registry.get(A)
        assert entry is not None
        return self.pins.told(entry)

    def _count(self) -> None:
        self.news += 1


@pytest.fixture
def asking(fleet: FleetState) -> Asking:
    return Asking(fleet)


async def test_pages_are_told_in_tokens(asking: Asking) -> None:
    assert (await asking.ask()).budget_tokens == 800


@pytest.mark.parametrize("figure", [-1, MOST])
@pytest.mark.parametrize("field", ["budget_pages", "owner_budget_pages", "host_budget_pages", "pages"])
async def test_figures_of_no_worker_are_not_taken(asking: Asking, field: str, figure: int) -> None:
    """What was told before stays; the next answer is taken like any."""
    asking.link.answer = _answer(field, figure)
    assert (await asking.ask()).budget_tokens == NOT_TOLD
    asking.link.answer = pb.WorkerPinsResponse(budget_pages=50)
    assert (await asking.ask()).budget_tokens == 800


async def test_whatever_is_taken_can_be_told_on(asking: Asking) -> None:
    """As many workers as there may be, and as many pins, each with as much as is believed."""
    most = MAX_TOKENS // 16
    pins = [_pin(most, f"pin/acme/{number}@1") for number in range(1000)]
    asking.link.answer = pb.WorkerPinsResponse(owner_budget_pages=most, pins=pins)
    await asking.ask()
    (worker,) = seen_workers(asking.fleet, asking.pins.told, {})
    use = owner_use("acme", [worker] * 1000)
    told = router_pb2.PinBudgetUse(charged_tokens=use.charged_tokens, budget_tokens=use.budget_tokens)
    assert (told.charged_tokens, told.budget_tokens) == (1_000_000 * MAX_TOKENS, 1000 * MAX_TOKENS)


async def test_nothing_is_kept_of_workers_that_are_gone(asking: Asking) -> None:
    """Not that they failed either, nor that they were to be asked."""
    await asking.ask()
    asking.link.answer = None
    await asking.ask()
    asking.fleet.remove(A)
    asking.pins.expect_change(A)
    asking.pins.refresh(lambda: asking.now)
    kept: list[Any] = [asking.pins._told, asking.pins._failed_at, asking.pins._is_old, asking.pins._asking]
    assert not any(kept)
    await asyncio.wait_for(asking.pins.close(), 60)


def _answer(field: str, figure: int) -> pb.WorkerPinsResponse:
    if field == "pages":
        return pb.WorkerPinsResponse(budget_pages=50, pins=[_pin(figure)])
    answer = pb.WorkerPinsResponse(budget_pages=50)
    setattr(answer, field, figure)
    return answer


def _pin(pages: int, pin_id: str = "pin/acme/a@1") -> pb.WorkerPinState:
    return pb.WorkerPinState(pin_id=pin_id, owner="acme", pages=pages)
