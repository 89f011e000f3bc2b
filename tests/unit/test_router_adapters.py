"""Which content an adapter's name means in a fleet, who may compute with it, and how an unknown name is looked up."""

import asyncio

import msgspec
import pytest

from prefixmesh.errors import AdapterChangedError, InvalidRequestError, UnavailableError
from prefixmesh.ids import Fingerprint
from prefixmesh.router import adapter_finder
from prefixmesh.router.adapter_finder import AdapterFinder
from prefixmesh.router.adapter_names import Told, choose_content, take_note
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import RouteRequest
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.routing import RouterCore
from tests.support.servers import eventually
from tests.support.simulated_fleet import EXPECTED, NOW, facts, make_core, prompt, unique

W0, W1, W2 = Endpoint("w0"), Endpoint("w1"), Endpoint("w2")


def tell(core: RouterCore, endpoint: Endpoint, **adapters: str) -> None:
    core.described(endpoint, facts(endpoint, adapters=adapters), NOW)


def request_for(name: str, digest: str, seed: int = 0) -> RouteRequest:
    return msgspec.structs.replace(prompt(unique(seed, 200)), adapter=name, adapter_digest=digest)


def test_the_content_that_most_workers_have_is_meant() -> None:
    """A worker that was loaded anew first does not get the whole fleet's requests."""
    assert choose_content([Told("new", 9), Told("old", 1), Told("old", 2)]) == "old"
    assert choose_content([Told("new", 9), Told("new", 12), Told("old", 2)]) == "new"
    assert choose_content([]) is None


def test_of_two_equally_spread_contents_the_newer_is_meant() -> None:
    """Whatever the order in which the workers are looked at."""
    assert choose_content([Told("new", 9), Told("old", 1)]) == "new"
    assert choose_content([Told("old", 1), Told("new", 9)]) == "new"


def test_of_two_equally_spread_contents_what_the_fleet_is_to_have_is_meant() -> None:
    """The other worker's folder holds something else, which it has loaded last; most of a fleet are heard all the same."""
    assert choose_content([Told("wished", 1), Told("its own", 9)], "wished") == "wished"
    assert choose_content([Told("its own", 9), Told("wished", 1)], "wished") == "wished"
    assert choose_content([Told("wished", 9), Told("old", 1), Told("old", 2)], "wished") == "old"


def test_a_content_is_as_old_as_the_first_answer_that_told_of_it() -> None:
    """Workers tell the same every second; only a change is news."""
    first = take_note({}, {"x": "a", "y": "b"}, 1)
    second = take_note(first, {"x": "a", "y": "c"}, 2)
    assert second == {"x": Told("a", 1), "y": Told("c", 2)}
    assert take_note(second, {}, 3) == {}


def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    """Two workers, one has it: also a busy one with everything else against it gets every request."""
    core = make_core(2)
    tell(core, W1, clerk="d1")
    placements = [core.route(request_for("clerk", "d1", seed), NOW) for seed in range(20)]
    assert {placement.endpoint for placement in placements} == {W1}
    assert {core.route(prompt(unique(seed, 200)), NOW).endpoint for seed in range(50, 60)} == {W0}, (
        "base: the idle"
    )


def test_other_content_under_the_name_is_another_adapter() -> None:
    """While a name is loaded anew, a request goes to those that have what its namespace was made from, and to nobody else."""
    core = make_core(3)
    for endpoint, digest in ((W0, "new"), (W1, "old"), (W2, "old")):
        tell(core, endpoint, clerk=digest)
    assert core.registry.adapter_digest("clerk") == "old"
    placements = [core.route(request_for("clerk", "old", seed), NOW) for seed in range(20)]
    assert {placement.endpoint for placement in placements} == {W1, W2}
    tell(core, W1, clerk="new")
    assert core.registry.adapter_digest("clerk") == "new"


def test_a_request_whose_content_is_gone_is_told_that_it_changed() -> None:
    """Its namespace must be made anew: no worker may compute it as it is."""
    core = make_core(1)
    tell(core, W0, clerk="new")
    with pytest.raises(AdapterChangedError, match="'clerk'"):
        core.route(request_for("clerk", "old"), NOW)
    assert core.registry.adapter_names() == ["clerk"]
    core.check_invariants()


