"""Where a prompt's prefix lives: what a pin of it has to say beside its tokens. Pure data."""

from typing import NamedTuple

from prefixmesh.ids import Namespace


class Origin(NamedTuple):
    """All prefixes of a prompt have one; two prompts that share a block have the same."""

    namespace: Namespace
    adapter: str = ""
    adapter_digest: str = ""
    boundary_tokens: int = 0
    """Tokens in a public namespace, where those behind them are in another."""

    tail_namespace: bytes = b""
