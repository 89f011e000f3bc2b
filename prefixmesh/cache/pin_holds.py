"""How the pins of each tier hold what the tree has there: by locks of that tier's books, which make the end of what is held a node.

What the host's pins hold may leave the device, and its copy stays; what is on the device alone they wait for until its backup is complete.
"""

from collections.abc import Callable

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.grower import Grower
from prefixmesh.cache.host_tier import HostTier
from prefixmesh.cache.pins import Held
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.walk import edge_name, step, walk_device
from prefixmesh.tokens import TOKEN_BYTES


class DeviceHolds:
    """The device tier of one tree, as a ``PinTable`` asks it. Implements ``PinnedTree``."""

    def __init__(
        self, accounts: PageAccounts, grower: Grower, page_size: int, can_hold: Callable[[RadixKey], bool]
    ) -> None:
        self._accounts = accounts
        self._grower = grower
        self._page_bytes = page_size * TOKEN_BYTES
        self.page_size = page_size
        self.can_hold = can_hold
        self.release = accounts.release

    def hold(self, key: RadixKey) -> Held:
        """Lock the longest prefix of ``key`` that is on the device, making its end a node. A use for the order of eviction alone. As
        ``match_prefix`` and ``lock``."""
        node, _, position, inside, shared = walk_device(self._accounts.root, key, self._page_bytes)
        if inside is not None:
            node = self._grower.part_of(inside, shared)
        self._accounts.reorder(node)
        wholly = position == len(key.tokens)
        next_edge = None if wholly else edge_name(key, position, self._page_bytes)
        return Held(node, self._accounts.lock(node), position // TOKEN_BYTES, next_edge)


class HostHolds:
    """The host tier of one tree, as a ``PinTable`` asks it. Implements ``PinnedTree``."""

    def __init__(
        self,
        accounts: PageAccounts,
        host: HostTier,
        grower: Grower,
        page_size: int,
        can_hold: Callable[[RadixKey], bool],
    ) -> None:
        self._accounts = accounts
        self._host = host
        self._grower = grower
        self._page_bytes = page_size * TOKEN_BYTES
        self.page_size = page_size
        self.can_hold = can_hold

    def hold(self, key: RadixKey) -> Held:
        """Lock the longest prefix of ``key`` that is on the host, whether on the device too or not, making its end a node. A use for the
        order of eviction alone. O(depth + length)."""
        node, position = self._accounts.root, 0
        while (taken := step(node, key, position, self._page_bytes)) is not None and taken.child.host_pages:
            node = self._grower.part_of(taken.child, taken.shared_bytes)
            position += taken.shared_bytes
            if node is not taken.child:
                break
        self._accounts.reorder(node)
        wholly = position == len(key.tokens)
        next_edge = None if wholly else edge_name(key, position, self._page_bytes)
        return Held(node, self._host.lock(node), position // TOKEN_BYTES, next_edge)

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock. O(depth)."""
        self._accounts.serial += 1
        self._host.release(receipt, self._accounts.gone, self._accounts.serial)
