"""What a GPU check found, as data: one JSON record, and the same as Markdown for ``docs/gpu.md``. Knows no torch."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ran", "failed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that was to be checked or measured."""

    name: str
    status: Status
    seconds: float
    note: str = ""
    """Why it failed or did not run; else what its figures mean."""

    figures: tuple[dict[str, Any], ...] = ()
    """Rows of one table: the same keys in each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRecord:
    """One check of one machine."""

    machine: dict[str, Any]
    """Device, versions, load: what the figures depend on."""

    parts: list[Part] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything that ran went wrong."""
        return any(part.status == "failed" for part in self.parts)

    def to_json(self) -> str:
        """The whole record, one object."""
        return json.dumps({"machine": self.machine, "parts": [asdict(part) for part in self.parts]}, indent=2)

    def to_markdown(self) -> str:
        """The record for people: the machine in a line, then a section for each part with its table."""
        machine = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        return (
            "\n".join([f"Machine: {machine}.", "", *(_section(part) for part in self.parts)]).rstrip() + "\n"
        )


def _section(part: Part) -> str:
    lines = [f"**{part.name}**: {part.status} ({part.seconds:.1f} s). {part.note}".rstrip(), ""]
    if part.figures:
        columns = list(part.figures[0])
        lines.append(_row(columns))
        lines.append(_row(["---"] * len(columns)))
        lines += [_row([_shown(row[column]) for column in columns]) for row in part.figures]
        lines.append("")
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
