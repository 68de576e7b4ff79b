"""Hooks of MkDocs, which make the site from the pages as they stand in the repository.

The README becomes the front page and the changelog a page. A link that leaves the site leads to the repository, a picture
outside of docs/ comes along, comments go, and mathematics becomes MathML, which a browser shows without a script. Its font
comes along as well: few systems have one whose brackets and sums grow with the formula.
"""

import html
import posixpath
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
# Files of the repository by their place in the site; other pages of docs/ keep theirs.
PLACES = {"README.md": "index.md", "docs/README.md": "chapters.md", "CHANGELOG.md": "changelog.md"}
SOURCES = {place: source for source, place in PLACES.items()}
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
(ZIAMATH,) = find_spec("ziamath").submodule_search_locations  # not imported: only its font is used
FONT = Path(ZIAMATH) / "fonts" / "STIXTwoMath-Regular.ttf"  # SIL Open Font License
WIDTHS = {"76.25em": "62.5em", "76.234375em": "62.484375em", "1220px": "1000px"}
MATHEMATICS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # Not as `repo_url`: the theme's script would ask GitHub for the number of stars.
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": REPOSITORY, "name": "The repository"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    if (chapters := files.get_file_from_path("README.md")) is not None:
        files.remove(chapters)
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, FONT.name, abs_src_path=str(FONT)))
    for picture in (ROOT / "benchmarks" / "results").glob("*.png"):
        files.append(File.generated(config, place_of(relative(picture)), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(COMMENT.sub("", markdown))  # every second part is code
    parts[::2] = [LINK.sub(lambda link: moved(link, source), part) for part in parts[::2]]
    return "".join(parts)


def moved(link: re.Match[str], source: str) -> str:
    """A link of the file `source`, as it must be in the site."""
    target = link["target"]
    if re.match(r"https?:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {target}, which is not there")
    place = place_of(path)
    if place:
        target = posixpath.relpath(place, posixpath.dirname(place_of(source)) or ".")
    else:
        target = f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
    return f"{link['picture']}[{link['text']}]({target}{link['anchor'] or ''})"


def place_of(path: str) -> str:
    """The place in the site of a file of the repository; "" if it has none."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("benchmarks/results/") and path.endswith(".png"):
        return posixpath.join("pictures", posixpath.basename(path))
    if path.startswith("docs/") and path.endswith((".md", ".png")):
        return path.removeprefix("docs/")
    return ""


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return MATHEMATICS.sub(lambda found: mathml(html.unescape(found[2]), found[1] == "div"), content)


def on_post_build(config: MkDocsConfig) -> None:
    """The theme shows the chapters beside the text from 1,220 px on; here from 1,000 px on."""
    assets = Path(config.site_dir) / "assets"
    for path in (*assets.glob("stylesheets/*.css"), *assets.glob("javascripts/bundle.*.js")):
        text = path.read_text(encoding="utf-8")
        for old, new in WIDTHS.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def mathml(tex: str, is_block: bool) -> str:
    return convert(tex.strip(), display="block" if is_block else "inline")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
