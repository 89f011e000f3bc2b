"""The limits of a request, each tried at both of its edges."""

import math
from typing import Any

import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.requests import (
    MAX_CHAT_MESSAGES,
    MAX_EXTRA_KEY_BYTES,
    MAX_LOGIT_BIAS,
    MAX_REGEX_BYTES,
    MAX_REPETITION_PENALTY,
    MAX_REQUEST_ID_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    check_min_tokens,
    resolve_max_tokens,
)

TEXT = TextPrompt("a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_p", 1.0),
        ("top_p", 1e-6),
        ("top_k", 0),
        ("top_k", 2**31 - 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 2**31 - 1),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("stop", ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS),
        ("stop_token_ids", (0, 2**31 - 1) * (MAX_STOP_TOKEN_IDS // 2)),
        ("repetition_penalty", 1e-6),
        ("repetition_penalty", MAX_REPETITION_PENALTY),
        ("frequency_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0)),
        ("logit_bias", {2**31 - 1: 100.0}),
        ("min_tokens", 2**31 - 1),
        ("logprobs", 0),
        ("json_schema", "true"),
        ("json_schema", '{"a":' * MAX_SCHEMA_DEPTH + "0" + "}" * MAX_SCHEMA_DEPTH),
        ("json_schema", '{"a": "' + "x" * (MAX_SCHEMA_BYTES - 9) + '"}'),
        ("regex", "é" * (MAX_REGEX_BYTES // 2)),
        ("logprobs", 20),
    ],
)
def test_values_at_a_limit_are_accepted(name: str, value: Any) -> None:
    """A limit is the last value that is allowed."""
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, bad) for name in ("temperature", "top_p", "min_p") for bad in (math.nan, math.inf, -0.1)),
        ("temperature", 100.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("top_k", -1),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x" * (MAX_STOP_CHARS + 1),)),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        *((name, bad) for name in ("frequency_penalty", "presence_penalty") for bad in (math.nan, -2.1, 2.1)),
        *(("repetition_penalty", bad) for bad in (math.nan, math.inf, 0.0, -1.0, 10.1)),
        *(("logit_bias", {5: bad}) for bad in (math.nan, math.inf, -100.1, 101.0)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("json_schema", ""),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "null"),
        ("json_schema", '{"a":' * (MAX_SCHEMA_DEPTH + 1) + "0" + "}" * (MAX_SCHEMA_DEPTH + 1)),
        ("json_schema", "[" * 10_000),
        ("json_schema", '{"a":' * 5000 + "0" + "}" * 5000),
        ("json_schema", '{"a": "' + "x" * MAX_SCHEMA_BYTES + '"}'),
        ("regex", ""),
        ("regex", "é" * (MAX_REGEX_BYTES // 2 + 1)),
        ("logprobs", 21),
        ("min_tokens", 2**31),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
    ],
)
def test_values_beyond_a_limit_are_refused_by_name(name: str, value: Any) -> None:
    """Negative, NaN, infinite and too large numbers are the caller's error, with the field's name (F58)."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == f"sampling.{name}"


def test_two_grammars_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling\.regex: .*together"):
        SamplingParams(regex="a", json_schema="{}")


@pytest.mark.parametrize("limit", [3, None])
def test_more_tokens_at_least_than_at_most_are_refused(limit: int | None) -> None:
    """Also when the limit is what the context leaves."""
    with pytest.raises(InvalidRequestError, match=r"sampling\.min_tokens: .*at most 3") as caught:
        check_min_tokens(SamplingParams(min_tokens=4, max_tokens=limit).min_tokens, 3)
    assert caught.value.field == "sampling.min_tokens"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "text"),
        (ChatPrompt(()), "chat.messages"),
        (ChatPrompt((ChatMessage("user", "a"),) * (MAX_CHAT_MESSAGES + 1)), "chat.messages"),
        (TokenPrompt(b""), "tokens.ids"),
        (TokenPrompt(b"abcde"), "tokens.ids"),
    ],
)
def test_an_empty_or_broken_prompt_is_refused_by_name(prompt: Prompt, field: str) -> None:
    """Each kind of prompt has its own way of being empty (F58)."""
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest(prompt=prompt)
    assert caught.value.field == field


def test_keys_and_ids_are_limited_in_bytes() -> None:
    """A limit in bytes counts bytes, not characters, and takes text of any kind."""
    GenerateRequest(prompt=TEXT, extra_key="é" * (MAX_EXTRA_KEY_BYTES // 2))
    with pytest.raises(InvalidRequestError, match="extra_key"):
        GenerateRequest(prompt=TEXT, extra_key="é" * (MAX_EXTRA_KEY_BYTES // 2 + 1))
    with pytest.raises(InvalidRequestError, match="request_id"):
        GenerateRequest(prompt=TEXT, client_request_id="x" * (MAX_REQUEST_ID_BYTES + 1))
    assert GenerateRequest(prompt=TEXT, extra_key="\ud800").extra_key == "\ud800"


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "resolved"),
    [(1, None, 99), (99, None, 1), (1, 99, 99), (100, 0, 0), (99, 1, 1), (50, 0, 0)],
)
def test_what_fits_the_context_is_served(prompt_tokens: int, asked: int | None, resolved: int) -> None:
    """Prompt and answer may fill the context to its last token (F59)."""
    assert resolve_max_tokens(prompt_tokens, asked, 100) == resolved


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "field"),
    [
        (100, None, "prompt"),
        (101, None, "prompt"),
        (101, 0, "prompt"),
        (102, 1, "prompt"),
        (100, 1, "sampling.max_tokens"),
        (99, 2, "sampling.max_tokens"),
        (1, 2**31 - 1, "sampling.max_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_the_limit(
    prompt_tokens: int, asked: int | None, field: str
) -> None:
    """One token too many is refused, and the message holds a limit the caller can use (F59)."""
    with pytest.raises(InvalidRequestError, match=r"\b(99|100|1|0)\b") as caught:
        resolve_max_tokens(prompt_tokens, asked, 100)
    assert caught.value.field == field
