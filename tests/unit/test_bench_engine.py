"""``prefixmesh bench engine``: that it measures everything through a real core, and that its sums are right. Nothing timed is asserted."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Final
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner

from prefixmesh.bench.engine_bench import Engines, run_engine_bench
from prefixmesh.bench.engine_drive import GREEDY, EngineDrive, TimedRunner
from prefixmesh.bench.engine_figures import (
    PRODUCT_REFERENCE,
    READ_REFERENCE,
    Ceiling,
    Figure,
    Report,
    Result,
    Setup,
    as_json,
)
from prefixmesh.bench.engine_plan import FIGURES, FULL, ON_DEMAND, PARTS, QUICK, figure_of, parts
from prefixmesh.bench.engine_plot import savings_svg
from prefixmesh.bench.yardstick import CALL_REFERENCE_NS, COMPARE_REFERENCE_NS, Yardstick
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cli import bench_engine
from prefixmesh.cli.main import main
from prefixmesh.config import EngineConfig, PrefixCacheKind
from prefixmesh.errors import InternalError
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig
from tests.support.fake_model import FAKE_VOCAB, FakeModel
from tests.support.scheduling import ENGINE_INFO
from tests.support.tiny_model import make_tiny_model

THE_SAME: Final = Ceiling(
    PRODUCT_REFERENCE, READ_REFERENCE, Yardstick(COMPARE_REFERENCE_NS, CALL_REFERENCE_NS)
)
HALF_AS_FAST: Final = Ceiling(
    PRODUCT_REFERENCE / 2, READ_REFERENCE / 2, Yardstick(2 * COMPARE_REFERENCE_NS, 2 * CALL_REFERENCE_NS)
)
SETUP: Final = Setup(model="fake", dtype="float32", threads=2, cores=2, versions={}, sizes={}, settings={})
PAGES: Final = 600


class Quiet:
    """The test process's garbage collection is its own business."""

    def after_step(self) -> None: ...


def open_drive(kind: PrefixCacheKind, vocab_size: int = FAKE_VOCAB) -> EngineDrive:
    allocator = PageAllocator(PAGES)
    scheduler = Scheduler(
        SchedulerConfig(
            max_running_requests=8,
            max_queued_requests=100,
            chunked_prefill_size=64,
            schedule_policy="lpm",
            context_length=300,
            vocab_size=vocab_size,
            shares_prefixes=kind != "off",
        ),
        allocator,
        make_prefix_cache(kind, allocator, 1),
    )
    runner = TimedRunner(FakeModel(PAGES, 1, vocab_size), perf_counter)
    info = msgspec.structs.replace(ENGINE_INFO, vocab_size=vocab_size)
    core = EngineCore(info=info, scheduler=scheduler, runner=runner)
    return EngineDrive(core, runner, perf_counter, Quiet())


def engines(cached: PrefixCacheKind = "radix") -> Engines:
    return Engines(
        cached=open_drive(cached),
        uncached=open_drive("off"),
        step_bytes=1_000,
        threads=2,
        versions={"prefixmesh": "1"},
        settings={"page_size": 1},
    )


def result(value: float, name: str = "cold", ceiling: Ceiling = HALF_AS_FAST) -> Result:
    """A figure with this value, made up."""
    return Result(figure=FIGURES[name], values=[value], values_cache_off=[], ceiling=ceiling)


def report(results: Sequence[Result]) -> Report:
    return Report(setup=SETUP, ceiling=HALF_AS_FAST, results=results)


