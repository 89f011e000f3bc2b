"""``prefixmesh bench cache``: that it measures everything, and that its sums are right. Nothing timed is asserted."""

import gc
import json
from collections.abc import Sequence

import pytest
from click.testing import CliRunner, Result

from prefixmesh.bench import cache_bench
from prefixmesh.bench.cache_plan import FULL, KINDS, NAMES, PAGE_SIZES, QUICK, Task, figure_of, tasks
from prefixmesh.bench.figures import Figure, Report, ratio_of
from prefixmesh.bench.memory import measure_memory
from prefixmesh.bench.result import Result as Measured
from prefixmesh.bench.timing import Measurement, Sample, combine, summarise
from prefixmesh.bench.trees import Grove
from prefixmesh.bench.yardstick import CALL_REFERENCE_NS, COMPARE_REFERENCE_NS, Yardstick, mean_yardstick
from prefixmesh.cli.bench_table import amount
from prefixmesh.cli.main import main

TWICE_AS_SLOW = Yardstick(2 * COMPARE_REFERENCE_NS, 2 * CALL_REFERENCE_NS)
THE_SAME = Yardstick(COMPARE_REFERENCE_NS, CALL_REFERENCE_NS)


def measured(
    median: float,
    *,
    name: str = "evict_leaf",
    unit: str = "us",
    target: float | None = 8.0,
    yardstick: Yardstick = TWICE_AS_SLOW,
    longest: float | None = None,
) -> Measured[Figure]:
    """A figure with this median, made up."""
    figure = Figure(
        name=name,
        title=name,
        page_size=1,
        size=1_000,
        unit=unit,  # type: ignore[arg-type]
        target=target,
        judged="longest" if unit == "ms" else "median",
    )
    return Measured(figure=figure, measurement=Measurement(median, None, longest, 1, 1), yardstick=yardstick)


def report(results: Sequence[Measured[Figure]]) -> Report:
    return Report(python="3.11", cores=2, yardstick=TWICE_AS_SLOW, results=results)


def run(monkeypatch: pytest.MonkeyPatch, results: Sequence[Measured[Figure]], *arguments: str) -> Result:
    """``bench cache`` on made-up measurements."""
    monkeypatch.setattr(cache_bench, "run_cache_bench", lambda *_: report(results))
    return CliRunner().invoke(main, ["bench", "cache", *arguments])


