"""What a caller may ask for, as validated domain types: no wire, no engine.

``prefixmesh.proto.codec`` turns wire messages into these and refuses what breaks a limit; the client builds them;
router and worker share them. Every limit is a named constant with its reason.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from prefixmesh.errors import InvalidRequestError

MAX_SEED: Final = 2**63 - 1
"""Seeds fit a signed 64-bit integer, so every language can hold one."""

MAX_TOKENS_LIMIT: Final = 2**31 - 1
"""Output limits are int32; the model's context is the real bound."""

MAX_STOP_STRINGS: Final = 16
"""Each stop string is searched in every delta; more than this is an attack, not a use."""

MAX_STOP_CHARS: Final = 256
"""A stop string holds back as much text as it is long, so it must stay short."""

MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
"""Each entry is a place to write in every step; a wish about more tokens than this is a job for a grammar."""

MAX_LOGPROBS: Final = 20
"""Each likely token that is told costs 8 bytes a token of the answer."""

MAX_SCHEMA_BYTES: Final = 32 * 1024
"""A large hand-written schema has some thousands; a grammar takes time and memory in its length."""

MAX_SCHEMA_DEPTH: Final = 64
"""Readers of JSON and compilers of grammars recurse."""

MAX_REGEX_BYTES: Final = 4096
MAX_REPETITION_PENALTY: Final = 10.0
"""Useful values are below 2; what lies far beyond flattens the distribution into noise."""

MAX_BRANCHES: Final = 64
"""Each branch is a request of its own to the engine: this many fill a batch of the default size."""

MAX_PRIORITY: Final = 100
"""Priorities go from minus this to this: enough levels for any policy, and never a number to outbid."""

MAX_QUEUE_TIMEOUT_MS: Final = 3_600_000
"""An hour; who would wait longer wants no limit, and a larger number is a mistake in units."""

