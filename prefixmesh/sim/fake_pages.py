"""The bytes of a fake worker's KV, for copies to other workers and from them: a number a token, told as its two halves.

That is the layout of one layer whose keys and values have one number of 32 bits each, so that fake workers copy from each other by the code and
the checks of real ones, and never from a real one. A page that went wrong on the way gives a wrong answer.
"""

from collections.abc import Callable

import numpy as np

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import InternalError
from prefixmesh.sim.fake_model import Chains
from prefixmesh.worker.kv_copies.layout import CopyLayout


def fake_layout(page_size: int) -> CopyLayout:
    """Of all fake workers with pages of this size."""
    return CopyLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, page_size=page_size)


class FakePages:
    """``kv_desk.PageBytes`` of the slots that a fake model fills."""

    def __init__(
        self, kv: Chains, page_size: int, read_host: Callable[[PageIndices], bytes] | None = None
    ) -> None:
        """``read_host`` gives the bytes of pages of the host; None without a host tier."""
        self.layout = fake_layout(page_size)
        self._pages = kv.reshape(-1, page_size)
        self._read_host = read_host

    def read(self, device: PageIndices, host: PageIndices) -> bytes:
        """See ``PageBytes.read``."""
        there = self._pages[device].tobytes()
        if not len(host):
            return there
        if self._read_host is None:
            raise InternalError(f"{len(host)} host pages of a worker without a host tier")
        return there + self._read_host(host)

    def write(self, device: PageIndices, kv: memoryview) -> None:
        """See ``PageBytes.write``."""
        self._pages[device] = np.frombuffer(kv, dtype=self._pages.dtype).reshape(len(device), -1)
