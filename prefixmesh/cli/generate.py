"""``prefixmesh generate``: one prompt, one answer."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from prefixmesh.cli.options import TokenIds, answer_options, connection_options, generate_options, open_client
from prefixmesh.cli.render import answer_as_dict
from prefixmesh.cli.terminal import print_branches, print_stream, read_utf8

if TYPE_CHECKING:
    from prefixmesh.client import PromptLike


@click.command()
@click.argument("prompt")
@answer_options
@click.option(
    "--raw/--chat", "is_raw", help="Complete PROMPT as plain text, or answer it as a chat. [default: chat]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: each token's log-probability, and the N likeliest at its place, 0 to 20.",
)
@click.option(
    "--branches",
    type=int,
    metavar="N",
    help="So many answers, 1 to 64, each printed under its number when all are complete; with --temperature 0 all are the same. [default: 1]",
)
@click.option(
    "--resumed-output",
    type=TokenIds(),
    metavar="IDS",
    help="Ids that were answered already, as in 5,17,9: the answer goes on after them, and only what is new is printed.",
)
@connection_options
def generate(*, prompt: str, system: str | None, is_raw: bool, as_json: bool, **values: Any) -> None:
    """Answer PROMPT (`-` reads it from stdin).

    The answer goes to stdout as it comes; then one line on stderr tells how many prompt tokens were cached, which worker
    answered and when the first token came.
    """
    if is_raw and system is not None:
        raise click.UsageError("--system needs a chat; with --raw put it into PROMPT.")
    if values["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: they have no place in text.")
    text = read_utf8(sys.stdin.buffer.read) if prompt == "-" else prompt
    if not text:
        raise click.UsageError("PROMPT is empty.")
    with open_client(values) as client:
        shaped = text if is_raw else _as_chat(text, system)
        if as_json:
            answer = client.generate(shaped, **generate_options(values))
            click.echo(json.dumps(answer_as_dict(answer)))
        elif (values["branches"] or 1) > 1:
            print_branches(client.generate(shaped, **generate_options(values)))
        else:
            with client.stream(shaped, **generate_options(values)) as stream:
                print_stream(stream, [])


def _as_chat(text: str, system: str | None) -> "PromptLike":
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]
