"""Files of the disk tier: what is read is what was written, whatever happened to the file; and a killed writer leaves nothing half."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import TOKEN_BYTES, pack, unpack
from prefixmesh.worker.tiers import disk_files
from prefixmesh.worker.tiers.disk_files import (
    DRAFT_SUFFIX,
    SUFFIX,
    BadFileError,
    WantedPages,
    put_away,
    read_header,
    read_pages,
    write_run,
)
from prefixmesh.worker.tiers.disk_folder import LOCK_FILE, lock_folder, take_stock
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvRun
from tests.support.disk_kit import IDENTITY, LAYOUT, NAMESPACE, WAIT_S

TOKENS = pack(list(range(100, 116)))
KV = bytes(i % 251 for i in range(4 * LAYOUT.page_bytes))
"""Of tokens 8 to 16, in pages of 2."""


def make_run(tokens: bytes = TOKENS, namespace: Namespace = NAMESPACE) -> KvRun:
    fingerprints = block_fingerprints(namespace, tokens, LAYOUT.block_size)
    return KvRun(namespace, 8, tokens, tuple(fingerprints[2:]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_run(tmp_path, "run", make_run(), IDENTITY, [KV])
    return tmp_path / f"run{SUFFIX}"


def wanted(start: int = 8, end: int = 16) -> WantedPages:
    return WantedPages(IDENTITY, NAMESPACE, TOKENS[: end * TOKEN_BYTES], start)


def read(path: Path, want: WantedPages | None = None) -> bytes:
    want = wanted() if want is None else want
    pages = (len(want.tokens) // TOKEN_BYTES - want.start_tokens) // LAYOUT.page_size
    into = bytearray(pages * LAYOUT.page_bytes)
    read_pages(path, want, memoryview(into))
    return bytes(into)


def test_what_was_written_is_read_whole_or_in_part(path: Path) -> None:
    assert read(path) == KV
    assert read(path, wanted(10, 14)) == KV[LAYOUT.page_bytes : 3 * LAYOUT.page_bytes]


def test_the_file_is_safetensors_for_its_owner_alone(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("kv").shape == (4, 3, 2, 2, 2, 4)
        assert file.get_tensor("kv").tobytes() == KV
        assert file.get_tensor("tokens").tolist() == unpack(TOKENS).tolist()
        assert file.metadata()["format"] == "prefixmesh.kv/1"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == read_header(path).file_bytes


def rewrite_header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def rewrite_text(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def set_metadata(name: str, value: str) -> Callable[[Path], None]:
    return lambda path: rewrite_header(path, lambda header: header["__metadata__"].update({name: value}))


def flip(at: int) -> Callable[[Path], None]:
    def corrupt(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    return corrupt


def set_length(value: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(struct.pack("<Q", value) + path.read_bytes()[8:])


def make_sparse(path: Path, blocks: int) -> None:
    """A file whose header agrees with its length, of as many blocks as that says; nothing else is in it."""
    tokens = LAYOUT.block_size * blocks
    run = KvRun(NAMESPACE, 0, pack(list(range(tokens))), tuple(Fingerprint(name) for name in range(blocks)))
    path.unlink()
    kv = bytes(tokens // LAYOUT.page_size * LAYOUT.page_bytes)
    write_run(path.parent, path.name.removesuffix(SUFFIX), run, IDENTITY, [kv])


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


OTHER_LAYOUT = '{"dtype":"float32","num_layers":3,"num_kv_heads":2,"head_dim":8,"page_size":2,"block_size":4}'

CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "shorter than its length": lambda path: path.write_bytes(b"\1\2\3"),
    "cut in its header": lambda path: os.truncate(path, 100),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a huge header": set_length(2**62),
    "a header of nothing": set_length(0),
    "no JSON": flip(8),
    "no metadata": lambda path: rewrite_header(path, lambda header: header.pop("__metadata__")),
    "another format": set_metadata("format", "prefixmesh.kv/2"),
    "no number": set_metadata("start", "eight"),
    "a negative start": set_metadata("start", "-8"),
    "a start within a unit": set_metadata("start", "10"),
    "half a name": set_metadata("fingerprints", "00"),
    "no blocks": set_metadata("fingerprints", ""),
    "no layout": set_metadata("layout", "{}"),
    "a layout of another size": set_metadata("layout", OTHER_LAYOUT),
    "an unknown dtype": set_metadata("layout", OTHER_LAYOUT.replace("float32", "float8")),
    "a layout without pages": set_metadata("layout", OTHER_LAYOUT.replace('"page_size":2', '"page_size":0')),
    "a header without a bottom": lambda path: rewrite_text(path, b'{"x":' + b"[" * 30_000),
    "one tensor less": lambda path: rewrite_header(path, lambda header: header.pop("tokens")),
    "a tensor of another shape": lambda path: rewrite_header(
        path, lambda header: header["kv"].update(shape=[4, 1])
    ),
    "more metadata than we write": set_metadata("script", "x"),
    "a run longer than any": lambda path: make_sparse(path, blocks=9),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a pipe": lambda path: replace(path, os.mkfifo),
    "a folder": lambda path: replace(path, Path.mkdir),
}
"""What a start finds, by the header and the length alone."""

CHANGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit of KV": flip(-100),
    "a flipped bit of a token": flip(-3),
    "another checksum": set_metadata("checksum", "0" * 32),
    "another namespace": set_metadata("namespace", "ff" * 16),
    "another revision": set_metadata("revision", "r2"),
}
"""What only reading the file finds."""


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_file_that_is_not_what_it_says_is_found_out_by_its_header(path: Path, kind: str) -> None:
    CORRUPTIONS[kind](path)
    with pytest.raises(BadFileError):
        read_header(path)
    with pytest.raises(BadFileError):
        read(path)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_that_was_changed_is_found_out_when_it_is_read(path: Path, kind: str) -> None:
    CHANGES[kind](path)
    read_header(path)
    with pytest.raises(BadFileError):
        read(path)


def test_a_sound_file_of_other_tokens_is_not_served(path: Path) -> None:
    """Equal names of different prefixes: what XXH3 cannot exclude."""
    other = bytearray(TOKENS)
    other[0] ^= 1
    with pytest.raises(BadFileError, match="another prefix"):
        read(path, WantedPages(IDENTITY, NAMESPACE, bytes(other), 8))


def test_a_part_that_the_file_does_not_have_is_a_missing_file_and_no_bad_one(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(path, wanted(4, 12))


def test_every_corruption_is_put_away_at_start_and_the_rest_is_served(tmp_path: Path) -> None:
    for number, corrupt in enumerate(CORRUPTIONS.values()):
        write_run(tmp_path, f"bad{number}", make_run(), IDENTITY, [KV])
        corrupt(tmp_path / f"bad{number}{SUFFIX}")
    write_run(tmp_path, "good", make_run(), IDENTITY, [KV])
    stock = take_stock(tmp_path, IDENTITY, 2**20)
    assert stock.bad_files == len(CORRUPTIONS)
    assert stock.files.stored_tokens == 8
    assert len(list(tmp_path.glob("*.bad"))) == len(CORRUPTIONS)
    assert take_stock(tmp_path, IDENTITY, 2**20).bad_files == 0  # each is told of once


def test_a_file_that_turned_bad_twice_is_one_that_was_put_away(tmp_path: Path) -> None:
    """It was put away, written again, and is bad again when a worker starts."""
    for junk in (b"first", b"second, longer"):
        write_run(tmp_path, "run", make_run(), IDENTITY, [KV])
        (tmp_path / f"run{SUFFIX}").write_bytes(junk)
        stock = take_stock(tmp_path, IDENTITY, 2**20)
    assert stock.bad_files == 1
    assert len(stock.files) == 1
    assert stock.files.total_bytes == len(b"second, longer")


def test_another_models_file_is_refused_before_memory_is_found_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a header asks for may be as long as the file says it is: a file with a hole in it says anything."""
    monkeypatch.setattr(disk_files, "_read_into", lambda *_: pytest.fail("it was read"))
    for change in (set_metadata("revision", "r2"), set_metadata("namespace", "ff" * 16)):
        change(path)
        with pytest.raises(BadFileError, match="another prefix"):
            read(path, wanted(10, 14))


