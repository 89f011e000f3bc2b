"""What a router takes for proved of a wish: what workers' events tell of the wish's tier, where they are to be believed, and nothing else."""

from collections.abc import Collection

import pytest

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION, block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Incarnation, Namespace, WorkerId
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.pins.wishes import PinSeen, PinVersion, Wish, WorkerSeen
from prefixmesh.router.pins.worker_pins import ToldPins
from prefixmesh.router.pins.workers_seen import Proofs, prove, seen_workers
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_identity import Expected, Rates, WorkerFacts
from prefixmesh.router.worker_view import Trust
from prefixmesh.tokens import pack

A, B = Endpoint("host-a:1"), Endpoint("host-b:2")
BLOCKS = 4
TOKENS = pack(range(BLOCKS * DEFAULT_BLOCK_SIZE + 10))
NAMESPACE = Namespace(bytes(16))
NAMES = block_fingerprints(NAMESPACE, TOKENS, DEFAULT_BLOCK_SIZE)


def wish(tier: Tier = Tier.DEVICE, name: str = "a") -> Wish:
    version = PinVersion(generation=7, namespace=NAMESPACE, tokens=TOKENS, fingerprints=NAMES)
    return Wish(source="pin", owner="acme", name=name, tier=tier, replicas=2, version=version)


def facts(name: str, incarnation: int) -> WorkerFacts:
    return WorkerFacts(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
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
        kv_layout="layout",
    )


@pytest.fixture
def fleet() -> FleetState:
    """Two workers, whose views are exact."""
    expected = Expected(
        model_revision="r",
        tokenizer_digest="t",
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
    )
    made = FleetState(expected, max_blocks=1000)
    for number, endpoint in enumerate((A, B)):
        made.add(endpoint, 0.0)
        made.described(endpoint, facts(endpoint, number), 0.0)
        trust(made, endpoint, Trust.EXACT)
    return made


def trust(fleet: FleetState, endpoint: Endpoint, value: Trust) -> None:
    followed = fleet.view.get(endpoint)
    assert followed is not None
    followed.trust = value


def hold(fleet: FleetState, endpoint: Endpoint, blocks: int, tier: Tier = Tier.DEVICE) -> None:
    followed = fleet.view.get(endpoint)
    assert followed is not None
    fleet.view.index.stored(followed.slot, tier, NAMES[:blocks])


def told(entry: WorkerEntry) -> ToldPins:
    pin = PinSeen(owner="acme", tier=Tier.DEVICE, size_tokens=256, held_tokens=256, missing_tokens=0)
    pins = {"pin/acme/a@7": pin, "pin/acme/b@1": pin, "pin/acme/a": pin}
    return ToldPins(incarnation=entry.load.incarnation, version=1, asked_at=5.0, pins=pins, budget_tokens=99)


def seen(fleet: FleetState, *wishes: Wish, hidden: Collection[str] = ()) -> dict[Endpoint, WorkerSeen]:
    proofs: Proofs = {}
    prove(fleet.view, wishes, DEFAULT_BLOCK_SIZE, proofs)
    return {worker.endpoint: worker for worker in seen_workers(fleet, told, proofs, hidden)}


def proven(fleet: FleetState, one: Wish) -> list[int]:
    by_worker = seen(fleet, one)
    return [by_worker[endpoint].proven.get(one.pin_id, 0) for endpoint in (A, B)]


def test_leading_blocks_on_the_device_are_proved(fleet: FleetState) -> None:
    hold(fleet, A, BLOCKS)
    hold(fleet, B, 2)
    assert proven(fleet, wish()) == [BLOCKS * DEFAULT_BLOCK_SIZE, 2 * DEFAULT_BLOCK_SIZE]
    assert proven(fleet, wish(Tier.HOST)) == [0, 0]


def test_of_the_host_counts_what_lies_there(fleet: FleetState) -> None:
    """And nothing behind a gap."""
    hold(fleet, A, 3, Tier.HOST)
    followed = fleet.view.get(B)
    assert followed is not None
    fleet.view.index.stored(followed.slot, Tier.HOST, [NAMES[0], NAMES[2]])
    assert proven(fleet, wish(Tier.HOST)) == [3 * DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE]
    assert proven(fleet, wish()) == [0, 0]


def test_what_is_only_expected_proves_nothing(fleet: FleetState) -> None:
    """A request with the prompt is on its way there."""
    fleet.view.expect(A, NAMES)
    assert proven(fleet, wish()) == [0, 0]


@pytest.mark.parametrize(
    ("value", "counts"),
    [(Trust.EXACT, True), (Trust.CATCHING_UP, True), (Trust.STALE, False), (Trust.BLIND, False)],
)
def test_view_that_is_not_to_be_believed_proves_nothing(
    fleet: FleetState, value: Trust, *, counts: bool
) -> None:
    hold(fleet, A, BLOCKS)
    trust(fleet, A, value)
    assert bool(proven(fleet, wish())[0]) is counts


def test_worker_is_shown_as_it_has_told(fleet: FleetState) -> None:
    """Its host for spreading, its own figures; pins of wishes that cannot be told now are left out."""
    worker = seen(fleet, wish())[A]
    assert (worker.host, worker.page_size, worker.kv_layout, worker.pins_at) == ("host-a", 16, "layout", 5.0)
    assert (worker.usable, worker.draining, worker.budget_tokens) == (False, False, 99)
    assert set(worker.pins) == {"pin/acme/a@7", "pin/acme/b@1", "pin/acme/a"}
    assert set(seen(fleet, hidden={"pin/acme/b"})[A].pins) == {"pin/acme/a@7", "pin/acme/a"}
    fleet.registry.draining_changed(A, draining=True)
    assert seen(fleet)[A].draining
    fleet.registry.unreachable(A, "gone")
    assert not seen(fleet)[A].draining
