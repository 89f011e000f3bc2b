"""What a starting fleet says of itself."""

from prefixmesh.cli.progress import describe
from prefixmesh.fleet.events import FleetEvent


def test_a_ready_worker_tells_where_it_listens_and_how_its_memory_was_divided() -> None:
    """The sums are printed at start, as a worker by itself prints them; a router has none."""
    worker = FleetEvent(
        kind="ready", subject="worker-0", detail="127.0.0.1:5", memory_sums="weights 1 MiB", seconds=2.0
    )
    assert describe(worker) == ("worker-0", "ready in 2.0 s at 127.0.0.1:5 · weights 1 MiB", True)
    router = FleetEvent(kind="ready", subject="router", detail="127.0.0.1:6", seconds=1.0)
    assert describe(router) == ("router", "ready in 1.0 s at 127.0.0.1:6", True)


def test_a_part_that_is_lost_tells_when_it_is_started_again_and_one_given_up_how_to_ask() -> None:
    """What the user does next is in the line."""
    lost = FleetEvent(kind="lost", subject="worker-0", detail="killed", seconds=1.5)
    assert describe(lost) == ("worker-0", "LOST: killed; started again in 1.5 s", True)
    given_up = FleetEvent(kind="given_up", subject="router", detail="no port")
    assert describe(given_up) == (
        "router",
        "GIVEN UP: no port; once that is mended: prefixmesh up --revive",
        True,
    )
