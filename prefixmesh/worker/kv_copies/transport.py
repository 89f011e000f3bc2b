"""How KV comes from another worker, as a copier sees it: a source and a range in, parts out.

``GrpcTransport`` is the one there is. One that moves bytes by RDMA (NIXL, for one) would stand behind the same interface: it would ask the
source for the same parts, and fetch their bytes by another way.
"""

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from prefixmesh.kv_source import KvSource
from prefixmesh.worker.prefix_messages import PrefixName


class WantedKv(NamedTuple):
    """What is asked of a source."""

    prefix: PrefixName
    start_tokens: int
    """What is here already."""

    model_revision: str
    layout_digest: str


class CopiedPart(NamedTuple):
    """Some of it, as it came: nothing of it is believed yet."""

    start_tokens: int
    tokens: int
    kv: bytes
    checksum: int


class KvTransport(Protocol):
    """See the module. One event loop calls it."""

    def read(self, source: KvSource, wanted: WantedKv) -> AsyncGenerator[CopiedPart, None]:
        """The parts in order; ends early where the source has no more. Closing it ends the stream at once. Raises the error that the source
        ended it with, or UnavailableError for one that cannot be reached."""
        ...

    async def close(self) -> None:
        """End everything, and let go of connections."""
        ...
