"""Model files that many tests use."""

from pathlib import Path

import pytest

import prefixmesh.worker.model  # noqa: F401 - before torch: it makes torch's threads wait without spinning
from prefixmesh.model_files.source import ModelFiles, resolve_model
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model; pulled (98 MB) when it is not there yet."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
