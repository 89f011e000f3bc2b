"""What a light import must not bring along: checked in a fresh interpreter, as a user's program would be."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers")


def modules_after(statement: str) -> set[str]:
    """Top-level packages in ``sys.modules`` after running ``statement`` in a new interpreter."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "module",
    ["prefixmesh.router.server", "prefixmesh.client", "prefixmesh.cli.main", "prefixmesh.fleet_state"],
)
def test_torch_and_ray_stay_out(module: str) -> None:
    """The base installation has neither, and a program that only calls a fleet must not pay for them."""
    assert not modules_after(f"import {module}") & set(HEAVY)


def test_command_line_imports_no_grpc_before_a_command_runs() -> None:
    """``prefixmesh --help`` and shell completion stay fast."""
    assert not modules_after("import prefixmesh.cli.main") & {
        "grpc",
        "google",
        "numpy",
        "jinja2",
        "tokenizers",
    }


def test_help_runs_as_a_program() -> None:
    """``--help`` lists the commands, and neither torch nor Ray is loaded for it."""
    code = "import sys; from prefixmesh.cli.main import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "generate  Answer one prompt." in done.stdout
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(HEAVY)