def test_a_quick_run_gives_every_figure_through_a_real_core() -> None:
    """With caching off beside those that it changes; no page is lost, and all is plain JSON."""
    made = engines()
    told: list[str] = []
    found = run_engine_bench(QUICK, made, lambda: THE_SAME, frozenset(PARTS), told.append)
    assert len(told) == len(PARTS)
    for drive in (made.cached, made.uncached):
        drive.core.check_invariants()
        assert drive.core.stats().free_pages == PAGES
    printed = json.loads(json.dumps(as_json(found)))
    by_name = {one["name"]: one for one in printed["figures"]}
    assert list(by_name) == list(FIGURES)
    repeats = {"cold": 2, "warm": 2, "decode": 2, "burst": 2, "in_flight": 1}
    assert {name: by_name[name]["repeats"] for name in repeats} == repeats
    off = {name for name, one in by_name.items() if one["cache_off"]["median"] is not None}
    assert off == {"cold", "warm", "decode", "burst"}
    assert len(by_name["burst"]["cache_off"]["values"]) == QUICK.burst_repeats_cache_off
    assert all(one["median"] > 0 for one in printed["figures"])
    assert by_name["in_flight"]["met"] is True
    assert by_name["in_flight"]["notes"]["accepted"] == QUICK.flight_requests
    assert by_name["burst"]["notes"]["cached_share"] == pytest.approx(250 / 360, abs=1e-3)
    assert by_name["decode"]["share_of_ceiling"] > 0
    assert by_name["loop_filters"]["notes"]["forward_ms"] > 0
    assert printed["in_process"] is True
    assert printed["sizes"]["prompt_tokens"] == QUICK.prompt_tokens
    assert printed["machine"]["versions"]["prefixmesh"] == "1"
    assert [one["cached_tokens"] for one in printed["savings"]] == [0, 50, 90, 95, 99]


def test_a_cache_that_does_not_hit_is_no_figure_of_a_cache() -> None:
    with pytest.raises(InternalError, match="cached"):
        run_engine_bench(QUICK, engines(cached="off"), lambda: THE_SAME, frozenset({"first_token"}))


def test_requests_that_are_refused_are_not_counted_as_finished() -> None:
    """101 fit into queue and batch of this engine; the figure is then below what is asked for."""
    many = dataclasses.replace(QUICK, flight_requests=130)
    [flight] = run_engine_bench(many, engines(), lambda: THE_SAME, frozenset({"in_flight"})).results
    assert flight.value == flight.notes["accepted"] < 130
    assert flight.met is False


def test_the_loops_cost_is_the_step_less_the_time_inside_forward() -> None:
    """And the walk of the collector is in it."""
    now = [0.0]

    class Slow(FakeModel):
        def forward(self, plan: BatchPlan):  # type: ignore[no-untyped-def]
            now[0] += 2.0
            return super().forward(plan)

    class Walk:
        def after_step(self) -> None:
            now[0] += 0.25

    core = open_drive("radix").core
    runner = TimedRunner(Slow(PAGES, 1), lambda: now[0])
    core = EngineCore(info=core.info, scheduler=core._scheduler, runner=runner)
    drive = EngineDrive(core, runner, lambda: now[0], Walk())
    served = drive.submit([1, 2, 3], msgspec.structs.replace(GREEDY, max_tokens=3))
    cost = drive.step()
    assert (cost.forward_s, cost.loop_s) == (2.0, 0.25)
    drive.finish()
    assert served.first_token_s == 2.25
    assert served.tokens_per_s == pytest.approx(1 / 2.25)


@pytest.mark.parametrize(
    ("name", "value", "scaled", "met"),
    [
        ("cold", 2.79, 2.8, True),
        ("cold", 2.81, 2.8, False),
        ("decode", 22.6, 22.5, True),
        ("decode", 22.4, 22.5, False),
        ("loop", 2.9, 3.0, True),
        ("loop", 3.1, 3.0, False),
        ("loop_filters", 99.0, None, None),
    ],
)
def test_times_scale_up_and_rates_down(
    name: str, value: float, scaled: float | None, met: bool | None
) -> None:
    """On a machine that is half as fast."""
    one = result(value, name)
    assert one.scaled_target == (None if scaled is None else pytest.approx(scaled))
    assert one.met is met


def test_each_figure_is_scaled_by_what_its_time_goes_into() -> None:
    assert {name: FIGURES[name].bound for name in FIGURES if FIGURES[name].target is not None} == {
        "cold": "products", "warm": "products", "decode": "reads", "burst": "products", "loop": "interpreter",
    }  # fmt: skip
    half_the_product = THE_SAME._replace(product_flops_per_s=PRODUCT_REFERENCE / 2)
    assert [half_the_product.slowness(bound) for bound in ("products", "reads", "interpreter")] == [
        2.0,
        1.0,
        pytest.approx(1.0),
    ]
    flight = figure_of("in_flight", FULL)
    assert (flight.target, flight.bound) == (512.0, None)


