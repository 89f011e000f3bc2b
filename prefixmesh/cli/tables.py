"""Tables on the terminal, or whatever stands in its place."""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from prefixmesh.cli.failure import one_line

PIPE_WIDTH: Final = 200
"""Where no terminal sets a width: addresses and problems stay on their line."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> None:
    """Print rows under their columns' names; the first ``texts`` columns and the last are words, the others numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        is_text = number < texts or name in ("state", "why")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name not in ("state", "why"))
    for row in rows:
        # Another's words must not steer the terminal, nor pass for markup.
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
