"""Links of the pages, and the site that `make docs` builds of them, as CI has it do before the tests."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.screenshots import PART_WIDTH

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`|<!--.*?-->", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")
SITE = ROOT / "site"
# Attributes of tags that a browser loads by itself, with an address on another host.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//[^"]*"|<link[^>]*\shref="(?:https?:)?//[^"]*\""""
)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M):
        anchor = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).lower()).replace(" ", "-")
        times = found[anchor] = found.get(anchor, -1) + 1
        found |= {f"{anchor}-{times}": 0} if times else {}
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading that it has."""
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"links to {target}#{anchor}, a heading that is not there"


def test_the_pictures_of_the_readme_are_light() -> None:
    """One recipe of the Makefile makes both."""
    recipe = (ROOT / "Makefile").read_text().split("\npictures:")[1].split("\n\n")[0]
    for name, width in (("report", PART_WIDTH), ("terminal", 1019)):
        picture = ROOT / "docs" / f"{name}.png"
        assert f"--out docs/{name}.png" in recipe and f"(docs/{name}.png)" in (ROOT / "README.md").read_text()
        with Image.open(picture) as opened:
            assert opened.width == width and picture.stat().st_size < 200_000


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """The text of each page of the site."""
    if not (SITE / "index.html").exists():
        pytest.skip("no site: make docs makes it")
    return {str(page.relative_to(SITE)): page.read_text() for page in SITE.rglob("*.html")}


def test_the_site_has_every_page(site: dict[str, str]) -> None:
    """The README is its front page; the chapters' list and the changelog have pages of their own."""
    sources = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages = {re.sub(r"/README\.html$", "/index.html", source) for source in sources - {"README.html"}}
    assert {*pages, "index.html", "chapters.html", "changelog.html"} <= set(site)
    assert "Two commands" in site["index.html"]


def test_a_page_of_the_site_loads_nothing_from_elsewhere(site: dict[str, str]) -> None:
    for name, text in site.items():
        found = LOADED.search(text)
        assert not found, f"{name}: {found[0] if found else ''}"


def test_the_site_shows_mathematics(site: dict[str, str]) -> None:
    for name, text in site.items():
        assert 'class="arithmatex"' not in text, name
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert "\\" not in formula, f"{name}: {formula}"
    for page in (ROOT / "docs" / "operations").glob("[a-z]*.md"):
        formulas = page.read_text().count("$$") // 2
        assert site[f"operations/{page.stem}.html"].count('display="block"') == formulas, page.name
