"""Rules that know nothing of caches: everyone in turn, anyone, the least busy. Pure."""

from prefixmesh.sim.rivals.view import RivalView, least


def round_robin(view: RivalView) -> int:
    """Everyone in turn."""
    return view.turn % view.workers


def at_random(view: RivalView) -> int:
    """Anyone."""
    return int(view.chance * view.workers)


def least_loaded(view: RivalView) -> int:
    """Fewest requests; equals in turn."""
    return least(view.in_flight, view.turn)
