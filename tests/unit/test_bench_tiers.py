"""``prefixmesh bench tiers``: that it measures everything through real engines, and that its sums are right. Nothing timed is asserted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from prefixmesh.bench.engine_figures import Setup
from prefixmesh.bench.result import Result
from prefixmesh.bench.tier_figures import Figure, Report, as_json, measured
from prefixmesh.bench.tier_plan import FIGURES, FULL, PARTS, QUICK, parts
from prefixmesh.bench.tier_restart import other_revision
from prefixmesh.bench.tier_talks import make_talks
from prefixmesh.bench.tiers_bench import TAKE, run_tiers_bench
from prefixmesh.bench.timed_mover import TimedMover
from prefixmesh.bench.yardstick import Yardstick
from prefixmesh.cli import bench_tiers
from prefixmesh.cli.main import main
from prefixmesh.config import EngineConfig
from prefixmesh.errors import InternalError
from prefixmesh.model_files.revision import model_revision
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.worker.tiers.copies import CopyJob, Outcome
from tests.support.tiny_model import TinyShape, make_tiny_model

SETUP = Setup(model="tiny", dtype="float32", threads=1, cores=2, versions={}, sizes={}, settings={})
TWICE_AS_SLOW = Yardstick(440.0, 52.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Of a model that is tiny, and yet so deep that computing takes longer than copying."""
    shape = TinyShape(num_layers=8, hidden_size=128, intermediate_size=512, head_dim=32)
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), shape)
    return EngineConfig(model=str(model), device="cpu", dtype="float32", threads=1)


def take(config: EngineConfig, part: str) -> dict[str, Any]:
    """A quick run of one part; its figures by name."""
    told: list[str] = []
    report = run_tiers_bench(QUICK, config, frozenset({part}), told.append)
    assert len(told) == 1
    printed = json.loads(json.dumps(as_json(report)))
    assert printed["sizes"]["talks"] == QUICK.talks
    by_name = {one["name"]: one for one in printed["figures"]}
    assert list(by_name) == list(PARTS[part])
    return by_name


def result(name: str, value: float) -> Result[Figure]:
    return Result(figure=FIGURES[name], measurement=measured([value]), yardstick=TWICE_AS_SLOW)


@pytest.mark.slow
def test_turns_find_with_a_host_tier_what_an_unbounded_device_would(config: EngineConfig) -> None:
    """The same prompts everywhere, and in float32 the same answers (F44); without a host tier less is found."""
    told = take(config, "turns")
    shares = {name: one["median"] for name, one in told.items()}
    assert shares["share_device_only"] < shares["share_host"] <= shares["share_unbounded"]
    assert shares["share_of_unbounded"] == pytest.approx(
        shares["share_host"] / shares["share_unbounded"], abs=1e-3
    )
    assert told["share_of_unbounded"]["met"] is True
    notes = [one["notes"] for one in told.values() if "prompts" in one["notes"]]
    assert {note["prompts"] for note in notes} == {QUICK.talks * QUICK.talk_turns}
    assert {note["answers_that_differ"] for note in notes} == {0}
    assert told["share_host"]["notes"]["from_host_share"] > 0


@pytest.mark.slow
def test_a_prefix_is_loaded_back_and_its_copying_is_told(config: EngineConfig) -> None:
    told = take(config, "load_back")
    assert all(one["median"] > 0 for name, one in told.items() if name != "overlap")
    assert 0 <= told["overlap"]["median"] <= 1
    repeats = {name: told[name]["repeats"] for name in ("recompute", "load_back", "device_hit")}
    assert set(repeats.values()) == {QUICK.load_back_repeats}


@pytest.mark.slow
def test_decode_steps_are_taken_with_backups_and_without(config: EngineConfig) -> None:
    told = take(config, "backups")
    assert told["decode_off"]["repeats"] == told["decode_backups"]["repeats"] == QUICK.backup_repeats
    assert told["longest_beside"]["notes"]["backed_up_bytes"] > 0


@pytest.mark.slow
def test_a_restart_finds_the_prefix_and_another_revision_does_not(config: EngineConfig) -> None:
    told = take(config, "restart")
    assert told["restart_share"]["met"] is True
    assert told["other_revision"] == told["other_revision"] | {"median": 0.0, "met": True}


def test_every_figure_comes_out_of_one_part_and_every_part_can_be_asked_for() -> None:
    assert [name for part in PARTS.values() for name in part] == list(FIGURES)
    assert parts() == list(PARTS) == list(TAKE)
    assert parts(frozenset({"restart", "turns"})) == ["turns", "restart"]
    asked = {name: figure.target for name, figure in FIGURES.items() if figure.target is not None}
    assert asked == {
        "share_of_unbounded": 0.95,
        "load_back_ratio": 0.15,
        "longest_beside": 1.0,
        "restart_share": 0.9,
        "other_revision": 0.0,
    }
    assert FULL.prefix_tokens == 2_000


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("share_of_unbounded", 0.95, True),
        ("share_of_unbounded", 0.94, False),
        ("load_back_ratio", 0.15, True),
        ("load_back_ratio", 0.16, False),
        ("longest_beside", 1.1, False),
        ("other_revision", 16.0, False),
        ("recompute", 9.0, None),
    ],
)
def test_targets_are_the_same_on_every_machine(name: str, value: float, met: bool | None) -> None:
    """Also on one that is half as fast; of shares more is better."""
    one = result(name, value)
    assert one.scaled_target == FIGURES[name].target
    assert one.met is met


