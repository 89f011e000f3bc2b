"""Making an owner's pins what a file says: what is different is put, what is not in the file removed where that is asked for.

New pins are put before old ones are removed, so that what is only renamed stays warm; those that the budget had no room for are tried
again after the removal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from prefixmesh.cli.pin_spec import differences
from prefixmesh.cli.pin_wait import ask
from prefixmesh.cli.router_calls import RouterCalls
from prefixmesh.errors import BudgetError, InvalidRequestError, NotFoundError, PrefixmeshError
from prefixmesh.proto.v1 import router_pb2 as pb

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import PinSpec, PinStatus

Deed = Literal["add", "change", "keep", "remove"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What becomes of one pin."""

    deed: Deed
    spec: "PinSpec"
    differs: Sequence[str] = ()
    """Fields that are changed."""

    error: PrefixmeshError | None = None
    """Why it was not done."""

    pin: "PinStatus | None" = None
    """As the router answered; None where it was not asked to."""


def make_plan(call: RouterCalls, specs: "Sequence[PinSpec]", *, prune: bool) -> list[Step]:
    """What a file's pins would change; asks, and changes nothing."""
    steps = [_compare(call, spec) for spec in specs]
    return steps + (_surplus(call, specs) if prune else [])


def carry_out(call: RouterCalls, plan: Sequence[Step]) -> list[Step]:
    """The plan's steps with what became of each. What is kept is put too: that begins its TTL anew."""
    puts = [_put(call, step) for step in plan if step.deed != "remove"]
    removed = [_remove(call, step) for step in plan if step.deed == "remove"]
    if removed:
        puts = [_put(call, replace(step, error=None)) if _lacks_room(step) else step for step in puts]
    return puts + removed


def _compare(call: RouterCalls, spec: "PinSpec") -> Step:
    try:
        there = ask(call, spec.name, spec.owner).spec
    except NotFoundError:
        return Step(deed="add", spec=spec)
    differs = differences(spec, there)
    return Step(deed="change" if differs else "keep", spec=spec, differs=differs)


def _surplus(call: RouterCalls, specs: "Sequence[PinSpec]") -> list[Step]:
    """Pins that the file does not have, of the owners that it names; of the caller's own where it has no pin at all."""
    owners = dict.fromkeys(spec.owner for spec in specs) or {"": None}
    listed = {owner: _list(call, owner) for owner in owners}
    # One that is left out and one that is named may be the same; what there is of the caller's own tells who that is.
    own = next((pin.owner for pin in listed.get("", ())), "")
    known = {(spec.owner or own, spec.name) for spec in specs}
    there = {(pin.owner, pin.name): pin for pins in listed.values() for pin in pins}
    return [Step(deed="remove", spec=pin) for key, pin in there.items() if key not in known]


def _list(call: RouterCalls, owner: str) -> "list[PinSpec]":
    answer: pb.ListPinsResponse = call("ListPins", pb.ListPinsRequest(owner=owner))
    return [pin.spec for pin in answer.pins]


def _put(call: RouterCalls, step: Step) -> Step:
    try:
        answer: pb.PutPinResponse = call("PutPin", pb.PutPinRequest(spec=step.spec))
    except PrefixmeshError as error:
        return replace(step, error=error)
    return replace(step, pin=answer.pin)


def _remove(call: RouterCalls, step: Step) -> Step:
    try:
        call("RemovePin", pb.RemovePinRequest(name=step.spec.name, owner=step.spec.owner))
    except PrefixmeshError as error:
        return replace(step, error=error)
    return step


def _lacks_room(step: Step) -> bool:
    return isinstance(step.error, BudgetError)


def as_dict(step: Step) -> dict[str, Any]:
    """A step for ``--json``."""
    return {
        "name": step.spec.name,
        "owner": step.pin.spec.owner if step.pin else step.spec.owner,
        "deed": step.deed,
        "differs": list(step.differs),
        "error": None if step.error is None else str(step.error),
    }


def is_callers_fault(steps: Sequence[Step]) -> bool:
    """Whether whatever failed has to be asked for differently."""
    return all(isinstance(step.error, InvalidRequestError) for step in steps if step.error is not None)
