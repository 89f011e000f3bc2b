"""Model files that many tests use."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.worker.process_engine import ENGINE_ENVIRONMENT

# Before torch is loaded: tests that compute in this process wait as an engine's process does.
os.environ.update(ENGINE_ENVIRONMENT | os.environ)

# A shell that starts the tests in the background has them ignore Ctrl-C, and the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support.redis_server import RedisServer, start_redis_server  # noqa: E402
from tests.support.tiny_model import make_tiny_model  # noqa: E402 - loads torch


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model; pulled (98 MB) when it is not there yet."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis for all tests; each empties it first."""
    server = start_redis_server()
    yield server
    server.kill()
