"""Published traces that a replay can be repeated with: where each lies, and by which checksum it is the one that is meant.

None comes with this package. An address names a commit, so that what lies there stays what it is.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefixmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicTrace:
    """One file that anybody can fetch."""

    name: str
    about: str
    url: str
    licence: str
    size_bytes: int
    sha256: str
    requests: int
    prompt_tokens: int

    @property
    def filename(self) -> str:
        """What it is called where it lies."""
        return self.url.rpartition("/")[2]


PUBLIC_TRACES: Final[Mapping[str, PublicTrace]] = {
    "conversation": PublicTrace(
        name="conversation",
        about="one hour of conversations, published with the Mooncake paper at FAST 2025; blocks of 512 tokens",
        url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/a2a4b18ac537fd798d50e6e9f57031ce86419a37/"
        "FAST25-release/traces/conversation_trace.jsonl",
        licence="Apache-2.0",
        size_bytes=3_029_533,
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        requests=12_031,
        prompt_tokens=144_793_823,
    ),
}


def public_trace(name: str) -> PublicTrace:
    """By its name. Raises ConfigError for a name that is none."""
    trace = PUBLIC_TRACES.get(name)
    if trace is None:
        raise ConfigError(f"no public trace is called {name!r}; there are: {', '.join(PUBLIC_TRACES)}")
    return trace


def check_file(trace: PublicTrace, path: Path) -> None:
    """Raises ConfigError, saying how it differs, when the file is not this trace. O(its size)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    if len(content) != trace.size_bytes:
        raise ConfigError(f"trace {path} has {len(content):,} bytes, {trace.name!r} has {trace.size_bytes:,}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != trace.sha256:
        raise ConfigError(f"trace {path} has the SHA-256 {digest}, {trace.name!r} has {trace.sha256}")
