"""A small disk tier: pages of 2 tokens, blocks of 4, a host pool whose bytes are known by page."""

from pathlib import Path

import torch

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.cache.node import unpack_pages
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from prefixmesh.worker.tiers.disk_jobs import DiskPrefix, ReadDone, WriteDone
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvLayout
from prefixmesh.worker.tiers.disk_tier import DiskTier

LAYOUT = KvLayout(dtype="float32", num_layers=3, num_kv_heads=2, head_dim=4, page_size=2, block_size=4)
IDENTITY = DiskIdentity(revision="r1", layout=LAYOUT)
NAMESPACE = Namespace(bytes(range(16)))
OTHER_NAMESPACE = Namespace(bytes(range(1, 17)))
WAIT_S = 60.0
"""Far more than a disk takes, on a machine that is busy with others."""


class FakeHost:
    """A host pool in which every page is full of its own number."""

    def __init__(self, num_pages: int = 2048, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        shape = (num_pages, *layout.page_shape)
        numbers = torch.arange(num_pages, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1)
        self.storage = numbers.expand(shape).contiguous().to(getattr(torch, layout.dtype))

    def buffer(self, num_pages: int) -> torch.Tensor:
        return torch.full((num_pages, *self.layout.page_shape), -1.0, dtype=self.storage.dtype)


def key_of(*tokens: int, namespace: Namespace = NAMESPACE) -> RadixKey:
    return RadixKey(namespace, pack(tokens))


def long_key(size_tokens: int, first: int = 100, namespace: Namespace = NAMESPACE) -> RadixKey:
    return RadixKey(namespace, pack(list(range(first, first + size_tokens))))


def pages_from(first: int, count: int) -> PageIndices:
    return unpack_pages(b"".join(page.to_bytes(4, "little") for page in range(first, first + count)))


def open_tier(
    folder: Path,
    *,
    host: FakeHost | None = None,
    identity: DiskIdentity = IDENTITY,
    max_bytes: int = 2**20,
) -> DiskTier:
    return DiskTier(folder, identity, host or FakeHost(layout=identity.layout), max_bytes)


def await_outcome(tier: DiskTier) -> ReadDone | WriteDone:
    """The next outcome, the only one that is open."""
    tier.wait_done(WAIT_S)
    (outcome,) = tier.take_done()
    tier.check_invariants()
    return outcome


def store(tier: DiskTier, key: RadixKey, first_page: int = 0) -> None:
    """Write a key whose KV is in the host's pages from ``first_page`` on, to the end."""
    pages = pages_from(first_page, len(key.tokens) // 4 // tier.layout.page_size)
    while (number := tier.write(key, pages)) is not None:
        outcome = await_outcome(tier)
        assert isinstance(outcome, WriteDone)
        assert outcome.number == number
        if not outcome.size_tokens:
            break


def found(tier: DiskTier, key: RadixKey, from_tokens: int = 0) -> DiskPrefix | None:
    return tier.find(tier.units(key), from_tokens)


def read(tier: DiskTier, prefix: DiskPrefix) -> ReadDone:
    number = tier.read(prefix)
    outcome = await_outcome(tier)
    assert isinstance(outcome, ReadDone)
    assert outcome.number == number
    return outcome


def page_numbers(done: ReadDone) -> list[int]:
    """Which of the host's pages the good part of a buffer holds; every number in each is looked at."""
    if done.buffer is None:
        return []
    numbers = []
    for page in done.buffer[: done.size_tokens // LAYOUT.page_size]:
        assert page.min() == page.max()
        numbers.append(int(page.max()))
    return numbers
