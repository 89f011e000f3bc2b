"""What is shipped: the wheel and the sdist hold everything that a user or a packager needs, and nothing is lost through the links."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("router", "worker", "cache")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built from the sdist, as an installer from source would build it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return out


def _tracked(*folders: str) -> set[str]:
    """Files git tracks below ``folders``; every file there when this is no checkout (an unpacked sdist)."""
    listing = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode == 0 and listing.stdout:
        return {name for name in listing.stdout.splitlines() if (ROOT / name).exists()}
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_wheel_holds_the_whole_package(built: Path) -> None:
    """Every tracked file of the package is in the wheel, built from the sdist."""
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert _tracked("prefixmesh") <= names
    assert "prefixmesh/py.typed" in names


@pytest.mark.slow
def test_sdist_holds_what_a_packager_needs(built: Path) -> None:
    """Every tracked file is in the sdist but the three links, which archives do not carry (see the ADR on the layout)."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert _tracked(".") - set(LINKS) <= names


def test_links_name_the_rooms_of_the_package() -> None:
    """The top-level router, worker and cache are relative links into the package."""
    for room in LINKS:
        link = ROOT / room
        if not link.is_symlink():
            pytest.skip("unpacked from an archive that does not carry links")
        assert str(link.readlink()) == f"prefixmesh/{room}"
        assert (link / "__init__.py").samefile(ROOT / "prefixmesh" / room / "__init__.py")
