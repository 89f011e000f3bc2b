"""The figures of a replay, for people and for machines."""

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from prefixmesh.cli.failure import one_line

if TYPE_CHECKING:
    from prefixmesh.bench.replay_report import Column, Page
    from prefixmesh.sim.replay_figures import ReplayFigures
    from prefixmesh.sim.replay_spec import ReplaySpec
    from prefixmesh.sim.workload import Workload

UNKNOWN: Final = "–"
"""Of what there is none: times from token to token where answers have one, decisions of a rule that is not ours."""

_MEANINGS: Final = """copies: on how many workers a block is that is on any. good, goodput: requests that met the objective, and how many of
them a second. waited: requests whose LoRA adapter was not in memory. pins: replicas of pinned prefixes that found room, of all that are
wanted. decision: median of this machine's CPU time for one of our router's. The block-level form: what it leaves out is told in
docs/replay.md."""

LEGEND: Final = f"""
cached, host: share of all prompt tokens that were found cached, and that came back from the host tier. ttft: from arrival to first token.
token: from one token of an answer to its next. load, work: the most prompt tokens, and the most work, of a worker by the mean.
{_MEANINGS}"""

PAGE_LEGEND: Final = f"""cached: share of all prompt tokens that were found cached, on either tier. first token: from arrival. token to token:
the mean of each answer. most by mean: the most prompt tokens, and the most work, of a worker by the mean one's. {_MEANINGS}"""


class Title(NamedTuple):
    """What was replayed on what. Of specs that differ in their caches only, the first."""

    workload: "Workload"
    spec: "ReplaySpec"
    profile: str
    profile_source: str


def print_figures(title: Title, found: Mapping[str, "ReplayFigures"]) -> None:
    """A title, a table with a row a policy, and what its columns mean."""
    from prefixmesh.cli.tables import print_table

    click.echo(f"{about(title)}\n")
    extras = _extras(title)
    print_table(_columns(extras), [_row(name, figures, extras) for name, figures in found.items()])
    click.echo(LEGEND)


def as_page(title: Title, found: Mapping[str, "ReplayFigures"]) -> "Page":
    """The same for a report."""
    from prefixmesh.bench.replay_report import Page

    extras = _extras(title)
    rows = [_row(name, figures, extras) for name, figures in found.items()]
    command = one_line(shlex.join(("prefixmesh", *sys.argv[1:])))
    name = one_line(f"Replay: {title.workload.name}")
    return Page(name, _parts(title), _page_columns(extras), rows, PAGE_LEGEND, command)


def about(title: Title) -> str:
    """What was replayed on what, in a line. Names are a file's, and must not steer the terminal."""
    parts = [what if word != "objective" else f"objective: {what}" for word, what in _parts(title)]
    return one_line(f"{title.workload.name}: {'; '.join(parts)}")


def _parts(title: Title) -> list[tuple[str, str]]:
    """The same, each with a word for it."""
    workload, spec = title.workload, title.spec
    way = (
        f"{spec.concurrency:,} conversations at a time"
        if spec.concurrency
        else f"at its times, speed {spec.speed:g}"
    )
    requests = f"{len(workload.requests):,} requests, {workload.prompt_tokens:,} prompt tokens in blocks of {workload.block_size}, {way}"
    fleet = f"{spec.workers:,} workers of {spec.device_tokens:,} tokens on the device and {spec.host_tokens:,} on the host"
    fleet += ", KV that several share read once" if spec.cascade else ""
    objective = _objective(spec)
    return [
        ("requests", requests),
        ("fleet", fleet),
        ("profile", one_line(f"{title.profile} ({title.profile_source})")),
        *([("objective", objective)] if objective else []),
    ]


def as_object(title: Title, found: Mapping[str, "ReplayFigures"]) -> dict[str, Any]:
    """The same for JSON; names of fields stay."""
    from dataclasses import asdict

    workload, fleet = title.workload, asdict(title.spec)
    ttft_ms, token_ms = title.spec.objective
    fleet["objective"] = {
        "ttft_ms": ttft_ms if math.isfinite(ttft_ms) else None,
        "token_ms": token_ms if math.isfinite(token_ms) else None,
    }
    return {
        "form": "block-level",
        "trace": {
            "name": workload.name,
            "block_size": workload.block_size,
            "requests": len(workload.requests),
        },
        "fleet": fleet | {"profile": title.profile, "profile_source": title.profile_source},
        "policies": {name: figures.as_json() for name, figures in found.items()},
    }


class _Extra(NamedTuple):
    """A column that some replays have."""

    name: str
    group: str
    """On a page, where there is room to say more."""

    cell: "Callable[[ReplayFigures], str]"


def _extras(title: Title) -> list[_Extra]:
    """Those of what was asked for, or is in the workload. O(requests)."""
    spec, extras = title.spec, []
    if any(map(math.isfinite, spec.objective)):
        extras += [
            _Extra("good", "goodput", lambda one: f"{one.goodput_share:.1%}"),
            _Extra("a second", "goodput", lambda one: f"{one.goodput_per_s:,.1f}"),
        ]
    if spec.max_resident_adapters and any(one.adapter for one in title.workload.requests):
        extras.append(_Extra("waited", "for adapters", lambda one: f"{one.adapter_wait_share:.1%}"))
    if spec.pins:
        extras.append(
            _Extra("pins", "of wanted", lambda one: f"{one.pin_replicas} of {one.pin_replicas_wanted}")
        )
    return extras


def _columns(extras: Sequence[_Extra]) -> Sequence[str]:
    columns = ("policy", "cached", "host", "ttft p50", "p90", "p99 ms", "token p50", "p99 ms")
    return (*columns, "tokens/s", "load", "work", "copies", *(extra.name for extra in extras), "decision")


def _page_columns(extras: Sequence[_Extra]) -> "Sequence[Column]":
    """The same for a page, where there is room to say more."""
    from prefixmesh.bench.replay_report import Column

    ttft, token, load = "first token, ms", "token to token, ms", "most by mean"
    return (
        Column("policy"),
        Column("cached", "of prompt tokens"),
        Column("from host", "of prompt tokens"),
        *(Column(name, ttft) for name in ("median", "90 %", "99 %")),
        *(Column(name, token) for name in ("median", "99 %")),
        Column("tokens/s"),
        Column("tokens", load),
        Column("work", load),
        Column("copies"),
        *(Column(extra.name, extra.group) for extra in extras),
        Column("decision"),
    )


def _row(name: str, figures: "ReplayFigures", extras: Sequence[_Extra]) -> Sequence[str]:
    ttft, token = figures.ttft_ms, figures.token_ms
    return (
        name,
        f"{figures.cached_share:.2%}",
        f"{figures.host_share:.2%}",
        *(f"{value:,.0f}" for value in ttft),
        *(f"{value:,.1f}" if token.is_known else UNKNOWN for value in (token.p50, token.p99)),
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.max_over_mean:.2f}",
        f"{figures.work_max_over_mean:.2f}",
        f"{figures.copies:.2f}",
        *(extra.cell(figures) for extra in extras),
        UNKNOWN if figures.decision_us is None else f"{figures.decision_us.p50:,.0f} µs",
    )


def _objective(spec: "ReplaySpec") -> str:
    wanted = [
        f"{what} within {milliseconds:g} ms"
        for what, milliseconds in zip(("the first token", "each token"), spec.objective, strict=True)
        if math.isfinite(milliseconds)
    ]
    return " and ".join(wanted)
