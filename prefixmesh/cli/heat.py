"""``prefixmesh heat``: which prefixes and adapters are used most, and on how many workers the router wants them for it."""

import json
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.options import connection_options
from prefixmesh.cli.router_calls import open_router
from prefixmesh.cli.tables import print_table

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import HotItem

ID_CHARS: Final = 16
"""Of an id in tables: a block's name whole, of an adapter's digest enough to tell two apart."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
def heat(*, as_json: bool, **values: Any) -> None:
    """Show prefixes and adapters by how often they are used now, how many workers hold each, and how many are wanted to.

    For administrators. Prompts are not shown: a prefix is told by its last block's name.
    """
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        answer = call("ListHeat", pb.ListHeatRequest())
    items = sorted(answer.items, key=lambda one: -one.requests_per_s)
    if as_json:
        told = {"enabled": answer.enabled, "items": [as_dict(one) for one in items]}
        click.echo(json.dumps(told, indent=2))
        return
    if not answer.enabled:
        click.echo("Nothing is replicated for being hot: that is switched off here.")
    if items:
        columns = ("what", "id", "namespace", "tokens", "requests/s", "holders", "wanted")
        print_table(columns, [_row(one) for one in items], texts=3)
    elif answer.enabled:
        click.echo("Nothing is hot.")


def as_dict(item: "HotItem") -> dict[str, Any]:
    """For ``--json``: the wire's own names."""
    return {field.name: getattr(item, field.name) for field in item.DESCRIPTOR.fields}


def _row(item: "HotItem") -> tuple[str, ...]:
    return (
        "adapter" if item.is_adapter else "prefix",
        item.id[:ID_CHARS],
        item.namespace_digest or "-",
        "-" if item.is_adapter else f"{item.tokens:,}",
        f"{item.requests_per_s:.2f}",
        f"{item.holders}",
        f"{item.target}",
    )
