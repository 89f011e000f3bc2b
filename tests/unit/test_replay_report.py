"""A replay's report: one page with its figures and plots, that fetches nothing and escapes all it is told."""

import builtins
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from prefixmesh.bench.plot_svg import compact, duration, looks
from prefixmesh.bench.replay_plots import distribution_svg, load_svg, sizes_svg, workers_svg
from prefixmesh.bench.replay_report import Column, Page, Plot, plots_of, report_html
from prefixmesh.bench.replay_sweep import FACTORS, Run, Sweep, sweep
from prefixmesh.cli.main import main
from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workload_file import write_workload
from prefixmesh.sim.workloads.catalogue import make_workload

pytest.importorskip("matplotlib")

SPEC = ReplaySpec(workers=2, device_tokens=20_000, timing=TimingModel(step_ms=1.0, prefill_ms_per_token=0.02))


def chats(requests: int = 60) -> Workload:
    return make_workload("chat", Random(0).random, requests=requests)


def figures(policy: str = "round_robin") -> ReplayFigures:
    return replay(chats(), SPEC, policy)


def test_page_escapes_all_that_is_told_and_keeps_pictures() -> None:
    hostile = '<script>alert("&")</script>'
    columns = [Column(hostile, hostile), Column("cached", hostile), Column("host")]
    page = Page(hostile, [(hostile, hostile)], columns, [[hostile, "1", "2"]], hostile, hostile)
    html = report_html(page, [Plot(hostile, hostile, "<svg><g/></svg>")])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 11
    assert 'colspan="2"' in html, "names of columns that belong together stand under one of theirs"
    assert "<svg><g/></svg>" in html


def test_pictures_stand_in_a_page_and_fetch_nothing() -> None:
    one = figures()
    pictures = [
        distribution_svg("First <token>", "ms", {"a & b": one.log.ttft_ms}),
        load_svg("Load", {"a & b": one}),
        sizes_svg("Room", "tokens", {"cost": {1000: one, 2000: one}}, 1000),
        workers_svg("Shared", {"a & b": one}),
    ]
    for svg in pictures:
        assert svg.startswith("<svg")
        assert set(re.findall(r'https?://[^"<\s]*', svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }, "names of formats are no addresses to fetch"
        assert "<script" not in svg
        assert "<!DOCTYPE" not in svg
    assert "First &lt;token&gt;" in pictures[0]
    assert "a &amp; b" in pictures[0]
    assert ">2k<" in pictures[2]


def test_pictures_say_in_words_what_is_seen() -> None:
    one = figures()
    said = [
        (load_svg("Load", {'"quick" & co': one}), "The most on one worker: &quot;quick&quot; &amp; co: "),
        (
            workers_svg("Shared", {"cost": one}),
            f"cost: {one.max_over_mean:.2f}, {one.work_max_over_mean:.2f}",
        ),
        (
            sizes_svg("Room", "tokens", {"cost": {950: one}}),
            f"% cached at 950: cost: {100.0 * one.cached_share:.1f}",
        ),
        (distribution_svg("First", "ms", {"cost": one.log.ttft_ms}), f"cost: {duration(one.ttft_ms.p50)}, "),
    ]
    for svg, words in said:
        assert svg.startswith('<svg role="img" aria-label="')
        assert words in svg.partition(">")[0]


def test_names_inside_pictures_of_a_page_are_each_there_once() -> None:
    found = {"cost": figures("cost"), "round_robin": figures()}
    names = [name for plot in plots_of(found, SPEC, None) for name in re.findall(r' id="([^"]+)"', plot.svg)]
    assert len(names) == len(set(names)) > 0


def test_no_two_lines_look_alike_and_none_is_told_by_its_colour_alone() -> None:
    look = looks(map(str, range(28)))
    assert len({(one.color, one.linestyle) for one in look.values()}) == 28
    beside = list(look.values())
    assert all(a.linestyle != b.linestyle and a.color != b.color for a, b in pairwise(beside))


def test_panels_of_load_show_who_has_most_at_each_moment() -> None:
    uneven, even = figures("longest_match"), figures()
    most = [re.findall(r"x: ([\d.]+)", load_svg("Load", {"x": one}))[0] for one in (uneven, even)]
    assert float(most[0]) > float(most[1]) > 0.0


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [(0.0, "0 ms"), (12.5, "12.5 ms"), (1500.0, "1.5 s"), (2e5, "200 s"), (8055349.0, "8,055 s")],
)
def test_durations_are_told_in_the_unit_that_suits_them(milliseconds: float, said: str) -> None:
    assert duration(milliseconds) == said


def test_counts_are_told_in_three_digits() -> None:
    assert [compact(one) for one in (8, 950, 106_750, 1_708_000)] == ["8", "950", "107k", "1.71M"]


def test_equal_figures_give_equal_pictures() -> None:
    assert load_svg("Load", {"x": figures()}) == load_svg("Load", {"x": figures()})


def test_text_that_looks_like_mathematics_is_text() -> None:
    assert "$x^$" in distribution_svg("a", "ms", {"$x^$": figures().log.ttft_ms})


def test_sweep_replays_with_other_sizes_and_leaves_out_what_has_no_room() -> None:
    workload, told = chats(), list[str]()
    largest = max(one.input_length + one.output_length for one in workload.requests)
    spec = replace(SPEC, device_tokens=2 * (largest + 64))
    base = replay(workload, spec, "round_robin")
    sizes = sweep(workload, {"rr": Run("round_robin", spec)}, {"rr": base}, told.append)
    assert list(sizes.by_device_tokens["rr"]) == [round(one * spec.device_tokens) for one in FACTORS[1:]]
    assert list(sizes.by_workers["rr"]) == [1, 2, 4, 8]
    assert sizes.by_workers["rr"][2] is base is sizes.by_device_tokens["rr"][spec.device_tokens]
    shares = [one.cached_share for one in sizes.by_device_tokens["rr"].values()]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert len(told) == 7  # one of which was refused
    assert [len(one.log) for one in sizes.by_workers["rr"].values()] == [0, len(base.log), 0, 0]


def test_sweep_leaves_out_what_has_no_room_beside_pins_or_in_whole_blocks_of_a_table() -> None:
    """A report is not lost for a size that a replay refuses: here the quarter, which has room for the request alone."""
    pinned = WorkloadRequest(
        arrival_ms=0, input_length=41, output_length=1, block_ids=tuple(range(41)), pin_tokens=4
    )
    workload = Workload(name="pinned", block_size=1, requests=[pinned])
    for spec in (
        replace(SPEC, device_tokens=4 * 44, pins=True),
        replace(SPEC, device_tokens=4 * 44, cache="hash"),
    ):
        base = replay(workload, spec, "round_robin")
        sizes = sweep(workload, {"rr": Run("round_robin", spec)}, {"rr": base})
        assert list(sizes.by_device_tokens["rr"]) == [88, 176, 352, 704]


def test_plots_are_those_of_every_run() -> None:
    found = {"cost": figures("cost"), "round_robin": figures()}
    plots = plots_of(found, SPEC, None)
    assert len(plots) == 4
    assert all(">round_robin<" in plot.svg for plot in plots)
    by_size = {label: {1000: one, 2000: one} for label, one in found.items()}
    assert len(plots_of(found, SPEC, Sweep(by_size, by_size))) == 6


def test_report_is_written_beside_what_is_printed(tmp_path: Path) -> None:
    arguments = ("replay", "chat", "--requests", "40", "--policy", "cost", "--workers", "2", "--no-sweep")
    result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "out.html")])
    assert result.exit_code == 0, result.output
    html = (tmp_path / "out.html").read_text()
    assert f"out.html: {(tmp_path / 'out.html').stat().st_size:,} bytes" in " ".join(result.stderr.split())
    assert "<h1>Replay: chat</h1>" in html
    assert '<th scope="row">cost</th>' in html
    assert html.count("<svg") == 4
    assert not re.search(r"(src|href)=\"http", html)
    lost = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "none" / "out.html")])
    assert lost.exit_code == 2
    assert "out.html: No such file or directory" in " ".join(lost.stderr.split())


def test_what_is_missing_is_named_where_plots_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    one = figures()
    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'prefixmesh\[report\]'"):
        load_svg("Load", {"x": one})


def test_answers_of_one_token_have_no_time_between_tokens(tmp_path: Path) -> None:
    asked = WorkloadRequest(arrival_ms=0, input_length=64, output_length=1, block_ids=(0,))
    write_workload(Workload(name="short", block_size=64, requests=[asked]), tmp_path / "short.jsonl")
    arguments = ["replay", str(tmp_path / "short.jsonl"), "--policy", "round_robin", "--no-sweep"]
    told = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout, parse_constant=pytest.fail)
    assert told["policies"]["round_robin"]["token_ms"] == {"p50": None, "p90": None, "p99": None}
    result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "out.html")])
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if line.startswith("round_robin"))
    assert row.split()[6:8] == ["–", "–"]
    html = (tmp_path / "out.html").read_text()
    assert 'id="token_to_token"' not in html
    assert 'id="first_token"' in html
