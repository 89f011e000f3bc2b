"""The connections of a client that streams from workers itself: pooled by address, never more than a bound. Pure: it opens through a
function and closes nothing, but says what its caller must close.

A channel in use is never given up. Where all places are in use by streams, a further worker gets none, and the request goes the other
way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MAX_CHANNELS: Final = 128
"""Each is a socket with buffers of its own, here and at the worker; a fleet of more workers has its least recently used ones closed."""

ChannelT = TypeVar("ChannelT")


@dataclass(slots=True)
class _Place(Generic[ChannelT]):
    channel: ChannelT
    streams: int = 0


@dataclass(frozen=True, slots=True)
class Taken(Generic[ChannelT]):
    """A channel to use, and the idle one that lost its place for it."""

    channel: ChannelT
    to_close: ChannelT | None


class WorkerChannels(Generic[ChannelT]):
    """Not thread-safe. ``take`` and ``release`` are O(1) but for a full pool, where taking is O(channels)."""

    def __init__(self, open_channel: Callable[[str], ChannelT], limit: int = MAX_CHANNELS) -> None:
        self._open_channel = open_channel
        self._limit = limit
        self._places: dict[str, _Place[ChannelT]] = {}  # the least recently taken first
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        busy = sum(place.streams > 0 for place in self._places.values())
        return f"WorkerChannels({busy} in use, {len(self) - busy} idle)"

    def take(self, address: str) -> Taken[ChannelT] | None:
        """A channel for one stream, to be given back by ``release``; None when every place is in use, and after ``close``."""
        if self._is_closed:
            return None
        place, retired = self._places.pop(address, None), None
        if place is None:
            if len(self._places) >= self._limit:
                idle = next((name for name, other in self._places.items() if not other.streams), None)
                if idle is None:
                    return None
                retired = self._places.pop(idle).channel
            place = _Place(self._open_channel(address))
        self._places[address] = place
        place.streams += 1
        return Taken(place.channel, retired)

    def release(self, address: str) -> None:
        """A stream has ended."""
        place = self._places.get(address)
        if place is not None:
            assert place.streams > 0, "released more often than taken"
            place.streams -= 1

    def close(self) -> list[ChannelT]:
        """Forget all channels, which the caller closes; streams that are running end with them. From now on none is given: a call
        that was just asking for its way would open a channel that nobody closes, at the address of streams that are yet to end."""
        self._is_closed = True
        channels = [place.channel for place in self._places.values()]
        self._places.clear()
        return channels
