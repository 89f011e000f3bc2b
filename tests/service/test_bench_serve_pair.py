"""``prefixmesh bench serve --compare`` with processes of its own, whose workers have a timing model and no weights."""

import json
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from prefixmesh.bench import serve_pair
from prefixmesh.bench.serve_pair import PairSpec, running_pair
from prefixmesh.cli.main import main
from prefixmesh.errors import UnavailableError

FAKE = ("-m", "prefixmesh.sim.fake_worker", "--step-ms", "1")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.slow
def test_caches_are_compared_on_pairs_that_are_gone_afterwards(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off finds nothing; the tree finds what the same load in simulated time does, to two points."""
    monkeypatch.setattr(serve_pair, "WORKER", FAKE)
    before = children()
    load = ("--compare", "cache=off,radix", "--requests", "6", "--concurrency", "1", "--ids", "250")
    result = CliRunner().invoke(
        main,
        ["bench", "serve", *load, "--model", str(tiny_model_folder), "--simulate", "h100-8b", "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    policies = json.loads(result.stdout)["policies"]
    assert set(policies) == {f"cost/{kind}{how}" for kind in ("off", "radix") for how in ("", " simulated")}
    assert policies["cost/off"]["cached_share"] == 0.0
    assert not any(policies[f"cost/{kind}"]["errors"] for kind in ("off", "radix"))
    measured, simulated = (policies[f"cost/radix{how}"]["cached_share"] for how in ("", " simulated"))
    assert measured > 0.5
    assert measured == pytest.approx(simulated, abs=0.02)
    assert children() <= before


def test_a_worker_that_does_not_start_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_pair, "WORKER", ("-c", "raise SystemExit('no such luck')"))
    with (
        pytest.raises(UnavailableError, match="worker-0 did not start: no such luck"),
        running_pair(PairSpec(), "radix"),
    ):
        pytest.fail("it is not there")
