"""``prefixmesh explain``: what every worker would cost for a prompt, term by term, and where it would go."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.options import TokenIds, connection_options
from prefixmesh.cli.router_calls import open_router
from prefixmesh.cli.tables import print_table
from prefixmesh.cli.terminal import read_utf8

if TYPE_CHECKING:
    from prefixmesh.client import PromptLike
    from prefixmesh.proto.v1.router_pb2 import CandidateCost, ExplainResponse

TERMS: Final = (
    ("wait", "wait_ms"),
    ("prefill", "prefill_ms"),
    ("copy", "copy_ms"),
    ("load back", "load_back_ms"),
    ("adapter", "adapter_load_ms"),
    ("recompute", "recompute_ms"),
    ("eviction", "eviction_ms"),
    ("crowding", "crowding_ms"),
    ("affinity", "affinity_ms"),
    ("total ms", "total_ms"),
)
"""Columns and the fields that they show: the own time, what is added for others, what is taken off, the cost."""


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from a file.",
)
@click.option("--tokens", type=TokenIds(), metavar="IDS", help="The prompt as token ids, as in 5,17,9.")
@click.option(
    "--messages",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A chat: a file with a JSON list of objects with role and content.",
)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--raw/--chat", "is_raw", help="Take PROMPT as plain text, or as a user's message. [default: chat]"
)
@click.option("--adapter", default="", help="LoRA adapter by name.")
@click.option("--extra-key", default="", help="As the request would carry it.")
@click.option("--max-tokens", type=int, help="Longest answer. [default: what the context leaves]")
@click.option("--branches", type=int, default=1, show_default=True, help="Answers to the one prompt.")
@click.option(
    "--for-tenant", default="", metavar="NAME", help="Whose request it is taken for. [default: your own]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
def explain(*, as_json: bool, **values: Any) -> None:
    """Show what each worker would cost for PROMPT (`-` reads it from stdin) now, and which would take it. Nothing is sent there.

    wait, prefill, copy, load back and adapter are the request's own time to its first token; recompute, eviction and crowding what it adds for
    others, which counts by the router's --spill-weight. All in milliseconds.
    """
    from prefixmesh.client import calls
    from prefixmesh.proto.v1 import router_pb2 as pb

    request = calls.build_generate(
        _prompt(values),
        max_tokens=values["max_tokens"],
        adapter=values["adapter"],
        extra_key=values["extra_key"],
        branches=values["branches"],
    )
    with open_router(values) as call:
        told = call("Explain", pb.ExplainRequest(request=request, tenant=values["for_tenant"]))
    if as_json:
        click.echo(json.dumps(as_dict(told), indent=2))
    else:
        _print(told)


def as_dict(told: "ExplainResponse") -> dict[str, Any]:
    """The explanation for ``--json``: the wire's own names, cheapest first."""
    return {
        "policy": told.policy,
        "spill_weight": told.spill_weight,
        "prompt_tokens": told.prompt_tokens,
        "chosen": told.chosen,
        "candidates": [
            {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in _sorted(told)
        ],
        "excluded": [
            {"worker_id": one.worker_id, "address": one.address, "why": one.why} for one in told.excluded
        ],
    }


def _prompt(values: dict[str, Any]) -> "PromptLike":
    text, path, ids, messages = (values[name] for name in ("prompt", "path", "tokens", "messages"))
    if sum(one is not None for one in (text, path, ids, messages)) != 1:
        raise click.UsageError("Give one of PROMPT, --file, --tokens and --messages.")
    if ids is not None:
        return list(ids)
    if messages is not None:
        return _read_messages(messages)
    if path is not None:
        text = read_utf8(path.read_bytes)
    elif text == "-":
        text = read_utf8(sys.stdin.buffer.read)
    if values["is_raw"]:
        if values["system"] is not None:
            raise click.UsageError("--system needs a chat; with --raw put it into PROMPT.")
        shaped: PromptLike = text
        return shaped
    system = values["system"]
    begin = [] if system is None else [{"role": "system", "content": system}]
    return [*begin, {"role": "user", "content": text}]


def _read_messages(path: Path) -> "PromptLike":
    try:
        messages: PromptLike = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"cannot read {path}: {error}", param_hint="--messages") from error
    if not isinstance(messages, list):
        raise click.BadParameter("must be a JSON list of messages", param_hint="--messages")
    return messages


def _sorted(told: "ExplainResponse") -> "list[CandidateCost]":
    return sorted(told.candidates, key=lambda one: one.total_ms)


def _print(told: "ExplainResponse") -> None:
    chosen = one_line(told.chosen) or "nobody"
    click.echo(
        f"{told.prompt_tokens:,} prompt tokens go to {chosen} · policy {told.policy} · spill weight {told.spill_weight:g}"
    )
    rows = [
        (
            f"{'* ' if one.worker_id == told.chosen else '  '}{one.worker_id}",
            one.trust or "-",
            f"{one.device_tokens}",
            f"{one.host_tokens}",
            f"{one.counted_tokens}",
            f"{one.in_flight}",
            *(f"{getattr(one, field):.1f}" for _, field in TERMS),
        )
        for one in _sorted(told)
    ]
    if rows:
        names = ("worker", "trust", "device", "host", "counted", "here", *(name for name, _ in TERMS))
        print_table(names, rows, texts=2)
    for excluded in told.excluded:
        click.echo(f"{one_line(excluded.worker_id)} cannot take it: {one_line(excluded.why)}")
