"""A file of pins (YAML), read and checked as a whole: every problem is told with the file, the pin and the field."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from prefixmesh.cli.pin_spec import make_spec
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import router_pb2 as pb

MAX_FILE_BYTES: Final = 4 * 2**20
"""Of the file itself; long prompts have files of their own. More than that is no file of pins."""

_FORM: Final = "must be a mapping with a list under 'pins'"


@dataclass(frozen=True, slots=True)
class PinsFile:
    """What a file asks for."""

    specs: Sequence[pb.PinSpec]
    problems: Sequence[str]
    """Each with the file, the pin and the field; when there are any, the specs are not to be used."""


def read_pins(path: Path) -> PinsFile:
    """Read a file of pins and the files that it names."""
    try:
        data = _load(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return PinsFile((), (f"{path}: {' '.join(str(error).split())}",))
    if not isinstance(data, dict) or not isinstance(data.get("pins"), list):
        return PinsFile((), (f"{path}: {_FORM}",))
    problems = [f"{path}: {key}: is not known; the file {_FORM}" for key in data if key != "pins"]
    specs = []
    for number, fields in enumerate(data["pins"], start=1):
        if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
            problems.append(f"{path}: pin {number}: must be a mapping of fields")
            continue
        spec, found = make_spec(fields, path.parent)
        specs.append(spec)
        problems += [f"{path}: pin {_called(number, fields)}: {problem}" for problem in found]
    return PinsFile(specs, [*problems, *_twice(path, specs)])


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"has more than {MAX_FILE_BYTES} bytes; put prompts into files of their own")
    return yaml.load(content, Loader=_Loader)  # noqa: S506  a safe loader that refuses more


class _Loader(yaml.SafeLoader):
    """Takes no key twice: YAML's own loader would keep the last one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  the library's own signature
        """A mapping, each of whose keys stands once."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _called(number: int, fields: dict[str, Any]) -> str:
    name = fields.get("name")
    return f"{name!r}" if isinstance(name, str) and name else f"{number}"


def _twice(path: Path, specs: Sequence[pb.PinSpec]) -> list[str]:
    """Pins that stand in the file more than once: the last would win, and nobody means that."""
    seen: set[tuple[str, str]] = set()
    problems = []
    for spec in specs:
        key = (spec.owner, spec.name)
        if spec.name and key in seen:
            problem = InvalidRequestError("name", "stands twice for one owner")
            problems.append(f"{path}: pin {spec.name!r}: {problem}")
        seen.add(key)
    return problems
