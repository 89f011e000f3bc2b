"""The fleet secret: made once, kept private, never shown."""

import os
import threading
from pathlib import Path

import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import ConfigError
from prefixmesh.fleet_secret import FleetSecret, load_or_create


def test_the_first_start_makes_it_and_the_next_finds_it(tmp_path: Path) -> None:
    """It is kept in a file that only its owner can read, in folders made on the way."""
    path = tmp_path / "new" / "secret"
    secret = load_or_create(path)
    assert load_or_create(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    """Only one of many simultaneous first starts makes the secret."""
    path = tmp_path / "secret"
    barrier = threading.Barrier(8)
    found: list[FleetSecret] = []

    def start() -> None:
        barrier.wait()
        found.append(load_or_create(path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({secret.raw for secret in found}) == 1


def test_a_file_open_to_others_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    path = tmp_path / "secret"
    load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"zz", b"00" * 31, b"\xff\xfe"])
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    """A damaged file is an error that names it, never a weaker key."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        load_or_create(path)


def test_an_unusable_place_is_a_setting_error(tmp_path: Path) -> None:
    """A folder in the file's place, or a file in the folder's, is explained and not a traceback."""
    (tmp_path / "file").write_text("")
    os.chmod(tmp_path / "file", 0o600)
    for path in (tmp_path, tmp_path / "file" / "secret"):
        with pytest.raises(ConfigError, match=str(path)):
            load_or_create(path)


def test_derived_keys_differ_and_are_stable() -> None:
    """Each use has its own key; the same secret gives the same keys on every node."""
    secret = FleetSecret(bytes(32))
    keys = {secret.namespace_key(), secret.ticket_key(), bytes.fromhex(secret.control_token()), secret.raw}
    assert len(keys) == 4
    assert secret.ticket_key().hex() == FleetSecret(bytes(32)).ticket_key().hex()
    assert fleet_secret.generate().ticket_key() != secret.ticket_key()


def test_it_is_never_shown() -> None:
    """A secret in a log line or traceback shows nothing (F74)."""
    secret = fleet_secret.generate()
    assert secret.raw.hex() not in f"{secret!r} {secret}"
    assert repr(secret) == "FleetSecret()"
