"""What the benches of ``prefixmesh bench`` share: their flags, and in their tables amounts, verdicts, and a width without a terminal."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from rich.text import Text

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Result = TypeVar("_Result", bound=Any)
"""A dataclass with a ``figure``, a dataclass with a ``target``: each bench has its own."""

PIPE_WIDTH: Final = 160
"""Where no terminal sets a width: a figure stays on its line."""


def bench_flags(
    known: Callable[[], Collection[str]], *, one_of_them: str, quick: str
) -> Callable[[_Command], _Command]:
    """Decorator: ``--json``, ``--check``, ``--quick`` and ``--only``, which takes any of ``known()`` and is asked for when used."""

    def check_names(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> frozenset[str]:
        for name in names:
            if name not in known():
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known())}", ctx, parameter)
        return frozenset(names)

    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--check", is_flag=True, help="Exit with 1 when a figure is not what was asked for."),
        click.option(
            "--quick", is_flag=True, help=f"{quick} and few repeats: soon done, and no measure of anything."
        ),
        click.option(
            "--only",
            "names",
            multiple=True,
            callback=check_names,
            help=f"Only this {one_of_them}; may be repeated. A name that is none lists those that there are.",
        ),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def refuse_quick_check(*, check: bool, quick: bool) -> None:
    """Raise UsageError where what is no measure would be held to targets."""
    if check and quick:
        raise click.UsageError("--check holds figures to targets, --quick measures nothing")


def unjudged(results: Sequence[_Result]) -> list[_Result]:
    """Of a quick run: without targets, so that nothing is called met or missed."""
    return [replace(one, figure=replace(one.figure, target=None)) for one in results]


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
