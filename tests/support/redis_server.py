"""A real Redis server for tests: on a free port of loopback, keeping nothing, stopped by its own process id."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from prefixmesh.router.state_redis import ENTRIES
from tests.support.free_ports import free_ports

START_TIMEOUT_S = 30


class RedisServer:
    """One server; it can be emptied, frozen, killed and started again at the same address."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it, and wait until it answers."""
        self._process = subprocess.Popen(
            [
                "redis-server",
                "--bind",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--save",
                "",
                "--appendonly",
                "no",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), int(START_TIMEOUT_S / 0.02))
        with redis.Redis(port=self.port, retry=retry, retry_on_error=[redis.ConnectionError]) as client:
            client.ping()

    def empty(self) -> None:
        """Remove everything that it holds."""
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def holds(self, key: str) -> bool:
        """Whether a router's state there has this key."""
        with redis.Redis(port=self.port) as client:
            return bool(client.hexists(ENTRIES, key))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile it takes connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As when its machine loses power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def start_redis_server() -> RedisServer:
    """A running server. Without the program the test is skipped, and fails in CI, which installs it."""
    if shutil.which("redis-server") is None:
        missing = "needs redis-server (Debian: apt-get install redis-server)"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    server = RedisServer(*free_ports(1))
    server.start()
    return server
