"""FlashInfer's Python side in a folder of its own, for tests that only look at its signatures. None of it runs without a GPU.

The packages are installed without their dependencies (gigabytes of CUDA) into a cache folder, and go before nothing: a test puts
the folder on the path of a process that it starts, so the environment of the tests stays as it is.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("0.6.0", "0.7.4")
"""The first one of the range that the extra ``gpu`` names, and the newest that was looked at."""

BESIDE = ("apache-tvm-ffi<0.2", "einops", "ninja", "tabulate", "nvidia-ml-py", "cuda-python")
"""What it imports at once and the tests' environment lacks."""

INSTALL_TIMEOUT_S = 240
UNUSED = "flashinfer/data"
"""Sources of kernels, 450 MB of them in 0.7.4."""


class NotInstallableError(Exception):
    """No package registry can be reached, or it lacks the packages; with the installer's words."""


def flashinfer_folder(version: str) -> Path:
    """The folder that holds ``version``, made when missing: up to 100 MB to download, 280 MB to keep, some ten seconds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefixmesh-tests"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"flashinfer-{version}-python{python}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as building:
        fresh = Path(building) / "packages"
        _install([f"flashinfer-python=={version}", *BESIDE], fresh)
        shutil.rmtree(fresh / UNUSED, ignore_errors=True)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run was quicker
                raise
    return folder


def _install(packages: list[str], folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
    ]
    try:
        subprocess.run(
            [*command, "--target", str(folder), *packages],
            capture_output=True, text=True, check=True, timeout=INSTALL_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise NotInstallableError(error.stderr.strip()[-400:]) from error
    except subprocess.TimeoutExpired as error:
        raise NotInstallableError(f"pip took more than {INSTALL_TIMEOUT_S} s") from error
