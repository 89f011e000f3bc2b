"""The fleet secret and the keys derived from it.

One secret per fleet, made at the first start, kept in a file of mode 600 and the same on every node; every key the fleet
uses is derived from it with BLAKE2b under its own label, so that no key can stand in for another.
"""

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prefixmesh.errors import ConfigError

SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class FleetSecret:
    """The root secret. Its ``repr`` shows nothing."""

    raw: bytes = field(repr=False)
    _ticket_key: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != SECRET_BYTES:
            raise ConfigError(f"a fleet secret is {SECRET_BYTES} bytes, got {len(self.raw)}")
        object.__setattr__(self, "_ticket_key", self._derive(b"prefixmesh/ticket/v1"))

    def namespace_key(self) -> bytes:
        """Key of the namespace digests."""
        return self._derive(b"prefixmesh/namespace/v1")

    def ticket_key(self) -> bytes:
        """Key that signs tickets. Derived once: every request has one."""
        return self._ticket_key

    def control_token(self) -> str:
        """Bearer token of control calls between fleet members."""
        return self._derive(b"prefixmesh/control/v1").hex()

    def _derive(self, label: bytes) -> bytes:
        return hashlib.blake2b(label, key=self.raw, digest_size=32).digest()


def generate() -> FleetSecret:
    """A new random secret."""
    return FleetSecret(secrets.token_bytes(SECRET_BYTES))


def load_or_create(path: Path) -> FleetSecret:
    """Read the secret kept in ``path``, or make one there (mode 600) when there is none.

    Two processes that start together agree: the file is linked into place whole, and only the first link succeeds. Raises
    ConfigError when the file is unreadable, malformed or open to others.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot read the fleet secret {path}: {error.strerror}") from error
    try:
        _create(path)
    except OSError as error:
        raise ConfigError(f"cannot keep a fleet secret in {path}: {error.strerror}") from error
    return _load(path)


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(generate().raw.hex() + "\n")
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was first; its secret counts
    finally:
        draft.unlink()


def _load(path: Path) -> FleetSecret:
    with path.open() as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others; run: chmod 600 {path}")
        try:
            return FleetSecret(bytes.fromhex(file.read().strip()))
        except ValueError as error:
            raise ConfigError(
                f"{path} does not hold a fleet secret ({SECRET_BYTES} bytes in hexadecimal)"
            ) from error
