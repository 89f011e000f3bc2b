"""Waiting until every worker of a fleet has loaded an adapter, or forgotten it, with a line that tells how far they are."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prefixmesh.cli.adapter_text import LACKING, told
from prefixmesh.cli.router_calls import RouterCalls
from prefixmesh.cli.status_line import StatusLine
from prefixmesh.proto.v1 import router_pb2 as pb

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import FleetAdapter

POLL_S: Final = 0.2
"""Between two questions: the router answers from what it knows, and a load takes longer."""


def wait_until_loaded(call: RouterCalls, adapter: "FleetAdapter", wait_s: float) -> "FleetAdapter":
    """How far the adapter is once all workers that are ready have it, or have refused it for good as far as can be told, or once ``wait_s``
    is over."""
    return _wait(
        call, adapter, wait_s, lambda seen: is_loaded(seen) or is_refused(seen) or is_another(adapter, seen)
    )


def wait_until_forgotten(call: RouterCalls, name: str, wait_s: float) -> "FleetAdapter | None":
    """What is left of a name once no worker has it, or once ``wait_s`` is over; None when nothing is."""
    before = pb.FleetAdapter(spec=pb.AdapterSpec(name=name), removed=True)
    seen = _wait(call, before, wait_s, lambda seen: not seen.removed or not seen.workers)
    return seen if seen.removed and seen.workers else None


def ask(call: RouterCalls, name: str) -> "FleetAdapter | None":
    """How far one adapter is; None where nobody has it or is to have it."""
    answer: pb.ListFleetAdaptersResponse = call("ListAdapters", pb.ListFleetAdaptersRequest(name=name))
    return answer.adapters[0] if answer.adapters else None


def is_loaded(adapter: "FleetAdapter") -> bool:
    """Whether every worker that is ready has it. Where none is ready, none has."""
    return 0 < adapter.wanted == adapter.held and not adapter.removed


def is_refused(adapter: "FleetAdapter") -> bool:
    """Whether those that lack it have all refused it, so that nothing comes of waiting."""
    lacking = [one.state for one in adapter.workers if one.state in LACKING]
    return bool(lacking) and all(state == "refused" for state in lacking)


def is_another(put: "FleetAdapter", seen: "FleetAdapter") -> bool:
    """Whether somebody has put or removed it since."""
    return seen.generation != put.generation or seen.removed


def _wait(
    call: RouterCalls, adapter: "FleetAdapter", wait_s: float, is_over: "Callable[[FleetAdapter], bool]"
) -> "FleetAdapter":
    ends_at = time.monotonic() + wait_s
    gone = pb.FleetAdapter(spec=adapter.spec)
    with StatusLine() as line:
        while True:
            seen = ask(call, adapter.spec.name) or gone
            left_s = ends_at - time.monotonic()
            if is_over(seen) or left_s <= 0:
                return seen
            line.show(told(seen))
            time.sleep(min(POLL_S, left_s))
