"""``prefixmesh models``: what can be fetched, what is here, what a fleet serves."""

from typing import Any

import click

from prefixmesh.cli.options import connection_options, open_client
from prefixmesh.cli.render import printable
from prefixmesh.cli.terminal import print_note


@click.group()
def models() -> None:
    """Fetch and list models."""


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the known model NAME and print where it is."""
    from prefixmesh.model_files.pull import pull as pull_model

    click.echo(pull_model(name, print_note))


@models.command(name="list", short_help="List the models known by name.")
def list_known() -> None:
    """List the models known by name, their sizes, and whether they are here."""
    from prefixmesh import paths
    from prefixmesh.model_files.pull import KNOWN_MODELS

    for name, model in sorted(KNOWN_MODELS.items()):
        path = paths.models_folder() / model.file_name
        where = str(path) if path.exists() else f"not here; run: prefixmesh models pull {name}"
        click.echo(f"{name}\t{model.size_bytes / 1e6:.0f} MB\t{where}")


@models.command()
@connection_options
def served(**values: Any) -> None:
    """List the models that a fleet serves."""
    with open_client(values) as client:
        for model in client.list_models():
            adapters = ", ".join(model.adapters) or "no adapters"
            click.echo(printable(f"{model.name}\tcontext {model.context_length:,} tokens\t{adapters}"))
