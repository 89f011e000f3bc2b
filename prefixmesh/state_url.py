"""Where a fleet's state is kept, as a URL: which there are, and how one is shown without its password."""

import re
from typing import Final

from prefixmesh.errors import ConfigError

MEMORY_STATE: Final = "memory://"
FILE_STATE: Final = "file://"
REDIS_STATES: Final = ("redis://", "rediss://")

_DATABASE: Final = re.compile(r"(?:rediss?://)?[^/]*(?:/[0-9]*)?")
"""What follows the password in a Redis's URL: a host, and the number of a database or none."""

_SECRETS: Final = re.compile(r"(?s)^(\w+://)?.*@")
"""In a URL: all that stands before the last ``@``. Whatever signs a password has, none of them is to be shown."""


def check_state_url(url: str) -> None:
    """Raise ConfigError for a state that is neither memory, nor a file, nor a Redis."""
    if url == MEMORY_STATE:
        return
    if not any(url.startswith(kind) and len(url) > len(kind) for kind in (FILE_STATE, *REDIS_STATES)):
        raise ConfigError(
            f"state must be {MEMORY_STATE}, {FILE_STATE}PATH or redis://HOST:PORT/DATABASE, got {without_password(url)!r}"
        )
    if url.startswith(REDIS_STATES) and not _DATABASE.fullmatch(url.partition("?")[0].rpartition("@")[2]):
        # Redis's package takes what is no number for database 0, which may be another fleet's
        raise ConfigError(
            f"state in Redis must end in the number of a database, as in redis://HOST:PORT/0, got {without_password(url)!r}"
        )


def without_password(url: str) -> str:
    """A state's URL for people and logs: also of one that is none, whose password stands where it does not belong."""
    if url.startswith(FILE_STATE):
        return url
    address, asks, _ = _SECRETS.sub(r"\1***@", url).partition("?")
    return address + asks + "***" * bool(asks)  # Redis takes a password there, too
