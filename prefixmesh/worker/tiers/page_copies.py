"""What a mover's thread asks of the memory it copies in: how a job's bytes move, a piece at a time. One implementation for each kind of device.

A job is copied by an iterator, so that the thread may look up between two pieces: an offload lets load-backs pass, and whoever closes the
mover waits for one piece and not for a job. For a load-back, each piece is a layer and yields a *mark*: something by which the loop that
computes can tell, or make its device wait, that the layer has come. On a CPU it has come when the mark is there; on a GPU the mark is an
event that the device has yet to reach.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from prefixmesh.worker.tiers.copies import CopyJob

Mark = Any
"""Of one layer of one load-back; what it is, only its ``PageCopies`` knows."""

Fence = Any
"""A place in what the loop has asked of its device, likewise."""


class PageCopies(Protocol):
    """Copies between a device pool and a host pool. ``fence``, ``reached`` and ``join`` are called by the loop that computes, the rest by
    the mover's thread; anything may raise what the device does. When an iterator has ended or raised, nothing touches its pages."""

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers' keys and values."""
        ...

    @property
    def num_layers(self) -> int:
        """Of the model; a load-back yields so many marks."""
        ...

    def fence(self) -> Fence:
        """All that the loop has asked of its device until now: what it writes is to be copied, and what it reads not to be overwritten."""
        ...

    def pass_fence(self, fence: Fence) -> None:
        """Block until the device has done all that."""
        ...

    def offload(self, job: CopyJob) -> Iterator[None]:
        """Copy device pages to host pages. The bytes are there when the iterator has ended. ValueError for pages that are not there."""
        ...

    def bring(self, job: CopyJob) -> Iterator[Mark]:
        """Copy a restore's or fetch's pages to the device, the first layer first, and yield each layer's mark. All bytes are there when
        the iterator has ended. ValueError for pages that are not there."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Whether the layer's bytes are there."""
        ...

    def join(self, mark: Mark) -> None:
        """What the loop asks of its device from now on comes after the layer's bytes. Does not block where the device can wait itself."""
        ...

    def close(self) -> None:
        """Give back what copying took. Nothing is under way."""
        ...
