"""Phrases that read as translated stay out of the package's docstrings, comments and messages, and out of the pages."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Files that ship inside an exported model; the sentences of the built-in corpus.
LEFT_OUT = ("handgrad/interop/transformers_code/", "handgrad/data/stories.py")

PHRASES = ("that of", "those that", "those of", "whoever", "in the place of", "nobody", "of which alone")
OPENINGS = ("Of", "In which", "That", "Those", "Beside", "What", "Whether", "Where", "How", "Which", "Who")  # of docstrings

STAND_INS = ("found", "given", "kept", "made", "mine")  # names that say how a value came, not what it is

PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b".replace(" ", r"\s+"), re.IGNORECASE)
FENCED = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(rf"({'|'.join(OPENINGS)})\s")


def comments(source: str) -> list[tuple[int, str]]:
    """(line, text) of each comment; comment lines that follow one another are one text, as a phrase may be wrapped."""
    texts: list[tuple[int, str]] = []
    whole_line_before = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        whole_line = token.line.lstrip().startswith("#")
        if whole_line and whole_line_before == line - 1:
            first, before = texts.pop()
            texts.append((first, f"{before} {text}"))
        else:
            texts.append((line, text))
        whole_line_before = line if whole_line else -1
    return texts


def misses(source: str) -> list[str]:
    """`line: phrase` for each phrase in a comment or string, and each opening of a docstring."""
    tree = ast.parse(source)
    strings = [(n.lineno, n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    bad = [(line, match.group()) for line, text in strings + comments(source) for match in PHRASE.finditer(text)]
    documented = (
        n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for node in documented:
        if opening := OPENING.match(ast.get_docstring(node) or ""):
            bad.append((node.body[0].lineno, f'"""{opening.group()}'))
    return [f"{line}: {' '.join(phrase.split())}" for line, phrase in sorted(bad)]


@pytest.mark.nightly  # of style: nothing that the package promises rests on it
def test_no_phrase_of_the_package_reads_as_translated() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "handgrad").rglob("*.py"))}
    bad = [
        f"{name}:{miss}"
        for name, path in files.items()
        if not name.startswith(LEFT_OUT)
        for miss in misses(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "name the thing instead:\n" + "\n".join(bad)


def stand_ins(source: str) -> list[str]:
    """`line: name` for each variable and parameter whose name is no noun for what it holds."""
    tree = ast.parse(source)
    names = [(n.lineno, n.id) for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    names += [(n.lineno, n.arg) for n in ast.walk(tree) if isinstance(n, ast.arg)]
    return [f"{line}: {name}" for line, name in sorted(names) if name in STAND_INS]


def test_a_variable_is_the_noun_that_it_holds() -> None:
    files = sorted((ROOT / "handgrad").rglob("*.py"))
    bad = [f"{path.relative_to(ROOT)}:{miss}" for path in files for miss in stand_ins(path.read_text(encoding="utf-8"))]
    assert not bad, "name what it holds instead:\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "source", ["found = 1", "def f(given): ...", "for kept in x: ...", "f = lambda made: 1", "(mine := 2)"]
)
def test_a_planted_stand_in_is_caught(source: str) -> None:
    assert len(stand_ins(source)) == 1 and not stand_ins("x.found = y.given + kept(made=mine)")


def test_no_phrase_of_the_pages_reads_as_translated() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "climb").rglob("*.md")]
    bad = [
        f"{page.relative_to(ROOT)}: {match[0]!r}"
        for page in sorted(pages)
        for match in PHRASE.finditer(FENCED.sub("", page.read_text()))
    ]
    assert len(pages) > 50 and not bad, "name the thing instead:\n" + "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    [
        '"""Takes that\n    of the first rank."""',
        'def f():\n    """Where it lies."""',
        'class C:\n    """Of a launch."""',
        "x = 1  # Nobody reads it",
        "# the sizes, and those\n# of the last step",
        'raise ValueError("expected " "those that train")',
        'raise ValueError(f"{x} in the place of {y}")',
    ],
)
def test_a_planted_phrase_is_caught(source: str) -> None:
    assert len(misses(source)) == 1


def test_words_inside_other_words_pass() -> None:
    assert misses('"""Offsets of rows. Whereas that offset, those offers."""\nx = 1  # nobodyish\ny = "Of"') == []
