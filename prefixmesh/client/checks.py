"""A caller's prompt and values in their checked forms.

What the protobuf runtime would refuse with an error of its own (a number out of its type's range, a string that is no UTF-8)
is refused here as InvalidRequestError, with the field's name.
"""

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, SupportsFloat, SupportsIndex, TypeAlias, cast

from prefixmesh import tokens
from prefixmesh.errors import InvalidRequestError
from prefixmesh.requests import ROLES, ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

MAX_TOKEN_ID: Final = 2**32 - 1
"""Ids travel as uint32."""

MAX_INTEGER: Final = 2**63 - 1
"""No field of ours is wider; Python's own integers have no bound and break float arithmetic above 2**1024."""

PromptLike: TypeAlias = Prompt | str | Sequence[ChatMessage | Mapping[str, str]] | Sequence[int]
"""Plain text, completed as it stands; or chat messages (``{"role": …, "content": …}`` will do); or token ids."""


def check_prompt(prompt: PromptLike) -> Prompt:
    """The prompt in its checked form. A sequence is token ids when its first item is an integer, else chat messages."""
    if isinstance(prompt, str):
        return TextPrompt(check_text("text", prompt))
    if isinstance(prompt, TextPrompt):
        return TextPrompt(check_text("text", prompt.text))
    if isinstance(prompt, TokenPrompt):
        return prompt
    if isinstance(prompt, ChatPrompt):
        return ChatPrompt(check_messages("chat.messages", prompt.messages))
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(
            "prompt", f"must be text, chat messages or token ids, got {type(prompt).__name__}"
        )
    items: Sequence[object] = tuple(cast("Iterable[object]", prompt))
    if items and isinstance(items[0], SupportsIndex):
        return TokenPrompt(check_ids("tokens.ids", items))
    return ChatPrompt(check_messages("chat.messages", items))


def check_integer(field: str, value: object) -> int:
    """Any integer type as an int (numpy's too); a float is refused even when it is whole."""
    if not isinstance(value, SupportsIndex):
        raise InvalidRequestError(field, f"must be an integer, got {type(value).__name__}")
    number = operator.index(value)
    if abs(number) > MAX_INTEGER:
        raise InvalidRequestError(field, "must fit a signed 64-bit integer")
    return number


def check_real(field: str, value: object) -> float:
    """Any real number as a float; text is refused."""
    if not isinstance(value, SupportsFloat | SupportsIndex):
        raise InvalidRequestError(field, f"must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequestError(field, "is too large a number") from error


def check_idle_timeout(value: object) -> float:
    """Seconds that a worker may be silent between tokens; 0: for ever."""
    seconds = check_real("stream_idle_timeout_s", value)
    if not 0.0 <= seconds < math.inf:  # NaN fails it too
        raise InvalidRequestError("stream_idle_timeout_s", f"must be seconds from 0 on, got {seconds}")
    return seconds


def check_text(field: str, value: object) -> str:
    """A string that can be sent: one without lone surrogates."""
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, "must be valid UTF-8") from error
    return value


def check_bias(field: str, value: object) -> dict[int, float]:
    """A mapping of token ids to numbers."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, f"must map token ids to numbers, got {type(value).__name__}")
    return {check_integer(field, token_id): check_real(field, bias) for token_id, bias in value.items()}


def check_schema(field: str, value: object) -> str:
    """A JSON Schema as text, or as what that text means."""
    if not isinstance(value, Mapping):
        return check_text(field, value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"cannot be written as JSON: {error}") from error


def check_ids(field: str, items: Iterable[object]) -> bytes:
    """Token ids, packed."""
    ids = [check_integer(field, item) for item in items]
    if ids and (min(ids) < 0 or max(ids) > MAX_TOKEN_ID):
        raise InvalidRequestError(field, f"must be at least 0 and at most {MAX_TOKEN_ID}")
    return tokens.pack(ids)


def check_messages(name: str, items: Iterable[object]) -> tuple[ChatMessage, ...]:
    """Chat messages; ``name`` is what the caller knows the sequence by."""
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        field = f"{name}[{index}]"
        if isinstance(item, ChatMessage):
            role, content = item.role, item.content
        elif isinstance(item, Mapping) and set(item) == {"role", "content"}:
            role, content = item["role"], item["content"]
        else:
            raise InvalidRequestError(field, "must be a ChatMessage or a dict of 'role' and 'content'")
        if role not in ROLES:
            raise InvalidRequestError(f"{field}.role", f"must be one of {', '.join(ROLES)}, got {role!r}")
        messages.append(ChatMessage(role, check_text(f"{field}.content", content)))
    return tuple(messages)
