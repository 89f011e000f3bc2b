"""The command line has the flags that its users were promised, and those of the engine reach the engine."""

from typing import Any

import click
import pytest

from prefixmesh.cli.main import main
from prefixmesh.config import EngineConfig
from prefixmesh.worker.options import engine_config_from

ENGINE = {
    "--model": "m",
    "--dtype": "float32",
    "--page-size": 16,
    "--prefix-cache": "hash",
    "--mem-fraction-static": 0.25,
    "--max-total-tokens": 4096,
    "--max-running-requests": 3,
    "--chunked-prefill-size": 7,
    "--schedule-policy": "fcfs",
    "--eviction-policy": "lfu",
}
PROMISED = {
    "up": {*ENGINE, "--workers", "--address", "--detach", "--disable-radix-cache", "--state"},
    "down": set[str](),
    "status": {"--address"},
    "generate": {"--tenant", "--extra-key"},
    "chat": {"--tenant", "--extra-key"},
    "demo": {"--json"},
}


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", PROMISED)
def test_promised_flags_exist(name: str) -> None:
    """Under the names that engineers of this field know."""
    flags = {option for parameter in command(name).params for option in parameter.opts}
    assert flags >= PROMISED[name]


@pytest.mark.parametrize(("flag", "value"), ENGINE.items())
def test_each_engine_flag_of_up_sets_its_field(flag: str, value: Any) -> None:
    """And nothing else: the rest stays as it is by default."""
    field = flag.removeprefix("--").replace("-", "_")
    values = command("up").make_context("up", [flag, str(value)]).params
    assert getattr(EngineConfig(), field) != value
    assert engine_config_from(values) == EngineConfig(**{field: value})


def test_disable_radix_cache_is_prefix_cache_off() -> None:
    values = command("up").make_context("up", ["--disable-radix-cache"]).params
    assert engine_config_from(values) == EngineConfig(prefix_cache="off")


def test_models_pull_is_a_command() -> None:
    models = command("models")
    assert isinstance(models, click.Group)
    assert models.get_command(click.Context(models), "pull") is not None
