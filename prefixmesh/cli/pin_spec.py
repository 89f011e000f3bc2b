"""A pin as its fields say it, from the command line or a file, made into what the router is asked for. Reads the files that they name.

What is wrong is told by field, all of it at once. What only the router can know (budgets, adapters, who may do what) is left to it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prefixmesh.client.calls import build_generate
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control

TIERS: Final[Mapping[str, "control.Tier"]] = {"device": control.TIER_DEVICE, "host": control.TIER_HOST}
ALL: Final = "all"
"""How people say that every worker is to hold it; 0 on the wire."""

MAX_REPLICAS: Final = 2**31 - 1
MAX_TTL_S: Final = 10 * 366 * 24 * 3600
"""Ten years: a longer one is a mistake in units, or means no end, which is said by leaving it out."""

PROMPT_FIELDS: Final = (
    "text",
    "prompt_file",
    "chat",
    "chat_file",
    "system",
    "system_file",
    "token_ids",
    "token_ids_file",
)
"""Ways to say what is pinned; each pin has exactly one."""

_UNITS_S: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SPAN: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def make_spec(fields: Mapping[str, Any], folder: Path) -> tuple[pb.PinSpec, list[InvalidRequestError]]:
    """The pin that ``fields`` ask for, and every problem with them. Files are relative to ``folder``."""
    spec, problems = pb.PinSpec(), []
    for field, value in fields.items():
        try:
            put = _PUTS.get(field)
            if put is None:
                raise InvalidRequestError(field, f"is no field of a pin; there are {', '.join(_PUTS)}")
            put(spec, field, value, folder)
        except InvalidRequestError as error:
            problems.append(InvalidRequestError(field, error.problem))
    if "name" not in fields:
        problems.append(InvalidRequestError("name", "is missing"))
    given = [field for field in PROMPT_FIELDS if field in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        problems.append(
            InvalidRequestError("prompt", f"needs one of {', '.join(PROMPT_FIELDS)}; got {found}")
        )
    return spec, problems


def parse_span(text: str) -> int:
    """Seconds of ``90``, ``90s``, ``15m``, ``1h30m`` or ``7d``; raises ValueError for anything else."""
    if text.isascii() and text.isdigit():
        return int(text)
    parts = _SPAN.fullmatch(text)
    if not text or parts is None:
        raise ValueError(f"{text!r} is no span of time, as in 90s, 15m, 1h30m or 7d")
    return sum(int(part or 0) * size for part, size in zip(parts.groups(), _UNITS_S.values(), strict=True))


def prompt_of(spec: pb.PinSpec) -> Any:
    """Its prompt as it was given, to be compared and shown: text, a list of messages or of ids; None where it is not told."""
    match spec.WhichOneof("prompt"):
        case "text":
            return spec.text
        case "chat":
            return [{"role": one.role, "content": one.content} for one in spec.chat.messages]
        case "tokens":
            packed = spec.tokens.ids
            return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
        case _:
            return None


_Put = Callable[[pb.PinSpec, str, Any, Path], None]


def _put_text(spec: pb.PinSpec, field: str, value: Any, _: Path) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(field, f"must be a text, got {_shown(value)}")
    setattr(spec, field, value)


def _put_public(spec: pb.PinSpec, field: str, value: Any, _: Path) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(field, f"must be true or false, got {_shown(value)}")
    spec.public = value


def _put_replicas(spec: pb.PinSpec, field: str, value: Any, _: Path) -> None:
    if value == ALL:
        spec.replicas = 0
        return
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or not 1 <= number <= MAX_REPLICAS:
        raise InvalidRequestError(
            field, f"must be {ALL!r} or a number of workers from 1 on, got {_shown(value)}"
        )
    spec.replicas = number


def _put_tier(spec: pb.PinSpec, field: str, value: Any, _: Path) -> None:
    tier = TIERS.get(value) if isinstance(value, str) else None
    if tier is None:
        raise InvalidRequestError(field, f"must be {' or '.join(TIERS)}, got {_shown(value)}")
    spec.tier = tier


def _put_ttl(spec: pb.PinSpec, field: str, value: Any, _: Path) -> None:
    if type(value) is not int and not isinstance(value, str):
        raise InvalidRequestError(field, f"must be a span of time, as in 1h, got {_shown(value)}")
    try:
        seconds = parse_span(str(value))
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from error
    if not 0 < seconds <= MAX_TTL_S:
        raise InvalidRequestError(
            field, f"must be more than nothing and at most ten years, got {_shown(value)}"
        )
    spec.ttl_ms = seconds * 1000


def _put_prompt(spec: pb.PinSpec, field: str, value: Any, folder: Path) -> None:
    prompt = _PROMPTS[field](field, value, folder)
    request = build_generate(prompt)
    kind = request.WhichOneof("prompt")
    if kind == "text":
        spec.text = request.text
    elif kind == "chat":
        spec.chat.CopyFrom(request.chat)
    else:
        spec.tokens.CopyFrom(request.tokens)


def _as_text(field: str, value: Any, _: Path) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(field, f"must be a text, got {_shown(value)}")
    return value


def _read(field: str, value: Any, folder: Path) -> str:
    path = folder / _as_text(field, value, folder)
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(field, f"cannot read {path}: {error}") from error


def _as_chat(field: str, value: Any, _: Path) -> Any:
    if not isinstance(value, list):
        raise InvalidRequestError(field, "must be a list of messages with role and content")
    return value


def _read_chat(field: str, value: Any, folder: Path) -> Any:
    try:
        return _as_chat(field, json.loads(_read(field, value, folder)), folder)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"{value} is no JSON: {error}") from error


def _as_system(field: str, value: Any, folder: Path) -> Any:
    return [{"role": "system", "content": _as_text(field, value, folder)}]


def _as_ids(field: str, value: Any, _: Path) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise InvalidRequestError(field, "must be a list of token ids")
    return value


def _read_ids(field: str, value: Any, folder: Path) -> list[int]:
    """Ids with commas, spaces or line breaks between them, in brackets or not."""
    words = _read(field, value, folder).strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InvalidRequestError(field, f"{value} is no list of token ids, as in 5, 17, 9") from error


_PROMPTS: Final[Mapping[str, Callable[[str, Any, Path], Any]]] = {
    "text": _as_text,
    "prompt_file": _read,
    "chat": _as_chat,
    "chat_file": _read_chat,
    "system": _as_system,
    "system_file": lambda field, value, folder: _as_system(field, _read(field, value, folder), folder),
    "token_ids": _as_ids,
    "token_ids_file": _read_ids,
}

_PUTS: Final[Mapping[str, _Put]] = {
    "name": _put_text,
    "owner": _put_text,
    "tenant": _put_text,
    "adapter": _put_text,
    "extra_key": _put_text,
    "public": _put_public,
    "replicas": _put_replicas,
    "tier": _put_tier,
    "ttl": _put_ttl,
} | dict.fromkeys(PROMPT_FIELDS, _put_prompt)


def differences(wanted: pb.PinSpec, there: pb.PinSpec) -> list[str]:
    """Names of the fields by which a pin that is there is not as it is wanted. What is left out is as the router takes it."""
    plain = ("adapter", "extra_key", "public", "replicas", "tier", "ttl_ms")
    found = [field for field in plain if getattr(wanted, field) != getattr(there, field)]
    if not wanted.public and (wanted.tenant or there.owner) != (there.tenant or there.owner):
        found.append("tenant")
    if prompt_of(wanted) != prompt_of(there):
        found.append("prompt")
    return found


def joined(problems: Iterable[InvalidRequestError]) -> str:
    """Problems in one line."""
    return "; ".join(str(problem) for problem in problems)


def _shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    return repr(value)[:80]
