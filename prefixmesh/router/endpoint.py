"""The name by which a router knows a worker."""

from typing import NewType

Endpoint = NewType("Endpoint", str)
"""A worker's address (``host:port``). Known from the first moment, where a worker's own id is only known once it has answered."""
