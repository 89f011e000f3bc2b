"""Where callers' sessions were last: a bounded memory, for a router that is set to draw them back a little. Pure.

A session is a caller's own name for requests that belong together, such as the turns of a conversation. Caches know what they hold of it;
this knows nothing but the last worker, and it counts only between workers that the cost does not tell apart.
"""

from collections import OrderedDict
from typing import Final

import xxhash

from prefixmesh.ids import Namespace
from prefixmesh.router.endpoint import Endpoint

MAX_SESSIONS: Final = 65_536
"""Some 15 MB. A session that is forgotten loses nothing but a tie."""

NO_SESSION: Final = 0


def session_name(namespace: Namespace, session: str) -> int:
    """A number for a caller's session within its namespace; ``NO_SESSION`` for none. Two that share one, which is one in 2**64, share a
    preference and nothing else."""
    return xxhash.xxh3_64_intdigest(namespace + session.encode()) or 1 if session else NO_SESSION


class Sessions:
    """The last worker of each session, the least recently used forgotten first. Not thread-safe."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max = max_sessions
        self._last: OrderedDict[int, Endpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, session: int) -> Endpoint | None:
        """Where a session was last; None when that is not known. O(1)."""
        return self._last.get(session)

    def went(self, session: int, endpoint: Endpoint) -> None:
        """A request of a session goes to a worker. ``NO_SESSION``: nothing happens. O(1)."""
        if session == NO_SESSION:
            return
        self._last[session] = endpoint
        self._last.move_to_end(session)
        if len(self._last) > self._max:
            self._last.popitem(last=False)
