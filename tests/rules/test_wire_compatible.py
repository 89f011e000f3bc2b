"""The wire only grows: version N works with N+1 in both directions, so nothing that was published changes its meaning.

``tests/golden/wire.json`` holds every message, field and method that was published. Adding to the wire adds to that file:
``python tests/rules/test_wire_compatible.py`` writes it anew, and a review sees what changed.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from prefixmesh.proto.v1 import inference_pb2, router_pb2, ticket_pb2, worker_control_pb2

GOLDEN = Path(__file__).parents[1] / "golden" / "wire.json"
FILES: tuple[FileDescriptor, ...] = (
    inference_pb2.DESCRIPTOR,
    router_pb2.DESCRIPTOR,
    ticket_pb2.DESCRIPTOR,
    worker_control_pb2.DESCRIPTOR,
)


def describe_field(field: FieldDescriptor) -> list[Any]:
    target = field.message_type or field.enum_type
    return [field.name, field.type, field.is_repeated, target.full_name if target is not None else None]


def describe_wire() -> dict[str, dict[str, Any]]:
    """Everything that peers depend on: fields by number, enum values by number, methods with their types."""
    wire: dict[str, dict[str, Any]] = {}
    for file in FILES:
        messages: list[Descriptor] = list(file.message_types_by_name.values())
        for message in messages:
            messages.extend(message.nested_types)
            wire[message.full_name] = {str(f.number): describe_field(f) for f in message.fields}
        enums: list[EnumDescriptor] = list(file.enum_types_by_name.values())
        for enum in enums:
            wire[enum.full_name] = {str(value.number): value.name for value in enum.values}
        for service in file.services_by_name.values():
            wire[service.full_name] = {
                method.name: [
                    method.input_type.full_name,
                    method.output_type.full_name,
                    method.client_streaming,
                    method.server_streaming,
                ]
                for method in service.methods
            }
    return wire


def test_nothing_published_has_changed() -> None:
    """Every field keeps its number, name and type; every method its messages; nothing is taken away."""
    published, now = json.loads(GOLDEN.read_text()), describe_wire()
    changed = {
        f"{name}.{key}": (was, now.get(name, {}).get(key))
        for name, entries in published.items()
        for key, was in entries.items()
        if now.get(name, {}).get(key) != was
    }
    assert not changed


def test_everything_new_is_written_down() -> None:
    """What is added becomes published with the change that adds it."""
    assert describe_wire() == json.loads(GOLDEN.read_text())


def reachable(message: Descriptor, seen: set[str]) -> set[str]:
    """Names of a message and of all that it may carry."""
    if message.full_name not in seen:
        seen.add(message.full_name)
        for field in message.fields:
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def test_callers_are_not_told_why_a_prompt_missed() -> None:
    """``other_namespace`` tells what others have cached: the callers' service has no message that could carry it."""
    carried: set[str] = set()
    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        reachable(method.output_type, carried)
    assert "prefixmesh.v1.CachedTokens" in carried
    assert not carried & {"prefixmesh.v1.MissTokens", "prefixmesh.v1.CacheCounts"}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(describe_wire(), indent=1, sort_keys=True) + "\n")
