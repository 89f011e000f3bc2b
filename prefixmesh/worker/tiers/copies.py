"""Copies of KV pages between memories, as the engine's core sees them: what is asked for, and what became of it. Pure.

A *mover* copies; it knows pages and no tree. Three kinds of job::

    offload    device pages  ->  host pages       a backup; the tree's ``Offload``
    restore    host pages    ->  device pages     a load-back; the tree's ``Restore``
    fetch      a buffer      ->  device pages     KV that came from a disk or another worker; the tree's ``Fetch``

A job is started once and ends in exactly one ``Outcome``, good or not, after which nothing touches its pages any more. Until then both
ends stay as they are: the tree holds them. Outcomes come in any order.

What is brought to the device comes layer by layer, the first layer first, so that a step may compute with the first layers while the last
ones are on their way: ``expect`` says what the next step reads, and the model asks ``await_layer`` before it reads a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from prefixmesh.cache.base import PageIndices

CopyKind = Literal["offload", "restore", "fetch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyJob:
    """Pages to copy, ``device_pages[i]`` with ``host_pages[i]``, or with the buffer's page ``i``."""

    number: int
    """Different for all jobs of one mover."""

    kind: CopyKind
    device_pages: PageIndices
    host_pages: PageIndices | None = None
    """Of an offload and a restore."""

    buffer: Any = None
    """Of a fetch: a tensor of pages as the host pool lays them out, [pages, *page]; the core only hands it on."""


class Outcome(NamedTuple):
    """How a job ended."""

    number: int
    elapsed_s: float
    """Of the copying itself, without the wait for its turn; what rates are measured by. 0 where nothing was copied."""

    error: str = ""
    """Empty: every byte is where it belongs. Else what went wrong, or ``CANCELLED``; the destination holds anything."""


CANCELLED = "cancelled before it began"


class Mover(Protocol):
    """Copies pages. One loop calls it; its own thread or stream copies. Nothing here blocks but where it says so."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers' keys and values."""
        ...

    def start(self, job: CopyJob) -> None:
        """Queue a job. Restores and fetches go before offloads that have not begun. The caller bounds how many are under way."""
        ...

    def cancel(self, number: int) -> None:
        """Do not begin a job that has not begun; its outcome says ``CANCELLED``. Ignored for any other."""
        ...

    def layers_done(self, number: int) -> int:
        """How many layers of a restore or fetch are on the device already; all of them once it has ended well, 0 for a job that is not
        known any more."""
        ...

    def take_done(self) -> list[Outcome]:
        """Outcomes since the last call."""
        ...

    def wait_done(self, at_most_s: float) -> None:
        """Block until there is an outcome to take, or for so long."""
        ...

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None:
        """The next step reads what these jobs bring, and waits for each layer, for all of them together no longer than ``at_most_s``. Forgets
        what was expected before; an empty list lets every layer through at once."""
        ...

    def await_layer(self, layer: int) -> None:
        """Block until what is expected has come for a layer. Raises LoadBackError when it failed or the time was up: the step is void."""
        ...

    def close(self) -> None:
        """End what is under way and give the memory back. Jobs without an outcome have none any more."""
        ...
