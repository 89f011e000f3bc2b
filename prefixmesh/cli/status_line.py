"""How far something is that a command waits for, on stderr."""

import sys

import click


class StatusLine:
    """On a terminal one line that is written over, elsewhere a line whenever it is another; on stderr."""

    def __init__(self) -> None:
        self._last = ""
        self._live = sys.stderr.isatty()

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            click.echo("\r\x1b[K", err=True, nl=False)

    def show(self, text: str) -> None:
        """How far it is now, a line for each thing that is waited for; empty when nothing is."""
        if text == self._last:
            return
        self._last = text
        if self._live:
            lines = text.split("\n")
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            click.echo(f"\r\x1b[K{lines[0]}{more}", err=True, nl=False)
        elif text:
            click.echo(text, err=True)
