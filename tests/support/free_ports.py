"""Ports that a test may take, give back and take again: below those that the system hands out by itself, to whatever connects meanwhile."""

import contextlib
import random
import socket

_FIRST, _LAST = 12_000, 30_000


def free_ports(count: int) -> list[int]:
    """So many different ports of loopback that nobody listens at now."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = random.randrange(_FIRST, _LAST)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports
