"""A replay's report: one page with its figures and plots, that fetches nothing and escapes all it is told."""

import builtins
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from prefixmesh.bench.replay_plots import distribution_svg, load_svg, sizes_svg
from prefixmesh.bench.replay_report import Page, Plot, plots_of, report_html
from prefixmesh.bench.replay_sweep import FACTORS, Run, sweep
from prefixmesh.cli.main import main
from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.catalogue import make_workload

pytest.importorskip("matplotlib")

SPEC = ReplaySpec(workers=2, device_tokens=20_000, timing=TimingModel(step_ms=1.0, prefill_ms_per_token=0.02))


def chats(requests: int = 60) -> Workload:
    return make_workload("chat", Random(0).random, requests=requests)


def figures(policy: str = "round_robin") -> ReplayFigures:
    return replay(chats(), SPEC, policy)


def test_page_escapes_all_that_is_told_and_keeps_pictures() -> None:
    hostile = '<script>alert("&")</script>'
    page = Page(hostile, hostile, [hostile], [[hostile]], hostile, hostile)
    html = report_html(page, [Plot(hostile, "<svg><g/></svg>")])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 8
    assert "<svg><g/></svg>" in html


def test_pictures_stand_in_a_page_and_fetch_nothing() -> None:
    one = figures()
    pictures = [
        distribution_svg("First <token>", "ms", {"a & b": one.log.ttft_ms}),
        load_svg("Load", one, 2),
        sizes_svg("Room", "tokens", {"cost": {1000: one, 2000: one}}),
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
    assert "2,000" in pictures[2]


def test_equal_figures_give_equal_pictures() -> None:
    assert load_svg("Load", figures(), 2) == load_svg("Load", figures(), 2)


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
    assert len(told) == 6


def test_plots_are_those_of_every_run() -> None:
    found = {"cost": figures("cost"), "round_robin": figures()}
    plots = plots_of(found, SPEC.workers, None)
    assert [plot.svg.count("round_robin") > 0 for plot in plots] == [True, True, False, True]
    assert len(plots) == 4


def test_report_is_written_beside_what_is_printed(tmp_path: Path) -> None:
    arguments = ("replay", "chat", "--requests", "40", "--policy", "cost", "--workers", "2", "--no-sweep")
    result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "out.html")])
    assert result.exit_code == 0, result.output
    html = (tmp_path / "out.html").read_text()
    assert f"out.html: {(tmp_path / 'out.html').stat().st_size:,} bytes" in " ".join(result.stderr.split())
    assert "<h1>Replay: chat</h1>" in html
    assert "<td>cost</td>" in html
    assert html.count("<svg") == 3
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
        load_svg("Load", one, 2)
