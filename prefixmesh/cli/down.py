"""``prefixmesh down``: stop the fleet that ``prefixmesh up`` started."""

import click


@click.command()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an orderly end may take before it is forced.",
)
def down(timeout: float) -> None:
    """Stop the fleet: running answers finish within its grace, then workers, router and its own Ray end.

    A Ray cluster that the fleet only joined stays. With no fleet up it does nothing.
    """
    from prefixmesh.fleet.control import stop_fleet

    click.echo("The fleet is stopped." if stop_fleet(timeout) else "No fleet is up.")
