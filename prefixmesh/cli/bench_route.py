"""``prefixmesh bench route``: what a router takes of a processor for a request, and whether that is what was asked for."""

from collections.abc import Collection
from typing import Final

import click

from prefixmesh.cli.bench_router_table import show
from prefixmesh.cli.bench_table import bench_flags, refuse_quick_check
from prefixmesh.cli.terminal import print_note

LEGEND: Final = """
processor time of the server's process, gRPC's threads included, for one request, 8 at a time; what it takes when nobody asks is taken off.
an echo answers with the message it was sent, a no-op proxy passes the frames of a worker on: same gRPC, same settings, same run, in turns.
others, on a machine of this kind: compiled HTTP routers that do not tokenise take 143 to 256 µs and 246 to 1,107 µs for a request, over gRPC,
where they tokenise, 460 to 614 µs (95 tokens) and 5.4 to 7 ms (3,800 tokens)."""


def _known() -> Collection[str]:
    from prefixmesh.bench.route_plan import NAMES

    return NAMES


@click.command(short_help="Measure a router's processor time: routes, proxied answers, chats.")
@bench_flags(_known, one_of_them="figure", quick="Few requests")
def route(*, as_json: bool, check: bool, quick: bool, names: frozenset[str]) -> None:
    """Measure what a router takes for a request beyond what gRPC takes, before fake workers, in some minutes.

    Starts a router, an echo, a no-op proxy and two fake workers, each as a process on loopback. Targets are scaled to this machine by what
    two things take here, measured beside each figure: comparing two equal 12 KiB objects (220 ns on the machine of the targets) and calling
    an empty method (26 ns there). Run it where nothing else runs.
    """
    from prefixmesh.bench.route_bench import run_route_bench
    from prefixmesh.bench.route_plan import FULL, QUICK

    refuse_quick_check(check=check, quick=quick)
    report = run_route_bench(QUICK if quick else FULL, names, print_note)
    show(report, as_json=as_json, check=check, quick=quick, legend=LEGEND)
