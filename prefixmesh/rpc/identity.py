"""Who is calling: API keys, tenants, and the rule that a server without credentials stays on loopback.

The caller's tenant comes from its credentials, never from a message body. A keys file has one key a line::

    blake2b-256 of the key in hexadecimal   tenant   [admin]

Keys are 256 random bits, so one fast hash protects them; a slow password hash would only slow every call.
"""

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefixmesh.errors import AccessDeniedError, AuthenticationError, ConfigError, InvalidRequestError
from prefixmesh.ids import TenantId

TENANT_METADATA: Final = "x-prefixmesh-tenant"
AUTHORIZATION_METADATA: Final = "authorization"
_CREDENTIALS: Final = frozenset({AUTHORIZATION_METADATA, TENANT_METADATA})
DEFAULT_TENANT: Final = TenantId("default")
MAX_TENANT_CHARS: Final = 128
_KEY_PREFIX: Final = "pm-"
_HASH_HEX_CHARS: Final = 64
_KEY_HASH: Final = re.compile(rf"[0-9a-fA-F]{{{_HASH_HEX_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call comes from."""

    tenant: TenantId
    is_admin: bool = False


_LOCAL: Final = Caller(DEFAULT_TENANT, is_admin=True)
"""Who calls a server without keys, and names no tenant."""


class ApiKeys:
    """The keys a server accepts. Immutable; a look-up is one hash."""

    def __init__(self, callers_by_hash: Mapping[str, Caller]) -> None:
        self._callers_by_hash = dict(callers_by_hash)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._callers_by_hash)} keys)"

    @classmethod
    def from_file(cls, path: Path) -> "ApiKeys":
        """Read a keys file; raises ConfigError naming the line that is wrong."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read the API keys file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file in UTF-8") from error
        callers: dict[str, Caller] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            try:
                key_hash, caller = _parse_words(words)
            except ValueError as error:
                raise ConfigError(f"{path} line {number}: {error}") from error
            if key_hash in callers:
                raise ConfigError(f"{path} line {number}: the same key as on a line before")
            callers[key_hash] = caller
        if not callers:
            raise ConfigError(f"{path} holds no API key")
        return cls(callers)

    def find(self, key: str) -> Caller | None:
        """The caller that holds ``key``; None when nobody does."""
        return self._callers_by_hash.get(hash_key(key))


def _parse_words(words: list[str]) -> tuple[str, Caller]:
    """Key hash and caller of one line; raises ValueError saying what is wrong."""
    if len(words) not in (2, 3) or not _KEY_HASH.fullmatch(words[0]) or words[2:] not in ([], ["admin"]):
        raise ValueError(f"expected '<{_HASH_HEX_CHARS} hex digits> <tenant> [admin]'")
    try:
        tenant = check_tenant(words[1])
    except InvalidRequestError as error:
        raise ValueError(f"the tenant {error.problem}") from error
    return words[0].lower(), Caller(tenant, is_admin=words[2:] == ["admin"])


def new_key() -> str:
    """A fresh random API key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What the keys file holds of a key."""
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def check_tenant(name: str) -> TenantId:
    """``name`` as a tenant; raises InvalidRequestError when it is empty, too long or not printable ASCII, which is all that
    gRPC metadata carries."""
    if not name or len(name) > MAX_TENANT_CHARS or not (name.isascii() and name.isprintable()):
        raise InvalidRequestError(
            TENANT_METADATA, f"must be 1 to {MAX_TENANT_CHARS} printable ASCII characters"
        )
    return TenantId(name)


def identify(metadata: Iterable[tuple[str, str | bytes]] | None, keys: ApiKeys | None) -> Caller:
    """The caller of a call with this metadata.

    With ``keys``, a valid ``authorization: Bearer KEY`` is required, and a tenant named beside it must be the key's own. Without
    (loopback only), ``x-prefixmesh-tenant`` names the tenant.
    """
    values: dict[str, str] = {}
    for name, value in metadata or ():
        if name in _CREDENTIALS and isinstance(value, str):
            if name in values:
                # A proxy that adds its own beside the caller's must not leave to chance which counts.
                raise AuthenticationError(f"a call carries one {name}, not several")
            values[name] = value
    named = values.get(TENANT_METADATA)
    if keys is None:
        return _LOCAL if named is None else Caller(check_tenant(named), is_admin=True)
    caller = keys.find(bearer_token(values))
    if caller is None:
        raise AuthenticationError("unknown API key; send metadata 'authorization: Bearer <key>'")
    if named is not None and named != caller.tenant:
        raise AccessDeniedError(f"this API key does not belong to the tenant named in {TENANT_METADATA}")
    return caller


def bearer_token(values: Mapping[str, str | bytes]) -> str:
    """The token of an ``authorization: Bearer`` entry; raises AuthenticationError when there is none."""
    scheme, _, token = str(values.get(AUTHORIZATION_METADATA, "")).partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise AuthenticationError("credentials are missing; send metadata 'authorization: Bearer <key>'")
    return token


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
