"""What a store in a file adds to the contract: it survives, whatever ends its process, and is one process's."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prefixmesh.errors import ConfigError, UnavailableError
from prefixmesh.router.open_state import open_store
from prefixmesh.router.state_file import FileStore
from prefixmesh.router.state_store import Entry


def modes_in(folder: Path) -> dict[str, int]:
    """The files that are there, and who may read them."""
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


async def test_state_survives_a_restart(tmp_path: Path) -> None:
    """Values and versions; what was deleted stays away, and its version is not used again."""
    path = tmp_path / "new" / "state.json"
    store = FileStore(path)
    kept = await store.put("a", b"\x00\xff")
    assert kept is not None
    await store.put("b", b"")
    await store.delete("b")
    await store.close()
    again = FileStore(path)
    assert await again.entries("") == [Entry("a", b"\x00\xff", kept)]
    assert await again.put("b", b"") == kept + 3
    await again.close()


async def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    """Mode 600, the lock's too; no draft is left."""
    store = FileStore(tmp_path / "state.json")
    await store.put("a", b"1")
    assert modes_in(tmp_path) == {"state.json": 0o600, "state.json.lock": 0o600}
    await store.close()


async def test_second_router_is_kept_out(tmp_path: Path) -> None:
    """Until the first lets go, also without a word."""
    store = FileStore(tmp_path / "state.json")
    with pytest.raises(ConfigError, match="another router"):
        FileStore(tmp_path / "state.json")
    await store.close()
    await FileStore(tmp_path / "state.json").close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not hold"),
        ('{"format":1,"version":2,"entr', "does not hold"),
        ("[]", "does not hold"),
        ('{"x":' + "[" * 100_000, "does not hold"),
        ('{"format":2,"version":1,"entries":[]}', "format 2"),
        ("\udcff", "does not hold"),
    ],
)
async def test_foreign_file_is_refused_and_kept(tmp_path: Path, text: str, problem: str) -> None:
    """Named, and not overwritten: it may be somebody's."""
    path = tmp_path / "state.json"
    data = text.encode(errors="surrogateescape")
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"state.json .*{problem}|{problem}"):
        FileStore(path)
    assert path.read_bytes() == data
    path.unlink()
    await FileStore(path).close()  # the refusal let go of the lock


@pytest.mark.parametrize("broken", ["fsync", "replace"])
async def test_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Neither in the file nor for readers; the next write is served."""
    path = tmp_path / "state.json"
    store = FileStore(path)
    version = await store.put("a", b"1")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(UnavailableError, match="No space left"):
            await store.put("a", b"2")
    assert path.read_bytes() == before
    assert await store.get("a") == Entry("a", b"1", version or 0)
    assert set(modes_in(tmp_path)) == {"state.json", "state.json.lock"}
    assert await store.put("a", b"3", expect=version) is not None
    await store.close()


async def test_cancelled_writer_does_not_part_file_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write that had begun is finished, and readers see it."""
    store = FileStore(tmp_path / "state.json")
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    in_thread = asyncio.to_thread

    async def slowly(*arguments: object) -> None:
        begun.set()
        await may_go_on.wait()
        await in_thread(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", slowly)
    writing = asyncio.create_task(store.put("a", b"1"))
    await begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    may_go_on.set()
    await store.close()
    monkeypatch.undo()
    entry = await store.get("a")
    again = FileStore(tmp_path / "state.json")
    assert entry is not None
    assert await again.get("a") == entry
    await again.close()
    with pytest.raises(UnavailableError, match="closed"):
        await store.put("a", b"2")


_WRITER = """
import asyncio, sys
from pathlib import Path
from prefixmesh.router.state_file import FileStore

async def main():
    store = FileStore(Path(sys.argv[1]))
    for number in range(100_000):
        await store.put(f"key-{number:06}", b"x" * 500)
        print(number, flush=True)

asyncio.run(main())
"""


def test_killed_writer_leaves_everything_it_was_told_is_done(tmp_path: Path) -> None:
    """SIGKILL in the midst of writing: the file is whole, holds every write that returned, and is free to use (F16's kind)."""
    path = tmp_path / "state.json"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            done = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
    (path.parent / ".state.json.left.draft").write_text("half")

    async def read() -> list[Entry]:
        store = FileStore(path)
        entries = await store.entries("")
        await store.close()
        return entries

    entries = asyncio.run(read())
    assert len(entries) > done
    assert [entry.key for entry in entries] == [f"key-{number:06}" for number in range(len(entries))]
    assert set(modes_in(tmp_path)) == {"state.json", "state.json.lock"}


def test_state_is_named_by_a_url(tmp_path: Path) -> None:
    """Three kinds are known; anything else says so."""
    assert repr(open_store("memory://")) == "MemoryStore(StateTable(0 entries, version 0))"
    for url in ("http://localhost", "file://", "redis://", "state.json", ""):
        with pytest.raises(ConfigError, match="state must be memory://, file://PATH or redis://"):
            open_store(url)
    with pytest.raises(ConfigError, match="cannot keep the state"):
        open_store("file:///proc/nowhere/state.json")
