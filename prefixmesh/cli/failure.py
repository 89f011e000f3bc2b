"""How a command fails: one clear line on stderr and an exit code, never a trace for what the user can mend."""

from typing import Final

import click

from prefixmesh.cli.render import printable
from prefixmesh.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
)

_EXTRAS: Final = {"torch": "worker", "safetensors": "worker", "ray": "ray"}
"""Which optional part of the installation brings a package."""


class BadRequest(click.ClickException):
    """The user must ask differently."""

    exit_code = 2


def as_failure(error: PrefixmeshError) -> click.ClickException:
    """An error of ours as the command line shows it. Exit code 2: ask differently; 1: it could not be done."""
    kind = BadRequest if isinstance(error, InvalidRequestError | ConfigError) else click.ClickException
    if isinstance(error, AuthenticationError):
        return kind(f"{one_line(str(error))}; give the key with $PREFIXMESH_API_KEY or --api-key")
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        return kind(f"{one_line(str(error))}; try again in {max(error.retry_after_s, 0.1):.1f} s")
    return kind(one_line(str(error)))


def missing_package(error: ModuleNotFoundError) -> click.ClickException | None:
    """What to install for a package that is not there; None when it is none of our optional ones."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return None
    return click.ClickException(
        f"this command needs {package}, which is not installed; run: pip install 'prefixmesh[{extra}]'"
    )


def one_line(message: str) -> str:
    """A message, possibly a server's, without line breaks and control characters."""
    return printable(" ".join(message.split()))
