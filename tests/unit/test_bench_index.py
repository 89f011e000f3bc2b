"""``prefixmesh bench index``: that it measures everything, and that its sums are right. Nothing timed is asserted."""

import json
from collections.abc import Sequence

import pytest
from click.testing import CliRunner, Result

from prefixmesh.bench import index_bench
from prefixmesh.bench.index_asking import Asking
from prefixmesh.bench.index_fleet import NAMESPACE, BenchFleet, News, take_in
from prefixmesh.bench.index_plan import FULL, KINDS, NAMES, QUICK, TOGETHER, figure_of, tasks
from prefixmesh.bench.result import Result as Measured
from prefixmesh.bench.router_figures import Figure, Report, Unit
from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import CALL_REFERENCE_NS, COMPARE_REFERENCE_NS, Yardstick
from prefixmesh.cache.events import Stored
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.cli.main import main

TWICE_AS_SLOW = Yardstick(2 * COMPARE_REFERENCE_NS, 2 * CALL_REFERENCE_NS)


def measured(
    median: float, *, unit: Unit = "us", target: float | None = 60.0, longest: float | None = None
) -> Measured[Figure]:
    """A figure with this median, made up."""
    figure = Figure(
        name="decide_4096",
        title="made up",
        at="2 workers",
        unit=unit,
        target=target,
        judged="median" if longest is None else "longest",
    )
    measurement = Measurement(median, None, longest, 1, 1)
    return Measured(figure=figure, measurement=measurement, yardstick=TWICE_AS_SLOW, notes={"name_us": 3.0})


def run(monkeypatch: pytest.MonkeyPatch, results: Sequence[Measured[Figure]], *arguments: str) -> Result:
    """``bench index`` on made-up measurements."""
    monkeypatch.setattr(index_bench, "run_index_bench", lambda *_: Report(results=results))
    return CliRunner().invoke(main, ["bench", "index", *arguments])


def test_quick_run_gives_every_figure_as_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the memory, which takes another process."""
    monkeypatch.setattr(index_bench, "index_bytes_per_token", lambda *_: 1.5)
    result = CliRunner().invoke(main, ["bench", "index", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert set(printed["machine"]) == {"python", "cores", "yardsticks"}
    assert [name for name in KINDS if name in {one["name"] for one in printed["figures"]}] == list(KINDS)
    for one in printed["figures"]:
        assert one["median"] > 0, one
        assert one["met"] is one["target"] is one["scaled_target"] is None, "a quick run is held to nothing"
        assert one["yardsticks"]["scale"] > 0, one
    by_name = {one["name"]: one for one in printed["figures"]}
    assert all(by_name["decide_4096"]["notes"][part] > 0 for part in ("name_us", "find_us", "decide_us"))
    assert by_name["longest_pause"]["max"] >= by_name["longest_pause"]["median"]


@pytest.mark.parametrize(
    ("value", "unit", "target", "scaled", "met"),
    [
        (119.0, "us", 60.0, 120.0, True),
        (121.0, "us", 60.0, 120.0, False),
        (401_000.0, "blocks/s", 800_000.0, 400_000.0, True),
        (399_000.0, "blocks/s", 800_000.0, 400_000.0, False),
        (6.1, "bytes", 6.0, 6.0, False),
        (1.0, "us", None, None, None),
    ],
)
def test_times_are_scaled_up_rates_down_and_bytes_not(
    value: float, unit: Unit, target: float | None, scaled: float | None, met: bool | None
) -> None:
    result = measured(value, unit=unit, target=target)
    assert (result.scaled_target, result.met) == (scaled, met)


def test_a_pause_is_judged_by_its_longest() -> None:
    assert measured(1.0, unit="ms", target=10.0, longest=21.0).met is False
    assert measured(25.0, unit="ms", target=10.0, longest=19.0).met is True


def test_check_fails_where_a_figure_was_missed_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [measured(100.0)], "--check").exit_code == 0
    missed = run(monkeypatch, [measured(100.0), measured(500.0)], "--check")
    assert missed.exit_code == 1
    assert "1 of 2 figures missed: decide_4096 (2 workers)" in missed.output
    assert run(monkeypatch, [measured(500.0)]).exit_code == 0
    assert run(monkeypatch, [measured(500.0)], "--quick", "--check").exit_code == 2


def test_every_size_asked_for_is_taken_and_the_judged_ones_at_the_size_of_their_target() -> None:
    """The growth is told and not judged."""
    planned = tasks(FULL)
    assert [task.workers for task in planned if task.name == "workers"] == [4, 16, 64, 256, 1_024, 4_096]
    assert [task.blocks for task in planned if task.name == "blocks"] == [
        1_000,
        10_000,
        100_000,
        1_000_000,
        4_000_000,
    ]
    held = [task for task in planned if figure_of(task.name, task.workers, task.blocks).target is not None]
    assert {task.name for task in held} == {name for name, kind in KINDS.items() if kind.target} - set(
        TOGETHER
    )
    assert {(task.workers, task.blocks) for task in held} == {(64, 1_000_000)}
    assert figure_of("decide_4096", 64, 1_000_000).at == "64 workers, 1M blocks"
    assert {task.name for task in tasks(QUICK, frozenset(["leave"]))} == {"leave"}
    assert set(NAMES) == set(KINDS) - set(TOGETHER)


def test_the_fleet_holds_so_many_blocks_in_many_different_sets() -> None:
    fleet = BenchFleet(8, 4_000)
    assert len(fleet.index) == 4_000
    assert len(fleet.index._sets) > 20
    assert sum(view.state(Tier.DEVICE).count for view in fleet.views) > 4_000
    fleet.index.check_invariants()


def test_a_prompt_is_held_by_half_the_fleet_by_four_and_by_one() -> None:
    fleet = BenchFleet(16, 500)
    (prompt,) = fleet.prompts(4_096, 1)
    matches = fleet.index.find_matches(block_fingerprints(NAMESPACE, prompt), {})
    holders = [(fall.slots.bit_count(), fall.blocks) for fall in matches.device]
    assert sum(count for count, _ in holders) == 8
    assert [blocks for _, blocks in holders] == [32, 48, 63]
    assert len(fleet.predictions) == 2


def test_news_come_as_workers_number_them_and_push_as_much_out_as_they_bring() -> None:
    fleet = BenchFleet(4, 100)
    news = News(fleet, 16)
    before = len(fleet.index)
    for _ in range(3):
        events = news.batch(640)
        assert take_in(events) == 640
        assert sum(isinstance(event, Stored) for _, event in events) == len(events) // 2
    assert len(fleet.index) == before
    assert not any(view.causes for view in fleet.views), "nobody saw a gap"


def test_asking_decides_for_the_prompts_only_holder_where_nobody_is_busy() -> None:
    fleet = BenchFleet(4, 200)
    asking = Asking(fleet)
    for row in range(4):
        asking._columns.set_load(row, in_flight=0, waiting_prefill_ms=0.0, decode_work_ms=0.0)
    prompts = fleet.prompts(8_192, 2)  # nobody is expected to hold the second
    matches = asking.find(asking.name(prompts[1]))
    assert matches.device[-1].blocks == 127
    chosen = asking.ask(prompts[1]).terms
    assert (chosen.device_tokens, chosen.counted_tokens) == (127 * 64, 127 * 64)
