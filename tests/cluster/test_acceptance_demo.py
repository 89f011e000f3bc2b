"""The demo as its users run it, small: both passes on a Ray of its own, its rows, its summary, its file."""

import json
from pathlib import Path

import pytest

from tests.support.fleet_processes import prefixmesh, processes_of
from tests.support.tiny_model import TinyShape, make_tiny_model

pytestmark = pytest.mark.cluster

USERS, TURNS, TENANTS = 1, 3, 2
REQUESTS = USERS * TURNS * TENANTS


def test_demo_shows_and_writes_both_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0; a row for every request of both passes; most tokens from the cache with caching and none without; nothing of
    one tenant's for the other; the figures in the file; no process left."""
    # The policies are long in this tokenizer's tokens.
    model = make_tiny_model(tmp_path / "tiny", TinyShape(context_length=32_768))
    file = tmp_path / "figures.json"
    settings = ("--workers", "1", "--users", str(USERS), "--turns", str(TURNS), "--max-tokens", "4")
    done = prefixmesh(tmp_path, "demo", "--model", str(model), *settings, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith(" ms") and "worker-" in line]
    assert len(rows) == 2 * REQUESTS + TENANTS  # of both passes, and a pinned question of each tenant
    assert "With prefix caches" in done.stdout
    assert "The same with caching off" in done.stdout
    figures = json.loads(file.read_text())
    off = figures["cache_off"]
    for one in (figures, off):
        assert one["requests"] == sum(one["requests_per_worker"].values()) == REQUESTS
        assert one["cross_tenant_cached_tokens"] == 0
        assert one["ttft_cold_ms"] > 0
    assert 0.5 < figures["cached_share"] <= figures["cached_share_possible"]
    assert figures["ttft_warm_ms"] > 0
    assert (off["cached_share"], off["ttft_warm_ms"]) == (0, None)
    assert off["cached_share_possible"] > 0.5
    assert "pinned: 1 of 1 workers hold each policy" in done.stdout
    for policy in figures["pinned"]:
        (visit,) = policy["first_questions"]
        assert visit["worker"] == "worker-0"
        assert 0.5 * visit["prompt_tokens"] < policy["tokens"] <= visit["cached_tokens"]
    assert processes_of(tmp_path) == []
