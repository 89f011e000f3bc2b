"""``prefixmesh bench copies``: that it copies through real workers and compares every byte. Nothing timed is asserted."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixmesh.bench.copies_bench import FIGURES, Effort, run_copies_bench
from prefixmesh.bench.tier_figures import as_json
from prefixmesh.cli.main import main
from prefixmesh.config import EngineConfig
from prefixmesh.worker.kv_copies import choice


@pytest.mark.slow
def test_every_figure_is_taken_and_no_byte_differs(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "BEGIN_MS", -1e9)  # of a model so tiny, to compute it would be quicker
    config = EngineConfig(model=str(tiny_model_folder), device="cpu", dtype="float32", threads=1)
    report = run_copies_bench(Effort(prefix_tokens=64, repeats=2), config)
    told = json.loads(json.dumps(as_json(report, in_process=False)))
    by_name = {one["name"]: one for one in told["figures"]}
    assert list(by_name) == list(FIGURES)
    assert by_name["bytes_that_differ"]["median"] == 0
    assert by_name["bytes_that_differ"]["met"] is True
    assert by_name["copy_ratio"]["target"] == 0.2
    assert {by_name[name]["repeats"] for name in ("compute", "copy", "first_token")} == {2}
    assert told["in_process"] is False


def test_a_quick_run_is_held_to_no_target() -> None:
    refused = CliRunner().invoke(main, ["bench", "copies", "--quick", "--check"])
    assert refused.exit_code == 2
    assert "--quick measures nothing" in refused.output
