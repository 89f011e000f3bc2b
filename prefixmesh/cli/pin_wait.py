"""Waiting until pins are held by as many workers as they ask for, with a line that tells how far they are."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from prefixmesh.cli.pin_text import told
from prefixmesh.cli.router_calls import RouterCalls
from prefixmesh.cli.status_line import StatusLine
from prefixmesh.proto.v1 import router_pb2 as pb

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import PinStatus

POLL_S: Final = 0.2
"""Between two questions: the router answers from what it knows, and a prompt takes longer to compute."""


def wait_until_held(call: RouterCalls, pins: "Sequence[PinStatus]", wait_s: float) -> "list[PinStatus]":
    """How far the pins are once all are held, or once ``wait_s`` is over."""
    ends_at = time.monotonic() + wait_s
    with StatusLine() as line:
        while True:
            seen = [ask(call, pin.spec.name, pin.spec.owner) for pin in pins]
            line.show("\n".join(told(pin) for pin in seen if not is_held(pin)))
            left_s = ends_at - time.monotonic()
            if all(is_held(pin) for pin in seen) or left_s <= 0:
                return seen
            time.sleep(min(POLL_S, left_s))


def ask(call: RouterCalls, name: str, owner: str) -> "PinStatus":
    """How far one pin is, with its prompt."""
    answer: pb.GetPinResponse = call("GetPin", pb.GetPinRequest(name=name, owner=owner))
    return answer.pin


def is_held(pin: "PinStatus") -> bool:
    """Whether nothing is missing. Of no worker wanted, as in a fleet without one, nothing is held."""
    return pin.wanted > 0 and pin.missing == 0
