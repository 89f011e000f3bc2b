"""What the tables of ``prefixmesh bench`` share: amounts, verdicts, and a width where there is no terminal."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

PIPE_WIDTH: Final = 160
"""Where no terminal sets a width: a figure stays on its line."""


def amount(value: float | None) -> str:
    """Three significant digits and no fewer than there are before the point; nothing for None."""
    if value is None:
        return ""
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{decimals}f}"


def verdict(met: bool | None) -> "Text":  # noqa: FBT001
    """Of a figure that was held to a target, or nothing."""
    from rich.text import Text

    return {None: Text(""), True: Text("met", "green"), False: Text("missed", "red")}[met]


def print_table(names: Sequence[str], left: Sequence[str], rows: "Sequence[Sequence[str | Text]]") -> None:
    """Print ``rows`` under ``names``; numbers to the right, the columns of ``left`` to the left."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
