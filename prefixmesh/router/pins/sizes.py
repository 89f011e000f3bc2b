"""How much of a worker a version of a wish takes, and how much of it the worker's events can prove. Pure."""

from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.tokens import TOKEN_BYTES


def size_tokens(version: PinVersion, page_size: int) -> int:
    """Tokens that a pin of ``version`` is charged with where a page has ``page_size``: whole pages. 0 where there is not one. O(1)."""
    return len(version.tokens) // TOKEN_BYTES // page_size * page_size


def proof_tokens(version: PinVersion, page_size: int, block_size: int) -> int:
    """Leading tokens of ``version`` that a worker's events tell of when it holds all that it can: its whole blocks, in whole pages. O(1)."""
    return size_tokens(version, page_size) // block_size * block_size


def has_prompt(version: PinVersion) -> bool:
    """Whether there is something to pin, and not only an adapter to be resident."""
    return bool(version.tokens)
