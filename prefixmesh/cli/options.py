"""Options that several commands share: where the fleet is, who is calling, how to answer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from prefixmesh.client import Client, GenerateOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEFAULT_MAX_TOKENS: Final = 512
"""A terminal wants an end; the API's own default is all that the context leaves."""

DEFAULT_TEMPERATURE: Final = 0.0
"""The likeliest answer: at the API's 1 the default model, small as it is, talks nonsense, which looks like a broken engine."""


class TokenBias(click.ParamType[tuple[int, float]]):
    """``ID=BIAS``, as a pair."""

    name = "bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """The pair; tells the user when it is none."""
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not of the form ID=BIAS, as in 42=-5.5.", param, ctx)


class TokenIds(click.ParamType[tuple[int, ...]]):
    """Ids with commas or spaces between them."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The ids; tells the user what is none."""
        try:
            return tuple(map(int, str(value).replace(",", " ").split()))
        except ValueError:
            self.fail(f"{value!r} is no list of token ids, as in 5,17,9.", param, ctx)


_CONNECTION: Final = (
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="Router, or a worker where it can answer that itself. [default: the fleet `up` started]",
    ),
    click.option(
        "--api-key",
        envvar="PREFIXMESH_API_KEY",
        show_envvar=True,
        help="Better given by the environment: others see a command's arguments.",
    ),
    click.option("--tenant", help="Who is calling, in ASCII; believed only by servers without API keys."),
    click.option("--timeout", type=float, metavar="SECONDS", help="Longest time for one answer."),
)
_ANSWER: Final = (
    click.option(
        "--direct",
        is_flag=True,
        help="Stream from the worker itself, where it can be reached from here; else through the router.",
    ),
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option("--model", help="Model by name. [default: the one that is served]"),
    click.option("--adapter", help="LoRA adapter by name."),
    click.option("--extra-key", help="Share cached prefixes only with calls of the same key."),
    click.option(
        "--priority",
        type=int,
        help="Higher goes first where the worker schedules by priority; -100 to 100. [default: 0]",
    ),
    click.option(
        "--queue-timeout-ms",
        type=int,
        metavar="MS",
        help="Give up when it has waited so long to be begun with. [default: the worker's own limit]",
    ),
    click.option(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True, help="Longest answer."
    ),
    click.option(
        "--temperature",
        type=float,
        default=DEFAULT_TEMPERATURE,
        show_default=True,
        help="0 is greedy: always the likeliest token.",
    ),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this sum. [default: 1]"),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all. [default: 0]"),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest. [default: 0]"),
    click.option("--seed", type=int, help="Same seed, same answer, at a temperature above 0."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before it; may be repeated."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="End the answer at this token; may be repeated.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end of turn."),
    click.option("--min-tokens", type=int, help="No stop before so many tokens. [default: 0]"),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Above 1 makes what prompt or answer hold less likely. [default: 1]",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Taken from a token's logit for every time it was answered. [default: 0]",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Taken once from the logit of every token that was answered. [default: 0]",
    ),
    click.option(
        "--logit-bias",
        type=TokenBias(),
        multiple=True,
        metavar="ID=BIAS",
        help="Add to a token's logit, -100 to 100; may be repeated.",
    ),
    click.option(
        "--json-schema",
        metavar="SCHEMA",
        help="The answer is JSON that this schema allows: JSON text, or @FILE.",
        callback=lambda _ctx, _param, value: _read_schema(value),
    ),
    click.option("--regex", help="The whole answer matches this regular expression."),
)
_SAMPLING_NAMES: Final = (
    "model",
    "adapter",
    "extra_key",
    "priority",
    "queue_timeout_ms",
    "branches",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "json_schema",
    "regex",
    "logprobs",
    "resumed_output",
)


def connection_options(command: _Command) -> _Command:
    """Decorator: the options that ``open_client`` reads."""
    return _decorate(command, _CONNECTION)


def answer_options(command: _Command) -> _Command:
    """Decorator: ``--system`` and the options that ``generate_options`` reads."""
    return _decorate(command, _ANSWER)


def open_client(values: Mapping[str, Any]) -> "Client":
    """The client that the connection options ask for."""
    from prefixmesh.client import Client

    return Client(
        values["address"],
        api_key=values["api_key"],
        tenant=values["tenant"],
        timeout_s=values["timeout"],
        direct=values.get("direct", False),
    )


def generate_options(values: Mapping[str, Any]) -> "GenerateOptions":
    """The options of a Generate call; what has no value here is left to the library's defaults."""
    given: Any = {name: values[name] for name in _SAMPLING_NAMES if values.get(name) is not None}
    given["logit_bias"] = dict(values["logit_bias"])
    options: GenerateOptions = given
    return options


def _read_schema(value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {value[1:]}: {error}", param_hint="--json-schema") from error


def _decorate(command: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command
