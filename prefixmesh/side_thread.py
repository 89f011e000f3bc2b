"""Running something slow beside the event loop, on a thread that nobody waits for when it is given up.

``asyncio.to_thread`` cannot be given up: the program's end waits for its threads, however long a download or a lock takes. Here a
cancelled wait leaves the thread behind, and it ends with the process. So it is for what may stop anywhere: reading a model, fetching a
file that is moved into place at the end. Not for what must be finished, such as writing state.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def run_aside(function: Callable[[], _T], name: str) -> _T:
    """The result of ``function``, called on a thread of that ``name``; raises what it raises. Cancelled: returns at once, the thread goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as failure:  # whoever waits is to have it, whatever it is
            error = failure
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