def test_quick_run_gives_every_figure_as_one_json_object() -> None:
    """Nothing else on stdout, and the process's garbage collector is as it was."""
    thresholds = gc.get_threshold()
    result = CliRunner().invoke(main, ["bench", "cache", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
    printed = json.loads(result.stdout)
    assert set(printed["machine"]) == {"python", "cores", "yardsticks"}
    assert {(one["name"], one["page_size"]) for one in printed["figures"]} == {
        (name, page_size) for name in KINDS for page_size in PAGE_SIZES
    }
    for one in printed["figures"]:
        assert one["median"] > 0, one
        assert one["repeats"] >= 1, one
        assert one["calls"] >= 1, one
        assert one["met"] is one["target"] is one["scaled_target"] is None, one
        if one["unit"] in ("us", "ms"):
            assert one["median"] <= one["p99"] * 1.0001 + 1e-6, one
            assert one["p99"] <= one["max"] * 1.0001 + 1e-6, one
        assert one["yardsticks"]["scale"] > 0, one
    turns = [one for one in printed["figures"] if one["name"] == "turns"]
    assert all(0 < one["notes"]["hit_rate"] < 1 for one in turns)
    assert all(one["notes"]["evicted_tokens_per_turn"] > 0 for one in turns)


def test_a_quick_run_is_held_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures nothing: no verdict in the table, and no check."""
    missed = [measured(1e9)]
    assert "missed" in run(monkeypatch, missed).stdout
    assert "missed" not in run(monkeypatch, missed, "--quick").stdout
    refused = run(monkeypatch, missed, "--quick", "--check")
    assert (refused.exit_code, "--quick measures nothing" in refused.stderr) == (2, True)


def test_only_takes_the_figures_that_are_named() -> None:
    """And those that come with them; a name that is none is a usage error."""
    result = CliRunner().invoke(
        main, ["bench", "cache", "--quick", "--json", "--only", "evict_leaf", "--only", "lock_release"]
    )
    names = {one["name"] for one in json.loads(result.stdout)["figures"]}
    assert names == {"evict_leaf", "evict_ratio", "lock_release"}
    unknown = CliRunner().invoke(main, ["bench", "cache", "--only", "nothing"])
    assert unknown.exit_code == 2
    assert "match_4096" in unknown.stderr


def test_every_figure_with_a_target_is_taken_at_the_size_it_is_for() -> None:
    """10,000 leaves unless said; eviction at all three; the pause at 100,000; turns with a million tokens."""
    figures = [figure_of(task, FULL) for task in tasks(FULL)]
    held = {(one.name, one.page_size, one.size) for one in figures if one.target is not None}
    for page_size in (1, 16):
        at_10_000 = {"match_4096", "match_depth_20", "insert_64", "insert_1024", "lock_release", "node_bytes"}
        expected = {(name, page_size, 10_000) for name in at_10_000}
        expected |= {("evict_leaf", page_size, size) for size in (1_000, 10_000, 100_000)}
        expected.add(("longest_pause", page_size, 100_000))
        expected |= {("turns", 16, 1_000_000)} if page_size == 16 else set()
        assert {one for one in held if one[1] == page_size} == expected
    assert figure_of(Task("evict_ratio", 1, 100_000), FULL).target == 2.0
    assert figure_of(Task("match_4096", 1, 1_000), FULL).baseline == (8.5, 20.0)
    assert [task.name for task in tasks(QUICK, frozenset(NAMES))] == [task.name for task in tasks(QUICK)]


def test_the_scale_is_the_geometric_mean_of_both_measures() -> None:
    """Twice as slow in one and as fast in the other is 1.41."""
    assert Yardstick(2 * COMPARE_REFERENCE_NS, CALL_REFERENCE_NS).scale == pytest.approx(2**0.5)
    assert TWICE_AS_SLOW.scale == pytest.approx(2.0)
    assert mean_yardstick([THE_SAME, TWICE_AS_SLOW]).scale == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("value", "unit", "target", "scaled", "met"),
    [
        (15.9, "us", 8.0, 16.0, True),
        (16.1, "us", 8.0, 16.0, False),
        (15_100.0, "turns/s", 30_000.0, 15_000.0, True),
        (14_900.0, "turns/s", 30_000.0, 15_000.0, False),
        (701.0, "bytes", 700.0, 700.0, False),
        (2.0, "x", 2.0, 2.0, True),
        (5.0, "us", None, None, None),
    ],
)
def test_times_scale_up_rates_down_and_memory_not(
    value: float, unit: str, target: float | None, scaled: float | None, met: bool | None
) -> None:
    """On a machine that is twice as slow."""
    result = measured(value, unit=unit, target=target)
    assert result.scaled_target == (None if scaled is None else pytest.approx(scaled))
    assert result.met is met


def test_a_pause_is_held_to_its_longest() -> None:
    """The median of a million short calls says nothing about the one that takes long."""
    assert measured(0.01, unit="ms", target=10.0, longest=21.0).met is False
    assert measured(0.01, unit="ms", target=10.0, longest=19.0).met is True


def test_the_ratio_compares_what_is_left_when_each_machine_is_scaled_away() -> None:
    """8 µs on a slow moment and 4 µs on a fast one are the same."""
    figure = figure_of(Task("evict_ratio", 1, 100_000), FULL)
    same = [measured(8.0), measured(4.0, yardstick=THE_SAME)]
    assert ratio_of(figure, same).met is True
    assert ratio_of(figure, same).value == pytest.approx(1.0)
    assert ratio_of(figure, [*same, measured(18.0)]).met is False


def test_check_fails_when_a_figure_is_missed_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 after the table; without ``--check`` the table alone."""
    results = [measured(15.0), measured(17.0, name="insert_64"), measured(1.0, name="told", target=None)]
    result = run(monkeypatch, results, "--check")
    assert result.exit_code == 1
    assert result.stderr == "Error: 1 of 2 figures missed: insert_64 (page 1)\n"
    assert "missed" in result.stdout
    assert run(monkeypatch, results).exit_code == 0
    assert run(monkeypatch, results, "--check", "--json").exit_code == 1
    met = run(monkeypatch, results[:1], "--check")
    assert met.exit_code == 0
    assert "met" in met.stdout


def test_repeats_combine_into_the_median_of_medians_and_the_longest_of_all() -> None:
    """So one disturbed repeat moves neither median nor p99, and no pause is lost."""
    samples = [Sample(1.0, 2.0, 3.0, 9), Sample(1.2, 2.5, 90.0, 9), Sample(50.0, 60.0, 70.0, 9)]
    assert combine(samples) == Measurement(1.2, 2.5, 90.0, 9, 3)
    assert combine([Sample(7.0, None, None, 4)]) == Measurement(7.0, None, None, 4, 1)


def test_a_sample_takes_the_clock_off_and_divides_batches() -> None:
    """100 readings of 1,080 to 1,179 ns with a clock of 80 ns, and of batches of ten."""
    readings = list(range(1_080, 1_180))
    assert summarise(readings, 80.0) == pytest.approx((1.0495, 1.099, 1.099, 100))
    assert summarise(readings, 80.0, 10) == pytest.approx((0.10495, 0.1099, 0.1099, 1_000))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_measure_of_memory_sees_what_a_node_takes_more(page_size: int) -> None:
    """Another 160 bytes beside each leaf, of which four in five nodes are."""
    kept: list[bytes] = []

    def plant_with_ballast(grove: Grove) -> None:
        grove.plant()
        kept.append(bytes(160 - 33 - 8))  # its header, and about its place in the list

    plain = measure_memory(page_size, 400)
    more = measure_memory(page_size, 400, plant_with_ballast)
    assert plain.nodes == more.nodes == 500
    assert plain.tokens == 500 * 64
    assert more.bytes_per_node - plain.bytes_per_node == pytest.approx(160 * 4 / 5, abs=10)
    assert plain.bytes_per_token > (4 + 4 / page_size)


def test_amounts_have_three_digits_where_it_matters() -> None:
    """And nothing stands for what was not measured."""
    assert [amount(value) for value in (None, 1.234, 23.45, 345.6, 30_000.0)] == [
        "",
        "1.23",
        "23.4",
        "346",
        "30,000",
    ]
