"""How a starting fleet looks in the terminal: a line per part that lives until the part is ready, or plain lines in a pipe."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import click

from prefixmesh.cli.failure import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from prefixmesh.fleet.events import FleetEvent

_RAY: Final = "ray"
_MODEL: Final = "model"


class FleetProgress:
    """Takes a fleet's events and shows them on stderr, so that stdout holds results alone."""

    def __init__(self) -> None:
        self._live: Progress | None = None
        self._lines: dict[str, TaskID] = {}
        self._is_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    def __call__(self, event: "FleetEvent") -> None:
        """Show one event."""
        name, text, is_done = describe(event)
        if event.kind == "fleet_ready":
            self._end_live()
            self._is_up = True
        elif name and not self._is_up and sys.stderr.isatty():
            self._show(name, text, is_done=is_done)
        else:
            click.echo(f"{name or 'fleet'}: {text}", err=True)

    def _show(self, name: str, text: str, *, is_done: bool) -> None:
        if self._live is None:
            self._live = _start_live()
        if name != _MODEL and _MODEL in self._lines:
            self._live.update(
                self._lines.pop(_MODEL), completed=1
            )  # what comes after it shows that it is here
        if name not in self._lines:
            self._lines[name] = self._live.add_task(text, name=name, total=1)
        self._live.update(self._lines[name], description=text, completed=int(is_done))

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._lines.clear()


def _start_live() -> "Progress":
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    live = Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.fields[name]:10}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
    )
    live.start()
    return live


def describe(event: "FleetEvent") -> tuple[str, str, bool]:
    """``(part, what is happening to it, whether that ends the wait for it)`` of one event, for people."""
    detail = one_line(event.detail)
    match event.kind:
        case "fetching":
            return _MODEL, detail, False
        case "ray_starting":
            return _RAY, f"joining {detail}" if detail else "starting a local Ray", False
        case "ray_ready":
            return _RAY, f"ready in {event.seconds:.1f} s", True
        case "starting":
            return event.subject, "waiting for its process", False
        case "loading":
            return event.subject, "loading", False
        case "ready":
            sums = f" · {event.memory_sums}" if event.memory_sums else ""
            place = f" at {detail}" if detail else ""
            return event.subject, f"ready in {event.seconds:.1f} s{place}{sums}", True
        case "fleet_ready":
            return "", f"up in {event.seconds:.1f} s", True
        case "lost":
            again = f"in {event.seconds:.1f} s" if event.seconds else "now"
            return event.subject, f"LOST: {detail}; started again {again}", True
        case "given_up":
            return event.subject, f"GIVEN UP: {detail}; once that is mended: prefixmesh up --revive", True
        case "stopping":
            return "", "stopping; once more to stop at once", False
        case _:
            return "", f"{event.kind} {detail}".strip(), True
