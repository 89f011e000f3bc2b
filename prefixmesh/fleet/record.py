"""What a supervisor sees, written down: for the file that commands read, and for the supervisor's own next life.

Within a process times are of its monotonic clock; a record leaves the process, so its times are the wall clock's.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from prefixmesh.fleet.launcher import actor_name
from prefixmesh.fleet.supervision import Part
from prefixmesh.fleet_state import PartState


def shift(parts: Iterable[Part], seconds: float) -> tuple[Part, ...]:
    """Copies of ``parts`` by another clock, which is so much ahead."""
    return tuple(
        dataclasses.replace(
            part,
            since=part.since + seconds,
            due=part.due + seconds,  # NEVER stays so
            standby_due=part.standby_due + seconds,
        )
        for part in parts
    )


def encode_parts(parts: Sequence[Part]) -> bytes:
    """As bytes that ``decode_parts`` reads; MessagePack, because JSON has no infinity."""
    return msgspec.msgpack.encode(parts)


def decode_parts(data: bytes) -> tuple[Part, ...]:
    """Raises msgspec.DecodeError for what is no record."""
    return msgspec.msgpack.decode(data, type=tuple[Part, ...])


def part_states(parts: Iterable[Part]) -> tuple[PartState, ...]:
    """For ``FleetState``, the router first; ``parts`` by the wall clock."""
    states = [
        PartState(
            name=part.name,
            kind=part.kind,
            phase=part.phase,
            life=part.life,
            since_unix_s=round(part.since, 3),
            restarts=part.restarts,
            reason=part.reason,
            address=part.address,
            actor=actor_name(part.name, part.life) if part.phase in ("starting", "serving") else "",
        )
        for part in parts
    ]
    return tuple(sorted(states, key=lambda state: state.kind != "router"))


def living_actors(parts: Iterable[Part]) -> tuple[str, ...]:
    """Names of the actors there should be, those that stand by too."""
    names: list[str] = []
    for part in parts:
        names += [actor_name(part.name, part.life)] if part.phase in ("starting", "serving") else []
        names += [actor_name(part.name, part.standby)] if part.standby else []
    return tuple(names)