def run(monkeypatch: pytest.MonkeyPatch, results: Sequence[Result[Figure]], *arguments: str) -> Any:
    def measure(names: frozenset[str], *, quick: bool) -> Report:
        return Report(setup=SETUP, results=results)

    monkeypatch.setattr(bench_tiers, "_measure", measure)
    return CliRunner().invoke(main, ["bench", "tiers", *arguments])


def test_check_ends_with_1_and_names_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        result("share_of_unbounded", 0.8),
        result("load_back_ratio", 0.1),
        result("recompute", 2_500.0),
    ]
    missed = run(monkeypatch, results, "--check")
    assert missed.exit_code == 1
    assert "1 of 2 figures missed: share_of_unbounded" in missed.output
    assert "80.0%" in missed.stdout
    assert run(monkeypatch, results[1:], "--check").exit_code == 0
    assert run(monkeypatch, results).exit_code == 0, "without --check it only tells"
    quick = run(monkeypatch, results, "--quick", "--json")
    assert {one["met"] for one in json.loads(quick.stdout)["figures"]} == {None}
    assert run(monkeypatch, results, "--quick", "--check").exit_code == 2
    unknown = run(monkeypatch, results, "--only", "nothing")
    assert (unknown.exit_code, "load_back" in unknown.stderr) == (2, True)


def test_each_conversation_has_its_turn_once_in_every_round() -> None:
    asked = iter(range(10_000))
    talks = make_talks(QUICK, lambda size: [next(asked)] * size, np.random.default_rng(0))
    assert [sorted(order) for order in talks.rounds] == [list(range(QUICK.talks))] * QUICK.talk_turns
    assert (
        len({question[0] for talk in talks.questions for question in talk}) == QUICK.talks * QUICK.talk_turns
    )
    assert {len(question) for talk in talks.questions for question in talk} == {QUICK.question_tokens}


class Copies:
    """In the place of a mover: outcomes as told, and a layer that takes a second."""

    page_bytes = 100

    def __init__(self, now: list[float]) -> None:
        self.now = now
        self.done: list[Outcome] = []

    def start(self, job: CopyJob) -> None: ...

    def take_done(self) -> list[Outcome]:
        return self.done

    def expect(self, numbers: Sequence[int], at_most_s: float) -> None: ...

    def await_layer(self, layer: int) -> None:
        self.now[0] += 1.0


def test_the_clock_around_a_mover_counts_good_copies_and_waits() -> None:
    """A copy that failed is no measure of speed."""
    now = [0.0]
    copies = Copies(now)
    mover = TimedMover(copies, lambda: now[0])  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="no restore"):
        mover.rate("restore")
    for number, kind in ((1, "restore"), (2, "offload"), (3, "restore")):
        mover.start(CopyJob(number=number, kind=kind, device_pages=np.arange(4, dtype=np.int32)))  # type: ignore[arg-type]
    copies.done = [Outcome(1, 2.0), Outcome(3, 5.0, "failed"), Outcome(2, 0.5)]
    assert mover.take_done() == copies.done
    assert (mover.rate("restore"), mover.rate("offload")) == (200.0, 800.0)
    mover.await_layer(0)
    assert mover.waited_s == 1.0
    assert mover.overlapped_s == 0.0


def test_a_load_back_overlaps_from_when_its_step_begins_but_for_what_that_waits() -> None:
    """Copied in 8 s, joined after 3 of them, and waited for a layer for one: 4 s of copying took nobody's time."""
    now = [0.0]
    copies = Copies(now)
    mover = TimedMover(copies, lambda: now[0])  # type: ignore[arg-type]
    mover.start(CopyJob(number=1, kind="restore", device_pages=np.arange(4, dtype=np.int32)))
    now[0] = 3.0
    mover.expect([1], 0.5)
    mover.await_layer(0)
    mover.expect([1], 0.5)
    copies.done = [Outcome(1, 8.0)]
    mover.take_done()
    assert mover.overlapped_s == 4.0


def test_a_model_under_another_revision_is_the_same_but_for_its_revision(
    config: EngineConfig, smollm2_files: ModelFiles, tmp_path: Path
) -> None:
    for name, files in (("tiny", resolve_model(config.model)), ("gguf", smollm2_files)):
        other = resolve_model(other_revision(str(files.path), tmp_path / name))
        assert other.kind == files.kind
        assert model_revision(other) != model_revision(files)
