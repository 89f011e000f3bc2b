"""The engine's flags: each is one field of its configuration, with that field's default and limits."""

import dataclasses
import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.worker.options import engine_config_from, engine_options


def parse(*arguments: str) -> EngineConfig:
    found: list[EngineConfig] = []

    @click.command()
    @engine_options
    def command(**values: Any) -> None:
        found.append(engine_config_from(values))

    result = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return found[0]


def test_no_flags_are_the_defaults() -> None:
    """A flag's default cannot drift from its field's."""
    assert parse() == EngineConfig()


def test_every_field_has_its_flag() -> None:
    """A setting that cannot be set from the command line is found here."""
    changed = EngineConfig(
        model="other",
        dtype="bfloat16",
        device="cpu",
        page_size=16,
        eviction_policy="lfu",
        hicache_ratio=2.0,
        hicache_size=1.5,
        hicache_write_policy="write_through_selective",
        kv_copy_rate=100.0,
        disk_cache_dir="tiers",
        disk_cache_size=3.0,
        pin_share=0.5,
        pin_owner_share=0.25,
        mem_fraction_static=0.25,
        max_total_tokens=4096,
        max_running_requests=3,
        max_queued_requests=4,
        chunked_prefill_size=128,
        schedule_policy="fcfs",
        max_passed_over=7,
        queue_timeout_s=2.5,
        attention_backend="torch",
        cuda_graphs=False,
        threads=2,
        adapter_root="adapters",
        adapters=("one=first", "two=nested/second"),
        max_resident_adapters=2,
    )
    flags: list[str] = []
    for field in dataclasses.fields(EngineConfig):
        if field.name == "prefix_cache":  # another one has no eviction policy and no tiers: see below
            continue
        assert getattr(changed, field.name) != getattr(EngineConfig(), field.name)
        if field.name == "cuda_graphs":
            flags.append("--disable-cuda-graphs")
            continue
        if field.name == "adapters":  # one flag for each
            flags += [part for adapter in changed.adapters for part in ("--adapter", adapter)]
            continue
        flags += [f"--{field.name.replace('_', '-')}", str(getattr(changed, field.name))]
    assert parse(*flags) == changed


def test_prefix_cache_has_its_flag() -> None:
    """Alone: most other settings of caches are for the radix cache."""
    assert parse("--prefix-cache", "hash") == EngineConfig(prefix_cache="hash")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--hicache-ratio", "-1"], "hicache_ratio must be a number from 0 to"),
        (["--hicache-size", "nan"], "hicache_size must be a number from 0 to"),
        (["--hicache-size", "1e300"], "hicache_size must be a number from 0 to"),
        (["--hicache-ratio", "1e308"], "hicache_ratio must be a number from 0 to"),
        (["--hicache-ratio", "1", "--disk-cache-size", "1e300"], "disk_cache_size must be GiB above 0"),
        (["--hicache-ratio", "1", "--disk-cache-dir", ""], "disk_cache_dir must name a folder"),
        (["--hicache-ratio", "1", "--disk-cache-dir", " "], "disk_cache_dir must name a folder"),
        (["--hicache-ratio", "2", "--prefix-cache", "hash"], "need prefix_cache=radix"),
        (["--hicache-size", "1", "--disable-radix-cache"], "need prefix_cache=radix"),
        (["--disk-cache-dir", "tiers"], "disk_cache_dir needs a host tier"),
        (["--disk-cache-size", "0"], "disk_cache_size must be GiB above 0"),
    ],
)
def test_tiers_that_cannot_be_are_refused_at_once(flags: list[str], problem: str) -> None:
    """Before anything is loaded, by the setting's name."""
    with pytest.raises(ConfigError, match=problem):
        parse(*flags)


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
@pytest.mark.parametrize("name", ["pin_share", "pin_owner_share"])
def test_shares_that_cannot_be_are_refused_at_once(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a share from 0 to 1"):
        parse(f"--{name.replace('_', '-')}", value)


def test_only_the_radix_cache_has_another_eviction_policy() -> None:
    """It is refused before anything is loaded, whichever flag switches the radix cache off."""
    assert parse("--eviction-policy", "lfu") == EngineConfig(eviction_policy="lfu")
    assert parse("--eviction-policy", "lru", "--prefix-cache", "hash") == EngineConfig(prefix_cache="hash")
    for other in (["--prefix-cache", "hash"], ["--prefix-cache", "off"], ["--disable-radix-cache"]):
        with pytest.raises(ConfigError, match="eviction_policy must be lru with prefix_cache"):
            parse("--eviction-policy", "priority", *other)


def test_disable_radix_cache_is_prefix_cache_off() -> None:
    """The name engineers know does the same."""
    assert parse("--disable-radix-cache") == parse("--prefix-cache", "off")


def test_a_value_beyond_its_limit_is_a_config_error() -> None:
    """The configuration's own checks hold for flags too."""
    with pytest.raises(ConfigError, match="page_size"):
        parse("--page-size", "3")


def test_the_flags_need_no_torch() -> None:
    """A command that only reads flags, or starts processes, does not pay for torch or Ray."""
    code = (
        "import sys, prefixmesh.worker.options, prefixmesh.worker.server, prefixmesh.worker.process_engine;"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
