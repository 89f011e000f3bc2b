"""The type of command-line flags that are a span of time. Click's own range lets what is no number pass, since it compares false to both ends."""

import math
from typing import Any, Final

import click

MOST_SECONDS: Final = 7 * 24 * 3600.0
"""A longer wait for running answers is a mistake in units."""


class Seconds(click.FloatRange):
    """Seconds from 0 to a week."""

    def __init__(self) -> None:
        super().__init__(min=0, max=MOST_SECONDS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As ``FloatRange``, and fails for NaN."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds
