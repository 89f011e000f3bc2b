"""Running a server as a program: start, announce, serve until a signal, stop with grace. The same for every server of ours."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from prefixmesh.collector import freeze_what_stays

DEFAULT_GRACE_S: Final = 30.0
"""How long running answers may take to finish after a signal: most end within it, and orchestrators wait about as long."""

_BoundT = TypeVar("_BoundT", covariant=True)
_AnnouncedT = TypeVar("_AnnouncedT")


class Server(Protocol[_BoundT]):
    """What can be run so."""

    def start(self) -> Coroutine[Any, Any, _BoundT]:
        """Serve; the result says where."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs end within ``grace_s``, and let go of everything."""
        ...

    async def wait_closed(self) -> None:
        """Return once it has stopped; raise what else has ended it."""
        ...


async def run_until_signal(
    server: Server[_AnnouncedT], announce: Callable[[_AnnouncedT], None], grace_s: float
) -> None:
    """Run ``server`` until SIGTERM or SIGINT, at whatever point it comes; raises what ends the server otherwise.

    ``announce`` is called once, when it serves.
    """
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    stop_wanted = asyncio.create_task(signalled.wait())
    starting = asyncio.create_task(server.start())
    await asyncio.wait({stop_wanted, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return
    freeze_what_stays()
    announce(starting.result())
    closed = asyncio.create_task(server.wait_closed())
    await asyncio.wait({stop_wanted, closed}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(0.0 if closed.done() else grace_s)
    await closed
