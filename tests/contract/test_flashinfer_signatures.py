"""Every call that the ``flashinfer`` backend makes fits the library's own signatures, at both ends of the range that we allow.

Needs the library's Python files, which are fetched into a folder of their own, and no GPU. Without a package registry it skips.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.flashinfer_binding import WRAPPERS
from tests.support.flashinfer_environment import VERSIONS, NotInstallableError, flashinfer_folder

REPOSITORY = Path(__file__).parents[2]

GRAPH_MODE = (
    "use_cuda_graph",
    "use_tensor_cores",
    "paged_kv_indptr_buffer",
    "paged_kv_indices_buffer",
    "paged_kv_last_page_len_buffer",
    "backend",
)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_our_calls_bind_to_the_real_signatures(version: str, tmp_path: Path) -> None:
    """Constructor, plan and run of the three wrappers, and of decoding in the library's CUDA graph mode."""
    try:
        folder = flashinfer_folder(version)
    except NotInstallableError as error:
        pytest.skip(f"flashinfer-python {version} cannot be fetched here: {error}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.flashinfer_binding"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(folder), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["version"] == version
    bound = {(name, method) for name, method, _ in report["bound"]}
    assert bound == {(name, method) for name in WRAPPERS for method in ("__init__", "plan", "run")}
    decode = [
        keywords for name, method, keywords in report["bound"] if (name, method) == (WRAPPERS[1], "__init__")
    ]
    assert sorted(map(len, decode)) == [1, len(GRAPH_MODE)]
    assert set(GRAPH_MODE) in map(set, decode)


def test_the_versions_looked_at_are_those_allowed() -> None:
    """The first one of the range, and one that is not beyond it."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (each for each in map(Requirement, extras["gpu"]) if each.name == "flashinfer-python")
    assert all(version in wanted.specifier for version in VERSIONS)
    assert f">={VERSIONS[0].removesuffix('.0')}" in str(wanted.specifier)