def test_the_curve_for_the_docs_is_taken_only_when_named() -> None:
    assert parts() == [part for part in PARTS if part not in ON_DEMAND]
    assert parts(frozenset({"savings", "loop"})) == ["loop", "savings"]


def test_what_is_left_of_a_cached_prompt_is_drawn_over_what_was_measured() -> None:
    """200 tokens with 190 cached have 5 % of the linear and 9.75 % of the attention part left; the picture is well-formed."""
    long = dataclasses.replace(QUICK, savings_prompt_tokens=200)
    points = run_engine_bench(long, engines(), lambda: THE_SAME, frozenset({"savings"})).savings
    at_95 = points[3]
    assert at_95.cached_tokens == 190
    assert at_95.linear_left == pytest.approx(0.05)
    assert at_95.attention_left == pytest.approx(1 - 0.95**2)
    assert at_95.linear_left < at_95.total_left < at_95.attention_left
    svg = ElementTree.fromstring(savings_svg(points))
    space = "{http://www.w3.org/2000/svg}"
    dots = [one for one in svg.iter(f"{space}circle") if one.get("class") == "measured"]
    assert len(dots) == len(points) + 1  # and one in the legend
    total = next(one for one in svg.iter(f"{space}polyline") if one.get("class") == "total")
    heights = [float(pair.split(",")[1]) for pair in total.get("points", "").split()]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (24.0, 336.0)


def run(monkeypatch: pytest.MonkeyPatch, results: Sequence[Result], *arguments: str):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(bench_engine, "_measure", lambda names, **_: report(results))
    return CliRunner().invoke(main, ["bench", "engine", *arguments])


def test_check_fails_when_a_figure_is_missed_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 after the table; without ``--check`` the table alone."""
    results = [result(2.7), result(22.0, "decode"), result(9.0, "loop_filters")]
    missed = run(monkeypatch, results, "--check")
    assert missed.exit_code == 1
    assert missed.stderr == "Error: 1 of 2 figures missed: decode\n"
    assert "39 to 44 / 20" in missed.stdout
    assert "411" in missed.stdout
    assert run(monkeypatch, results).exit_code == 0
    assert run(monkeypatch, results, "--check", "--json").exit_code == 1
    assert run(monkeypatch, results[:1], "--check").exit_code == 0


def test_names_and_plots_that_mean_nothing_are_usage_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unknown = run(monkeypatch, [], "--only", "nothing")
    assert unknown.exit_code == 2
    assert "first_token" in unknown.stderr
    plot = run(monkeypatch, [], "--plot", str(tmp_path / "x.svg"))
    assert plot.exit_code == 2
    assert "--only savings" in plot.stderr
    assert run(monkeypatch, [], "--check", "--processor-time").exit_code == 2


def test_a_figure_without_a_target_is_only_told() -> None:
    figure = Figure(name="x", title="x", unit="s")
    one = Result(figure=figure, values=[1.0, 3.0, 2.0], values_cache_off=[5.0], ceiling=THE_SAME)
    assert (one.value, one.value_cache_off, one.met) == (2.0, 5.0, None)


@pytest.mark.slow
def test_the_real_thing_runs_on_a_small_model(tmp_path: Path) -> None:
    """Loads it twice, with the cache and without, and knows what a step must read."""
    from prefixmesh.bench.engine_ceiling import CeilingMeter
    from prefixmesh.bench.engine_models import open_engines

    model = make_tiny_model(tmp_path / "tiny")
    config = EngineConfig(model=str(model), dtype="bfloat16", device="cpu", max_total_tokens=2048, threads=1)
    made = open_engines(config)
    found = run_engine_bench(QUICK, made, lambda: THE_SAME)
    assert [one.figure.name for one in found.results] == list(FIGURES)
    assert min(CeilingMeter().measure()[:2]) > 0
    assert made.uncached.core.info.prefix_cache == "off"
    # 2 layers of q, o (64 x 64), k, v (64 x 32) and three of 64 x 128, and the head, 2 bytes each
    assert made.step_bytes == 2 * (
        2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * made.cached.core.info.vocab_size
    )
