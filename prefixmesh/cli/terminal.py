"""Reading prompts from and writing streamed answers to the terminal, or whatever stands in its place."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from prefixmesh.cli.render import printable, summary_line
from prefixmesh.errors import InvalidRequestError

if TYPE_CHECKING:
    from prefixmesh.client import Answer, Stream


def print_stream(stream: "Stream", parts: list[str]) -> "Answer":
    """Write the answer to stdout as it comes and its summary, dimmed, to stderr.

    What has been written is also put into ``parts``, so that a caller keeps it when the stream ends in an error or Ctrl-C; the
    line is ended in any case.
    """
    is_terminal = sys.stdout.isatty()
    try:
        for delta in stream:
            if delta.text:
                parts.append(delta.text)
                click.echo(printable(delta.text) if is_terminal else delta.text, nl=False)
    finally:
        if parts and not parts[-1].endswith("\n"):
            click.echo()
    print_note(summary_line(stream.answer))
    return stream.answer


def print_branches(answer: "Answer") -> None:
    """Write every branch of a finished answer to stdout, each under a line with its number, and the summary to stderr."""
    is_terminal = sys.stdout.isatty()
    for number, branch in enumerate(answer.branches):
        click.echo(f"[{number}]")
        text = printable(branch.text) if is_terminal else branch.text
        click.echo(text, nl=not text.endswith("\n"))
    print_note(summary_line(answer))


def print_note(text: str) -> None:
    """One dim line on stderr, so that stdout holds the answer alone."""
    click.secho(printable(text), err=True, dim=True)


def read_utf8(read: Callable[[], bytes]) -> str:
    """What ``read`` gives, as text; raises InvalidRequestError when it is not UTF-8."""
    try:
        return read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("stdin", "must be valid UTF-8") from error
