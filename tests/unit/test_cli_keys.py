"""``prefixmesh keys new``: the key is shown once, its hash is what a router reads."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixmesh.cli.main import main
from prefixmesh.rpc.identity import ApiKeys, Caller


def new_key(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", "new", *arguments])


def test_new_key_is_accepted_by_who_reads_the_file(tmp_path: Path) -> None:
    """Each printed key is found in the file as its tenant; the file holds no key."""
    path = tmp_path / "folder" / "keys"
    printed = [
        new_key("--tenant", "acme", "--file", str(path)).stdout.strip(),
        new_key("--tenant", "ops", "--admin", "--file", str(path)).stdout.strip(),
    ]
    keys = ApiKeys.from_file(path)
    assert [keys.find(key) for key in printed] == [
        Caller("acme"),  # type: ignore[arg-type]
        Caller("ops", is_admin=True),  # type: ignore[arg-type]
    ]
    assert not any(key in path.read_text() for key in printed)


def test_keys_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Made with mode 600, whatever the umask."""
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        new_key("--tenant", "acme", "--file", str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_default_file_is_under_the_home_of_prefixmesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the note on stderr names it; stdout is the key alone."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    result = new_key("--tenant", "acme")
    assert ApiKeys.from_file(tmp_path / "api_keys").find(result.stdout.strip()) is not None
    assert str(tmp_path / "api_keys") in result.stderr


def test_last_line_without_an_end_is_not_spoilt(tmp_path: Path) -> None:
    """A key appended to a file that an editor left without a final line end keeps both lines whole."""
    path = tmp_path / "keys"
    path.write_text("# ours")
    key = new_key("--tenant", "acme", "--file", str(path)).stdout.strip()
    assert path.read_text().startswith("# ours\n")
    assert ApiKeys.from_file(path).find(key) is not None


@pytest.mark.parametrize("tenant", ["", "a b", "a#b", "café", "a\nb"])
def test_tenant_that_the_file_cannot_hold_is_refused(tmp_path: Path, tenant: str) -> None:
    """Exit code 2, and nothing is written."""
    path = tmp_path / "keys"
    result = new_key("--tenant", tenant, "--file", str(path))
    assert result.exit_code == 2
    assert not path.exists()


def test_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    """No key is printed that no file knows."""
    (tmp_path / "file").write_text("")
    result = new_key("--tenant", "acme", "--file", str(tmp_path / "file" / "keys"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "cannot write" in result.stderr
