"""Which flags of ``prefixmesh replay`` would say nothing beside the others? Those are refused: whoever gave them believes that they were heard."""

from typing import Final

import click
from click.core import ParameterSource

HEARD_WITH_FAULTS: Final = frozenset(
    {
        "trace",
        "faults",
        "seed",
        "seeds",
        "jobs",
        "prints_script",
        "requests",
        "block_size",
        "as_json",
    }
)


def refuse_unheard(context: click.Context) -> None:
    """Raises UsageError that names them. O(flags)."""
    given = [
        one
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]
    if context.params["faults"] is not None:
        _refuse(
            [one for one in given if one.name not in HEARD_WITH_FAULTS],
            "with --faults the seed says what the fleet is, or a script in JSON",
        )
    elif context.params["report"] is None and context.params["sweep"]:
        _refuse([one for one in given if one.name == "sweep"], "of --report, which is not asked for")


def _refuse(flags: list[click.Parameter], why: str) -> None:
    if flags:
        raise click.UsageError(f"{', '.join(one.opts[0] for one in flags)}: {why}")