def test_other_models_files_are_kept_within_the_bound_and_go_before_newer_ones(tmp_path: Path) -> None:
    other = DiskIdentity(revision="r2", layout=LAYOUT)
    size = write_run(tmp_path, "old", make_run(), other, [KV])
    os.utime(tmp_path / f"old{SUFFIX}", ns=(1, 1))
    write_run(tmp_path, "mine", make_run(), IDENTITY, [KV])
    stock = take_stock(tmp_path, IDENTITY, 2 * size)
    assert (stock.foreign_files, stock.files.stored_tokens, len(stock.files)) == (1, 8, 2)
    assert take_stock(tmp_path, IDENTITY, 2 * size - 1).files.stored_tokens == 8
    assert not (tmp_path / f"old{SUFFIX}").exists()


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors", LOCK_FILE):
        (tmp_path / name).write_bytes(b"mine")
    assert len(take_stock(tmp_path, IDENTITY, 1).files) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "model.safetensors", LOCK_FILE}


def test_a_file_put_away_twice_or_gone_is_no_error(path: Path) -> None:
    away = put_away(path)
    assert away.exists()
    put_away(path)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_run(tmp_path, "run", make_run(), IDENTITY, [KV])
    assert list(tmp_path.iterdir()) == []


KILLED_WRITER = """
import os, sys
from pathlib import Path
import msgspec
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.tokens import pack
from prefixmesh.worker.tiers import disk_files
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvRun

where, folder, identity = sys.argv[1], Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=DiskIdentity)
namespace, tokens = bytes(range(16)), pack(list(range(100, 116)))
run = KvRun(namespace, 8, tokens, tuple(block_fingerprints(namespace, tokens, 4)[2:]))
kv = bytes(i % 251 for i in range(4 * identity.layout.page_bytes))

def hang(*_):
    print("here", flush=True)
    sys.stdin.read()

class HalfWritten:
    def __init__(self, descriptor, mode):
        self.file = open(descriptor, mode, buffering=0)
        self.write = self.file.write
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()
    def flush(self):
        self.file.truncate(1000)
        hang()

if where == "half written":
    os.fdopen = HalfWritten
elif where == "not renamed":
    Path.rename = hang
else:
    disk_files._sync_folder = hang
disk_files.write_run(folder, "run", run, identity, [kv])
"""


