"""The docs: what they link to is there, and their pictures are small, used, and fetch nothing."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PICTURES: Final = sorted((ROOT / "docs" / "img").iterdir())

MOST_BYTES: Final = 150_000
"""Of a picture: a page with a handful of them is read on a telephone, too."""


def headings(text: str) -> set[str]:
    """As links name them: small letters, no punctuation, a dash for each space."""
    titles = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """To files of this repository and to places in them."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in links(page):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in headings(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_small_used_and_fetch_nothing(picture: Path) -> None:
    assert picture.stat().st_size <= MOST_BYTES
    assert any(f"img/{picture.name}" in link for page in PAGES for link in links(page))
    addresses = set(re.findall(r'https?://[^"<\s]*', picture.read_text(encoding="utf-8")))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_links_that_lead_nowhere_are_seen() -> None:
    assert headings("# One: two, `three`\n```\n# none\n```\n## Four & 5\n") == {"one-two-three", "four--5"}
