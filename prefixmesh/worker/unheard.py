"""Tasks whose end may come when nobody is left to be told of it."""

import asyncio
from typing import Any


def look_at(ended: "asyncio.Task[Any]") -> None:
    """A task's done callback: that it failed is looked at, so that asyncio does not warn of a failure that nobody has seen."""
    if not ended.cancelled():
        ended.exception()
