"""The parts in which KV goes from one worker to another: how large, and how it is known that one is what it should be. Pure."""

from typing import Final

import xxhash

from prefixmesh.errors import InvalidRequestError
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.kv_copies.layout import CopyLayout

PART_BYTES: Final = 8 * 2**20
"""Of one part, but that it has at least one page. An engine moves one part between two steps: some milliseconds, by which others' answers are
late; less would cost more messages."""

PART_S: Final = 1.0
"""Of a bounded rate, what one part may take, but that it has at least one page. Who reads waits for a part only so long
(``copier.PART_WAIT_S``), and all streams of a worker share its rate."""

MAX_PART_BYTES: Final = 32 * 2**20
"""Of one page, which a message must carry: half of what one may."""


def part_pages(layout: CopyLayout, bytes_per_s: float = 0.0) -> int:
    """Most pages in a part, at least one, where so many bytes may be sent a second; 0: as many as can."""
    size = min(PART_BYTES, int(bytes_per_s * PART_S)) if bytes_per_s else PART_BYTES
    return max(1, size // layout.page_bytes)


def checksum(tokens: bytes, end_tokens: int, kv: bytes) -> int:
    """XXH3-64 of a prefix's packed tokens up to a part's end, and then of the part's bytes: KV under other tokens, or of other places, has
    another. O(tokens + bytes), some GB/s. It finds what went wrong on the way; who sends is known by the fleet's token."""
    digest = xxhash.xxh3_64()
    digest.update(memoryview(tokens)[: end_tokens * TOKEN_BYTES])
    digest.update(kv)
    return digest.intdigest()


def check_part(
    layout: CopyLayout, tokens: bytes, begin: int, *, start: int, size: int, kv: bytes, told: int
) -> None:
    """Raise InvalidRequestError unless a part is the one that follows after ``begin`` tokens, whole, and unchanged. ``start`` and ``size`` are
    what it says of itself, ``told`` its checksum."""
    if start != begin:
        raise InvalidRequestError("part.start_tokens", f"must be {begin}, got {start}")
    left = len(tokens) // TOKEN_BYTES - begin
    if not 0 < size <= left or size % layout.page_size:
        raise InvalidRequestError(
            "part.tokens", f"must be whole pages of {layout.page_size}, {left} tokens at most, got {size}"
        )
    wanted = size // layout.page_size * layout.page_bytes
    if len(kv) != wanted:
        raise InvalidRequestError("part.kv", f"must be {wanted} bytes for {size} tokens, got {len(kv)}")
    if checksum(tokens, begin + size, kv) != told:
        raise InvalidRequestError("part.checksum", "is not that of the tokens and bytes that came")