@pytest.mark.parametrize("where", ["half written", "not renamed", "renamed"])
def test_a_writer_that_is_killed_leaves_nothing_half_and_the_prefix_can_be_stored_again(
    tmp_path: Path, where: str
) -> None:
    """F32: ``kill -9`` at each point of a write."""
    command = [
        sys.executable,
        "-c",
        KILLED_WRITER,
        where,
        str(tmp_path),
        msgspec.json.encode(IDENTITY).decode(),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL
    drafts = list(tmp_path.glob(f".*{DRAFT_SUFFIX}"))
    assert len(drafts) == (where != "renamed")
    stock = take_stock(tmp_path, IDENTITY, 2**20)
    assert stock.bad_files == 0
    assert stock.files.stored_tokens == (8 if where == "renamed" else 0)
    assert not list(tmp_path.glob(f".*{DRAFT_SUFFIX}"))
    write_run(tmp_path, "run", make_run(), IDENTITY, [KV])
    assert read(tmp_path / f"run{SUFFIX}") == KV


HOLDER = """
import sys
from pathlib import Path
from prefixmesh.worker.tiers.disk_folder import lock_folder
lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_first_ones_name_and_let_in_when_that_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kv" / "worker-0"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"disk_cache_dir is in use by process {child.pid}"):
            lock_folder(folder)
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT_S)
    os.close(lock_folder(folder))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_a_link_leaves_alone_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("mine")
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / LOCK_FILE).symlink_to(tmp_path / "letters")
    with pytest.raises(ConfigError, match="disk_cache_dir cannot be used"):
        lock_folder(folder)
    assert (tmp_path / "letters").read_text() == "mine"


def test_a_folder_that_cannot_be_used_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_cache_dir cannot be used"):
        lock_folder(tmp_path / "file")
