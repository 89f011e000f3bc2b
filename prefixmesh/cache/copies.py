"""Copies in flight, as records: which pages belong to one, and what it keeps from being evicted. ``transfers`` makes and ends them.

A copy has a *source* and a *destination*. A source on a tier keeps its owner, the tree, and is locked; a destination on a tier is
owned by the copy alone until the end, when each page becomes a node's or is freed. So a page has one owner at every moment,
whatever happens meanwhile.

====================  ======================  ======================  ======================  ======================
while in flight       ``Offload``             ``Restore``             ``Fetch``               ``HostRead``
====================  ======================  ======================  ======================  ======================
from, to              device, host            host, device            elsewhere, device       host, elsewhere
device lock           node and all above it   the device's match      the device's match      none
host lock             the host's part of it   node and all above it   none                    node and all above it
owned by the copy     host pages              device pages            device pages            nothing
====================  ======================  ======================  ======================  ======================
"""

from typing import ClassVar

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.cache.node import NO_PAGES, TreeNode
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.cache.tier import Tier


class Copy:
    """One copy in flight. Where both ends are on a tier, ``device_pages[i]`` and ``host_pages[i]`` are those of one page."""

    __slots__ = ("device_lock", "device_pages", "host_lock", "host_pages", "node", "start")

    source: ClassVar[Tier | None] = None
    """The tier it reads; None: something that is no tier of the tree."""
    target: ClassVar[Tier | None] = None
    """The tier it brings KV to."""

    def __init__(
        self,
        node: TreeNode,
        start: int,
        *,
        device_pages: PageIndices = NO_PAGES,
        host_pages: PageIndices = NO_PAGES,
        device_lock: LockReceipt | None = None,
        host_lock: LockReceipt | None = None,
    ) -> None:
        self.node: TreeNode | None = node
        """Where the copied range ends, but for a fetch, whose range begins there; None once the copy has ended."""
        self.start = start
        """The token at which the range begins."""
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.device_lock = device_lock
        self.host_lock = host_lock

    def pages_on(self, tier: Tier) -> PageIndices:
        """The pages of its range on a tier; none where it has no end there. O(1)."""
        return self.device_pages if tier is Tier.DEVICE else self.host_pages

    def owned_on(self, tier: Tier) -> PageIndices:
        """The pages of a tier that belong to it. O(1)."""
        return self.pages_on(tier) if tier is self.target else NO_PAGES

    def __repr__(self) -> str:
        state = "ended" if self.node is None else "in flight"
        return f"{type(self).__name__}({max(len(self.device_pages), len(self.host_pages))} pages, {state})"


class Offload(Copy):
    """From the device to the host: a backup."""

    __slots__ = ("gives_from",)

    source = Tier.DEVICE
    target = Tier.HOST

    gives_from: int | None
    """Of a rescue: the token from which on its path leaves the device when the copy has come; None for any other backup."""


class Restore(Copy):
    """From the host back to the device: a load-back."""

    __slots__ = ()

    source = Tier.HOST
    target = Tier.DEVICE


class Fetch(Copy):
    """From a disk, or another worker, to the device: KV that the tree does not know yet."""

    __slots__ = ("key", "life", "owner")

    target = Tier.DEVICE

    def __init__(
        self,
        node: TreeNode,
        start: int,
        *,
        key: RadixKey,
        owner: str,
        life: TreeNode,
        device_pages: PageIndices,
        device_lock: LockReceipt,
    ) -> None:
        super().__init__(node, start, device_pages=device_pages, device_lock=device_lock)
        self.key = key
        """All tokens from the first to the end of the range."""
        self.owner = owner
        """Who pays for what it brings."""
        self.life = life
        """The root when it began: another one by its end means a flush between."""


class HostRead(Copy):
    """From the host to somewhere else, such as a file: only the lock, no page."""

    __slots__ = ("key",)

    source = Tier.HOST

    def __init__(
        self, node: TreeNode, *, key: RadixKey, host_pages: PageIndices, host_lock: LockReceipt
    ) -> None:
        super().__init__(node, 0, host_pages=host_pages, host_lock=host_lock)
        self.key = key
        """All tokens of ``host_pages``, from the first on."""