def test_where_the_only_worker_with_it_was_tried_the_request_is_not_sent_elsewhere() -> None:
    """A retry has the same needs as the first attempt."""
    core = make_core(2)
    tell(core, W0, clerk="d")
    with pytest.raises(UnavailableError):
        core.route(request_for("clerk", "d"), NOW, exclude={W0})


def test_the_same_prompt_through_an_adapter_is_not_believed_cached() -> None:
    """Beliefs go by fingerprints, which begin with the namespace; the request's own says what its adapter is."""
    core = make_core(1)
    tell(core, W0, clerk="d")
    base = prompt(unique(1, 640))
    placement = core.route(base, NOW)
    core.accepted(placement, 0, NOW)
    core.finished(placement, NOW)
    other_names = [Fingerprint(fingerprint ^ 1) for fingerprint in base.fingerprints]
    adapted = msgspec.structs.replace(base, fingerprints=other_names, adapter="clerk", adapter_digest="d")
    assert core.route(base, NOW).decision.terms.device_tokens > 0
    assert core.route(adapted, NOW).decision.terms.device_tokens == 0


class Fleet:
    """A registry, and workers that tell what they have when they are asked."""

    def __init__(self) -> None:
        self.registry = WorkerRegistry(EXPECTED)
        self.registry.add(W0)
        self.registry.described(W0, facts("w0"))
        self.registry.health_changed(W0, serving=True)
        self.has: dict[str, str] = {}
        self.asked = 0

    async def ask(self) -> None:
        self.asked += 1
        has = dict(self.has)
        await asyncio.sleep(0)
        self.registry.described(W0, facts("w0", adapters=has))


async def test_an_unknown_name_is_looked_up_once_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter that was loaded a moment ago is found; a name that nobody has costs one question for all who came meanwhile."""
    monkeypatch.setattr(adapter_finder, "MIN_ROUND_INTERVAL_S", 0.0)
    fleet = Fleet()
    finder = AdapterFinder(fleet.registry, fleet.ask)
    fleet.has = {"clerk": "d1"}
    assert await finder.find("clerk") == "d1"
    assert fleet.asked == 1
    assert await finder.find("clerk") == "d1"
    assert await finder.find("") == ""
    assert fleet.asked == 1, "what is known is not looked up"
    outcomes = await asyncio.gather(*(finder.find(f"x{i}") for i in range(500)), return_exceptions=True)
    assert {str(outcome) for outcome in outcomes[:2]} == {
        "adapter: no adapter 'x0' is loaded here",
        "adapter: no adapter 'x1' is loaded here",
    }
    assert fleet.asked == 2
    await finder.close()


async def test_whoever_comes_while_workers_are_asked_waits_for_the_next_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the workers tell now may be older than the load that the caller has seen succeed; and rounds keep their distance."""
    monkeypatch.setattr(adapter_finder, "MIN_ROUND_INTERVAL_S", 0.02)
    fleet = Fleet()
    finder = AdapterFinder(fleet.registry, fleet.ask)
    early = asyncio.create_task(finder.find("clerk"))
    await eventually(lambda: fleet.asked)
    fleet.has = {"clerk": "d1"}
    late = asyncio.create_task(finder.find("clerk"))
    with pytest.raises(InvalidRequestError, match="'clerk'"):
        await early
    assert fleet.asked == 1
    assert await late == "d1"
    assert fleet.asked == 2
    await finder.close()


async def test_a_caller_that_leaves_does_not_end_the_asking_of_others() -> None:
    """Calls are cancelled at any time."""
    fleet = Fleet()
    finder = AdapterFinder(fleet.registry, fleet.ask)
    fleet.has = {"clerk": "d1"}
    leaving, staying = (asyncio.create_task(finder.find("clerk")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == "d1"
    await finder.close()


async def test_an_adapter_of_workers_that_are_away_is_unavailable_and_not_unknown() -> None:
    """The caller's request is right; it may be sent again."""
    fleet = Fleet()
    fleet.registry.described(W0, facts("w0", adapters={"clerk": "d1"}))
    fleet.registry.unreachable(W0, "connection refused")
    fleet.registry.add(W1)
    fleet.registry.described(W1, facts("w1"))
    fleet.registry.health_changed(W1, serving=True)

    async def nobody() -> None:
        fleet.asked += 1

    finder = AdapterFinder(fleet.registry, nobody)
    with pytest.raises(UnavailableError, match="w0 cannot be reached: connection refused"):
        await finder.find("clerk")
    await finder.close()