MAX_EXTRA_KEY_BYTES: Final = 1024
MAX_REQUEST_ID_BYTES: Final = 256
MAX_SESSION_BYTES: Final = 256
MAX_CHAT_MESSAGES: Final = 4096

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose each next token. The randomness of output token *i* is a function of (seed, *i*) alone."""

    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. 0 to 100."""

    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum; above 0, at most 1."""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 to 1."""

    max_tokens: int | None = None
    """Most output tokens; None means what the context leaves. 0 computes the prompt and answers nothing."""

    seed: int | None = None
    """None lets the server draw one and tell it in ``Started``."""

    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""

    stop_token_ids: tuple[int, ...] = ()
    """The answer ends at any of these ids; the id itself is not part of the answer."""

    ignore_eos: bool = False
    """Go on past the model's own end-of-turn tokens (for benchmarks)."""

    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or answer hold already are divided by it where positive, multiplied where negative. Above 0."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it stands in the answer; -2 to 2."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that stands in the answer; -2 to 2."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids, after the penalties; -100 to 100."""

    min_tokens: int = 0
    """Before so many tokens the answer does not end in a stop: ids that end it are not chosen, stop strings not looked for."""

    logprobs: int | None = None
    """Tell each token's log-probability by the model alone, and so many of the likeliest at its place, 0 to 20."""

    json_schema: str | None = None
    """The answer is JSON that this schema, given as JSON text, allows."""

    regex: str | None = None
    """The whole answer matches this regular expression (no look-around, no back references)."""

    def __post_init__(self) -> None:
        _in_range("sampling.temperature", self.temperature, 0.0, 100.0)
        _in_range("sampling.top_p", self.top_p, 0.0, 1.0, above_low=True)
        _in_range("sampling.min_p", self.min_p, 0.0, 1.0)
        _in_range("sampling.top_k", self.top_k, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _in_range("sampling.max_tokens", self.max_tokens, 0, MAX_TOKENS_LIMIT)
        if self.seed is not None:
            _in_range("sampling.seed", self.seed, 0, MAX_SEED)
        _at_most("sampling.stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not text:
                raise InvalidRequestError("sampling.stop", "a stop string must not be empty")
            _at_most("sampling.stop", len(text), MAX_STOP_CHARS, "characters in one string")
        _at_most("sampling.stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        for token_id in self.stop_token_ids:
            _in_range("sampling.stop_token_ids", token_id, 0, 2**31 - 1)
        self._check_logit_rules()
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.json_schema is not None:
            if self.regex is not None:
                raise InvalidRequestError("sampling.regex", "cannot be given together with json_schema")
            _at_most("sampling.json_schema", _utf8_size(self.json_schema), MAX_SCHEMA_BYTES, "bytes")
            _check_json_schema(self.json_schema)
        if self.regex is not None:
            if not self.regex:
                raise InvalidRequestError("sampling.regex", "must not be empty")
            _at_most("sampling.regex", _utf8_size(self.regex), MAX_REGEX_BYTES, "bytes")

    def _check_logit_rules(self) -> None:
        repetition = self.repetition_penalty
        _in_range("sampling.repetition_penalty", repetition, 0.0, MAX_REPETITION_PENALTY, above_low=True)
        _in_range("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _at_most("sampling.logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "ids")
        for token_id, bias in self.logit_bias.items():
            _in_range("sampling.logit_bias", token_id, 0, 2**31 - 1)
            _in_range("sampling.logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None:
            _in_range("sampling.logprobs", self.logprobs, 0, MAX_LOGPROBS)
        most = MAX_TOKENS_LIMIT if self.max_tokens is None else self.max_tokens
        _in_range("sampling.min_tokens", self.min_tokens, 0, most)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as plain text, completed as it stands (no chat template)."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's own chat template."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as packed token ids (``prefixmesh.tokens``)."""

    packed: bytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One validated call of ``Inference.Generate``, without the caller's identity (that comes from credentials)."""

    prompt: Prompt
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str = ""
    """The model's name; empty means the one that is served."""

    adapter: str = ""
    """LoRA adapter by name; empty is the base model."""

    extra_key: str = ""
    """Narrows sharing of cached prefixes within the caller's tenant. Any string."""

    resumed_output: bytes = b""
    """Packed ids that were generated already: the beginning of the answer, which goes on after them."""

    resumed_branches: tuple[bytes, ...] = ()
    """What ``resumed_output`` is to one answer, for each of ``branches``; none, or as many as these."""

    branches: int = 1
    """Answers to compute from the one prompt. Branch *i* draws with ``branch_seed(seed, i)``. 1 to 64."""

    priority: int = 0
    """Higher goes first where the worker schedules by priority, and its prefix stays longer in a cache that evicts by priority."""

    queue_timeout_ms: int = 0
    """Most milliseconds to wait for the first admission to a batch; 0 leaves it to the worker's own limit."""

    session: str = ""
    """The caller's name for requests that belong together: a router may send them to one worker where nothing else tells workers apart."""

    client_request_id: str = ""
    """The caller's own id, for logs only; two requests may carry the same."""

    def __post_init__(self) -> None:
        # Most requests leave most fields alone, and every request passes here: what is not there is not looked at.
        if self.extra_key or self.client_request_id or self.session:
            _at_most("extra_key", _utf8_size(self.extra_key), MAX_EXTRA_KEY_BYTES, "bytes")
            _at_most("request_id", _utf8_size(self.client_request_id), MAX_REQUEST_ID_BYTES, "bytes")
            _at_most("session", _utf8_size(self.session), MAX_SESSION_BYTES, "bytes")
        if self.branches != 1 or self.priority or self.queue_timeout_ms:
            _in_range("branches", self.branches, 1, MAX_BRANCHES)
            _in_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
            _in_range("queue_timeout_ms", self.queue_timeout_ms, 0, MAX_QUEUE_TIMEOUT_MS)
        if self.resumed_output or self.resumed_branches:
            self._check_resumed()
        match self.prompt:
            case TokenPrompt(packed=b""):
                raise InvalidRequestError("tokens.ids", "the prompt must not be empty")
            case TokenPrompt(packed=packed):
                _packed("tokens.ids", packed)
            case TextPrompt(text=""):
                raise InvalidRequestError("text", "the prompt must not be empty")
            case ChatPrompt(messages=()):
                raise InvalidRequestError("chat.messages", "the prompt must not be empty")
            case ChatPrompt(messages=messages):
                _at_most("chat.messages", len(messages), MAX_CHAT_MESSAGES, "messages")

    @property
    def resumed(self) -> tuple[bytes, ...]:
        """What every branch begins with, packed; empty where nothing was generated. As many as branches."""
        if self.branches == 1:
            return self.resumed_branches or (self.resumed_output,)
        return self.resumed_branches or (b"",) * self.branches

    def _check_resumed(self) -> None:
        if self.resumed_output and self.branches > 1:
            raise InvalidRequestError(
                "branches",
                f"must be 1 with resumed_output, which is the beginning of one answer; got {self.branches}",
            )
        if self.resumed_output and self.resumed_branches:
            raise InvalidRequestError("resumed_branches", "cannot be given together with resumed_output")
        if self.resumed_branches and len(self.resumed_branches) != self.branches:
            raise InvalidRequestError(
                "resumed_branches",
                f"must be none, or as many as branches, {self.branches}; got {len(self.resumed_branches)}",
            )
        _packed("resumed_output", self.resumed_output)
        for branch, packed in enumerate(self.resumed_branches):
            _packed(f"resumed_branches[{branch}]", packed)


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    # Written so that NaN, which compares false to everything, is refused.
    if not (low < value <= high if above_low else low <= value <= high):
        bound = "above" if above_low else "at least"
        raise InvalidRequestError(name, f"must be {bound} {low} and at most {high}, got {value}")


def _packed(name: str, packed: bytes) -> None:
    if len(packed) % 4:
        raise InvalidRequestError(
            name, f"must be packed little-endian uint32, 4 bytes an id; got {len(packed)} bytes"
        )


def _utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _at_most(name: str, value: int, limit: int, unit: str) -> None:
    if value > limit:
        raise InvalidRequestError(name, f"at most {limit} {unit} allowed, got {value}")


def _check_json_schema(text: str) -> None:
    field_name, too_deep = "sampling.json_schema", f"at most {MAX_SCHEMA_DEPTH} levels allowed"
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise InvalidRequestError(field_name, too_deep) from error
    except ValueError as error:
        raise InvalidRequestError(field_name, f"must be JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(field_name, "must be a JSON object, or true or false")
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise InvalidRequestError(field_name, too_deep)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Refuse more tokens than the answer may have, ``max_tokens`` being resolved; raises InvalidRequestError."""
    _in_range("sampling.min_tokens", min_tokens, 0, max_tokens)


def check_resumed(request: GenerateRequest, max_tokens: int) -> None:
    """Refuse more tokens that were generated already than the answer may have; raises InvalidRequestError. Before they are sent on:
    a message may carry millions."""
    for branch, packed in enumerate(request.resumed):
        resumed_tokens = len(packed) // 4
        if resumed_tokens > max_tokens:
            raise InvalidRequestError(
                resumed_field(request, branch),
                f"at most max_tokens, {max_tokens}, allowed, got {resumed_tokens} tokens",
            )


def resumed_field(request: GenerateRequest, branch: int) -> str:
    """The field that says what ``branch`` goes on from."""
    return f"resumed_branches[{branch}]" if request.resumed_branches else "resumed_output"


def resolve_max_tokens(prompt_tokens: int, max_tokens: int | None, context_length: int) -> int:
    """The output limit that holds for a prompt in a context; raises InvalidRequestError when the two do not fit.

    ``None`` asks for what the context leaves, which must be at least one token; a given number must fit as a whole, so that
    nobody gets a silently shortened answer.
    """
    if max_tokens is None:
        if prompt_tokens >= context_length:
            raise InvalidRequestError(
                "prompt",
                f"{prompt_tokens} tokens leave no room for an answer: the limit is {context_length - 1} tokens",
            )
        return context_length - prompt_tokens
    if prompt_tokens > context_length:
        raise InvalidRequestError("prompt", f"{prompt_tokens} tokens; the limit is {context_length} tokens")
    if prompt_tokens + max_tokens > context_length:
        raise InvalidRequestError(
            "sampling.max_tokens",
            f"at most {context_length - prompt_tokens} with a prompt of {prompt_tokens} tokens in a context of "
            f"{context_length}, got {max_tokens}",
        )
    return max_tokens
