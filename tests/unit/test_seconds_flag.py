"""Flags that are seconds."""

import click
import pytest

from prefixmesh.seconds_flag import Seconds


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("1.5", 1.5), ("604800", 604800.0)])
def test_seconds_are_taken(text: str, seconds: float) -> None:
    assert Seconds().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "604801", "soon"])
def test_what_is_no_span_of_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Seconds().convert(text, None, None)
