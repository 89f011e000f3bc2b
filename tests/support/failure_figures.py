"""What a scenario of failures has shown: named figures, each with what it must be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.support.failure_load import Sent


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and its target."""

    name: str
    value: float
    target: str
    """In words; empty for a figure that is only told."""

    holds: bool = True

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, int) else f"{self.value:.3f}"
        verdict = (
            "" if not self.target else f"  ({self.target})" if self.holds else f"  FAILS ({self.target})"
        )
        return f"{self.name}: {value}{verdict}"


def none(name: str, value: int) -> Figure:
    """Must be 0."""
    return Figure(name, value, "none", value == 0)


def at_least(name: str, value: float, least: float) -> Figure:
    return Figure(name, value, f"at least {least:g}", value >= least)


def at_most(name: str, value: float, most: float) -> Figure:
    return Figure(name, value, f"at most {most:g}", value <= most)


def told(name: str, value: float) -> Figure:
    """No target."""
    return Figure(name, value, "")


def failing(figures: Iterable[Figure]) -> list[str]:
    """Those that miss their target, in words."""
    return [str(figure) for figure in figures if not figure.holds]


def percentile(values: Sequence[float], share: float) -> float:
    """0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def cached_share(requests: Iterable[Sent]) -> float:
    """Of the prompt tokens of those that were answered; 0 of none."""
    answered = [request for request in requests if request.is_whole]
    asked = sum(len(request.prompt) for request in answered)
    return sum(request.cached_tokens for request in answered) / asked if asked else 0.0
