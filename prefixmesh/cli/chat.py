"""``prefixmesh chat``: a conversation in the terminal."""

import re
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.options import answer_options, connection_options, generate_options, open_client
from prefixmesh.cli.terminal import print_note, print_stream, read_utf8
from prefixmesh.errors import PrefixmeshError

if TYPE_CHECKING:
    from prefixmesh.client import Client, GenerateOptions

QUIT: Final = "/quit"
NEW: Final = "/new"
_COMMAND: Final = re.compile(r"/[a-z]+")
"""A line of this form is meant for the chat, not for the model."""


@click.command()
@answer_options
@connection_options
def chat(system: str | None, **values: Any) -> None:
    """Chat in the terminal, with the whole conversation sent each turn: its beginning is what prefix caches save.

    Ctrl-C stops the running answer; /new begins a new conversation; /quit or Ctrl-D ends. Lines piped to stdin are turns.
    """
    is_interactive = sys.stdin.isatty()
    with open_client(values) as client:
        # Asked first, so that a wrong address or key shows before anybody has typed a question.
        names = ", ".join(model.name for model in client.list_models())
        print_note(f"{names} at {client.address} · Ctrl-C stops an answer, {NEW} begins anew, {QUIT} ends")
        conversation = Conversation(client, generate_options(values), system)
        while (line := _read_line(is_interactive=is_interactive)) is not None and line != QUIT:
            if line == NEW:
                conversation.begin()
            elif is_interactive and _COMMAND.fullmatch(line):
                print_note(f"there is no {line}: {NEW} begins anew, {QUIT} ends")
            elif line:
                try:
                    conversation.take_turn(line)
                except PrefixmeshError as error:
                    if not is_interactive:
                        raise
                    click.echo(f"Error: {one_line(str(error))}", err=True)


class Conversation:
    """A history that grows by a question and its answer each turn."""

    def __init__(self, client: "Client", options: "GenerateOptions", system: str | None) -> None:
        self._client = client
        self._options = options
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.begin()

    def begin(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = list(self._opening)

    def take_turn(self, question: str) -> None:
        """Ask, print the answer as it comes, and remember both.

        After Ctrl-C the part of the answer that was seen is remembered; a question that got no word of an answer is not.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        parts: list[str] = []
        try:
            with self._client.stream(asked, **self._options) as stream:
                print_stream(stream, parts)
        except KeyboardInterrupt:
            print_note("stopped")
            if not parts:
                return
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]


def _read_line(*, is_interactive: bool) -> str | None:
    """The next line, stripped; None at the end of the input."""
    if not is_interactive:
        line = read_utf8(sys.stdin.buffer.readline)
        return line.strip() if line else None
    import readline  # noqa: F401 - gives input() its history and editing

    while True:
        try:
            return input("> ").strip()
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            print_note(f"{QUIT} or Ctrl-D ends")
