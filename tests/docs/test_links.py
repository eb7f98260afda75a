"""Links between the README, CONTRIBUTING and the pages lead somewhere, on GitHub as in Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text("utf-8"))


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    titles = (title.strip().lower() for title in HEADING.findall(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for image, text, target in LINK.findall(_prose(page)):
        assert text.strip(), f"{target}: no text"
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target
        assert not image or there.suffix in (".png", ".svg"), target
        # MyST joins the lines of an alternative text without a space.
        assert not image or page.parent == ROOT or "\n" not in text, target


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != ROOT], ids=_name)
def test_pages_link_within_the_site(page: Path) -> None:
    """A page that leads out of ``docs`` would lead nowhere on the site."""
    for _, _, target in LINK.findall(_prose(page)):
        if not re.match(r"https?://|#", target):
            there = (page.parent / target.partition("#")[0]).resolve()
            assert (ROOT / "docs") in there.parents, target
