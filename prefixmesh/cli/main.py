"""The ``prefixmesh`` command: a table of its commands, each imported only when it is invoked.

``prefixmesh --help`` and shell completion stay fast because this module imports nothing heavy: what a command needs (gRPC, Ray,
torch) is loaded by the command.
"""

import copy
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click

from prefixmesh import __version__
from prefixmesh.cli.failure import as_failure, missing_package
from prefixmesh.errors import PrefixmeshError

INTERRUPTED_EXIT_CODE: Final = 130
"""What shells report for a program that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and the line that ``--help`` shows without looking there."""

    target: str
    """``module:attribute`` of a click command."""

    short_help: str
    needs: tuple[str, ...] = ()
    """Optional packages without which the command only shows its help."""


COMMANDS: Final[Mapping[str, LazyCommand]] = {
    "up": LazyCommand("prefixmesh.cli.up:up", "Start a fleet: workers and a router, on Ray."),
    "status": LazyCommand("prefixmesh.cli.status:status", "Show the fleet and its workers."),
    "workers": LazyCommand("prefixmesh.cli.workers:workers", "List, add, remove, drain and flush workers."),
    "pin": LazyCommand("prefixmesh.cli.pin:pin", "Have prompts stay cached, on as many workers as wished."),
    "heat": LazyCommand("prefixmesh.cli.heat:heat", "Show what is used most, and where it is replicated."),
    "explain": LazyCommand("prefixmesh.cli.explain:explain", "Show what a prompt would cost on each worker."),
    "history": LazyCommand("prefixmesh.cli.history:history", "Check what routers noted of each request."),
    "down": LazyCommand("prefixmesh.cli.down:down", "Stop the fleet that `up` started."),
    "generate": LazyCommand("prefixmesh.cli.generate:generate", "Answer one prompt."),
    "chat": LazyCommand("prefixmesh.cli.chat:chat", "Chat in the terminal."),
    "demo": LazyCommand("prefixmesh.cli.demo:demo", "Run a workload and see what the prefix caches save."),
    "bench": LazyCommand("prefixmesh.cli.bench:bench", "Measure the parts on this machine."),
    "replay": LazyCommand(
        "prefixmesh.cli.replay:replay", "Replay a trace by routing policies, in simulated time."
    ),
    "traces": LazyCommand(
        "prefixmesh.cli.traces:traces", "Find public traces, and make workloads to replay."
    ),
    "adapter": LazyCommand("prefixmesh.cli.adapter:adapter", "Load, list and unload LoRA adapters."),
    "models": LazyCommand("prefixmesh.cli.models:models", "Fetch and list models."),
    "keys": LazyCommand("prefixmesh.cli.keys:keys", "Make API keys."),
    "worker": LazyCommand("prefixmesh.worker.__main__:main", "Run one worker, without Ray.", ("torch",)),
    "router": LazyCommand("prefixmesh.router.__main__:main", "Run one router, without Ray."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are invoked, and whose errors end in one line and an exit code."""

    def __init__(self, *args: Any, table: Mapping[str, LazyCommand], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the table's order, which is the order a newcomer needs them in."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for a name that is not in the table."""
        entry = self._table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        missing = [package for package in entry.needs if importlib.util.find_spec(package) is None]
        return _refusing(command, missing[0]) if missing else command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in self._table.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises on purpose becomes one line on stderr."""
        try:
            return super().invoke(ctx)
        except PrefixmeshError as error:
            raise as_failure(error) from error
        except ModuleNotFoundError as error:
            explained = missing_package(error)
            if explained is None:
                raise
            raise explained from error
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal echoed ^C in the middle of a line
            ctx.exit(INTERRUPTED_EXIT_CODE)


def _refusing(command: click.Command, package: str) -> click.Command:
    """``command`` with its options and help, which fails for want of a package when it is run."""

    def refuse(**_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    refusing = copy.copy(command)
    refusing.callback = refuse
    return refusing


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="prefixmesh")
def main() -> None:
    """Serve an LLM from many GPUs so that a prompt prefix computed once is not computed again."""


if __name__ == "__main__":
    main()
