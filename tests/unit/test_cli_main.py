"""The command group: lazy commands, one-line errors, exit codes."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from prefixmesh import __version__
from prefixmesh.cli.main import COMMANDS, LazyCommand, LazyGroup, main
from prefixmesh.errors import ConfigError, InvalidRequestError, UnavailableError


def run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    """Invoke a group whose one command raises ``error``."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr("tests.unit.test_cli_main.COMMAND_UNDER_TEST", fails)
    table = {"fails": LazyCommand("tests.unit.test_cli_main:COMMAND_UNDER_TEST", "Fails.")}
    return CliRunner().invoke(LazyGroup("group", table=table), ["fails"])


COMMAND_UNDER_TEST: click.Command | Callable[[], None] | None = None


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists(name: str) -> None:
    """Its target is a click command that can print its help."""
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage:")


def test_help_lists_every_command_without_importing_it() -> None:
    """A command whose module does not exist is listed all the same."""
    group = LazyGroup("group", table={"ghost": LazyCommand("no.such.module:x", "Walks at night.")})
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    assert "ghost  Walks at night." in result.output
    listed = CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n  {name} " in listed for name in COMMANDS)


def test_version() -> None:
    """``--version`` prints the package's own."""
    assert CliRunner().invoke(main, ["--version"]).output == f"prefixmesh, version {__version__}\n"


def test_unknown_command_is_a_usage_error() -> None:
    """It names the command; exit code 2."""
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "No such command 'fly'" in result.output


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UnavailableError("nobody\nanswers"), 1),
        (InvalidRequestError("sampling.seed", "too large"), 2),
        (ConfigError("bad file"), 2),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    """2 when the user must ask differently, 1 when it could not be done; no trace."""
    result = run_failing(monkeypatch, error)
    assert result.exit_code == exit_code
    assert result.stderr == f"Error: {' '.join(str(error).split())}\n"
    assert result.stdout == ""


def test_missing_optional_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base installation has neither torch nor Ray."""
    result = run_failing(monkeypatch, ModuleNotFoundError("No module named 'ray.util'", name="ray.util"))
    assert result.exit_code == 1
    assert "pip install 'prefixmesh[ray]'" in result.stderr


def test_a_worker_without_torch_shows_its_help_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the trace of an engine's process that could not import it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "--page-size" in CliRunner().invoke(main, ["worker", "--help"]).stdout
    result = CliRunner().invoke(main, ["worker"])
    assert result.exit_code == 1
    assert "this command needs torch" in result.stderr
    assert "pip install 'prefixmesh[worker]'" in result.stderr


def test_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors raised on purpose become one line: a bug keeps its trace."""
    bug = ModuleNotFoundError("No module named 'nonsense'", name="nonsense")
    assert run_failing(monkeypatch, bug).exception is bug


def test_interrupt_ends_with_the_shells_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is 130 and no trace."""
    result = run_failing(monkeypatch, KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.output.strip() == ""


def test_model_list_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model's size, and how to fetch it while it is missing."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    result = CliRunner().invoke(main, ["models", "list"])
    assert result.exit_code == 0
    assert "smollm2\t98 MB\tnot here; run: prefixmesh models pull smollm2" in result.output


def test_pulling_an_unknown_model_names_the_known_ones() -> None:
    """One line, exit code 1, before anything is fetched."""
    result = CliRunner().invoke(main, ["models", "pull", "gpt-9"])
    assert result.exit_code == 1
    assert "gpt-9" in result.stderr
    assert "smollm2" in result.stderr


def test_no_fleet_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address and without a remembered fleet."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    result = CliRunner().invoke(main, ["generate", "hi"])
    assert result.exit_code == 1
    assert "prefixmesh up" in result.stderr
