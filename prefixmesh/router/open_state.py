"""Which keeper of the state a URL names."""

from pathlib import Path

from prefixmesh.router.state_file import FileStore
from prefixmesh.router.state_memory import MemoryStore
from prefixmesh.router.state_store import StateStore
from prefixmesh.state_url import FILE_STATE, MEMORY_STATE, REDIS_STATES, check_state_url


def open_store(url: str) -> StateStore:
    """The store that ``url`` names: ``memory://``, gone with this process, ``file://PATH``, or ``redis://HOST:PORT/DATABASE`` (``rediss://``
    for TLS), which several routers share. Reads one file; Redis is not asked yet.

    Raises ConfigError for another URL, when the file cannot be used, and for Redis without its package.
    """
    check_state_url(url)
    if url == MEMORY_STATE:
        return MemoryStore()
    if url.startswith(REDIS_STATES):
        from prefixmesh.router.state_redis import RedisStore  # only here: the package is an extra

        return RedisStore(url)
    return FileStore(Path(url.removeprefix(FILE_STATE)).expanduser())
