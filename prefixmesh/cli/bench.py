"""``prefixmesh bench``: how fast the parts are on this machine, and whether that is what was asked for."""

import click

from prefixmesh.cli.bench_cache import cache
from prefixmesh.cli.bench_copies import copies
from prefixmesh.cli.bench_engine import engine
from prefixmesh.cli.bench_index import index
from prefixmesh.cli.bench_route import route
from prefixmesh.cli.bench_serve import serve
from prefixmesh.cli.bench_tiers import tiers


@click.group()
def bench() -> None:
    """Measure the parts on this machine."""


bench.add_command(cache)
bench.add_command(copies)
bench.add_command(engine)
bench.add_command(index)
bench.add_command(route)
bench.add_command(serve)
bench.add_command(tiers)
