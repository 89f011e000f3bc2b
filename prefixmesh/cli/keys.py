"""``prefixmesh keys``: API keys for a router. The file holds hashes only; a key is shown once and kept by nobody."""

import fcntl
import os
from pathlib import Path

import click

from prefixmesh import paths
from prefixmesh.cli.terminal import print_note
from prefixmesh.errors import ConfigError, InvalidRequestError


@click.group()
def keys() -> None:
    """Make API keys."""


@keys.command(short_help="Make an API key and append its hash to the keys file.")
@click.option("--tenant", required=True, help="Whom the key belongs to; ASCII, without spaces.")
@click.option(
    "--admin",
    "is_admin",
    is_flag=True,
    help="The key may also list the fleet's workers (`status`) and what else only administrators may.",
)
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keys file to append to. [default: api_keys in ~/.prefixmesh]",
)
def new(*, tenant: str, is_admin: bool, path: Path | None) -> None:
    """Make an API key: print it, once, and append its hash to the keys file."""
    from prefixmesh.rpc.identity import hash_key, new_key

    path = path or paths.home() / "api_keys"
    key = new_key()
    append_line(path, f"{hash_key(key)} {_one_word(tenant)}{' admin' if is_admin else ''}")
    click.echo(key)
    print_note(
        f"This is the only time the key is shown. Its hash is in {path}, for the router's --api-keys-file."
    )


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that only its owner may read (made with mode 600); two at once both arrive whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            # An editor may have left the last line without its end; a key glued to it would break both.
            gap = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(gap + line.encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the API keys file {path}: {error.strerror}") from error


def _one_word(tenant: str) -> str:
    """A tenant that the file's format can hold."""
    from prefixmesh.rpc.identity import check_tenant

    if check_tenant(tenant).split() != [tenant] or "#" in tenant or not tenant.isascii():
        raise InvalidRequestError("tenant", f"must be ASCII without spaces and '#', got {tenant!r}")
    return tenant
