"""Holds every measured figure of the pages, and of docstrings and comments, to the record that it comes from.

The claims of a page stand in a file of docs/figures, below the headings of the page that they belong to, so that the source
of a page reads like the page:

    ## One step
    in h200-step-124m-one-micro-step
    615,860 tok/s = figures.handgrad.tokens_per_second
    1.179 times = figures.handgrad.tokens_per_second / figures.twin-cudnn.tokens_per_second

A section reaches up to the next heading. A line `in NAME` names a file of benchmarks/results, for the lines below it, and
`NAME:path` reads another once. A line `figures = expression` holds one or more figures, in the order of the text. An
expression is paths and numbers joined by ` + `, ` - `, ` * `, ` / ` from left to right, with parentheses. A path walks
keys (`"quoted*"` may be cut short by a star), `[0]`, `[1:]`, `[*]` for every element, `[key=value]` for those elements
and `{a, b}` for one key after the other; several values are as many as the figures of the line, or `mean`, `median`,
`min`, `max` or `sum` stands before them. The name of a field gives its unit; ` in UNIT` at the end converts to it, or
says it where no name does. A figure is its record's, rounded to the last printed digit.

Words are figures as well: "nine times" (to the nearest), "a seventh", "two of five", "half a percent" (to a tenth of
themselves), and a cell that says yes or no, which is a record's true or false.

A figure with a measured unit, a ratio in words, one behind "about", a cell of yes or no or a line of a run's log is an
error that no claim names, that stands in no line made from the records (`tests/figure_tables.py`) and that is no
exception (`tests/figure_exceptions.py`, with its reason). Numbers without a unit, "half" and "twice" are held where a
claim names them.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.figure_values import ROOT, UNITS, Figure, Wrong, evaluate, expanded, figures_in, size

HEADED = re.compile(
    r"(?<![\w/])(tok/s|tokens/s|[TG]B/s|TFLOP/s|[GM]i?B|MHz|mJ|W|ms|µs|MFU|reserved)(?![\w-])"
)  # a measured column
LOGGED = re.compile(
    r"^step +\d+(/\d+ \||: validation loss| *, the model writes).*$", re.MULTILINE
)  # also in a block of code
ABOUT = re.compile(r"\b(about|around|nearly|almost|roughly)\s+$")
HIDDEN = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
    re.compile(r"\$\$.+?\$\$", re.DOTALL),
    re.compile(r"`[^`]*`|\$[^$]+\$|(?<=\])\([^)]*\)"),
)


@dataclass(frozen=True)
class Claim:
    """A line of claims: figures and the expression that they come from."""

    record: str
    text: str
    figures: list[Figure]
    expression: str


def blank(text: str, pattern: re.Pattern) -> str:
    """Replaces what matches by spaces, so that the rest stays where it is."""
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def visible(page: str) -> str:
    """The page without comments, code, mathematics and addresses of links."""
    for pattern in HIDDEN:
        page = blank(page, pattern)
    return page


def claims_of(page: str) -> Path:
    """The file with the claims of a page, which need not exist."""
    path = Path(page)
    path = path.relative_to("docs") if path.parts[0] == "docs" else "root" / path
    return ROOT / "docs/figures" / path.with_suffix(".txt")


def sections(claims: str) -> Iterator[tuple[str, list[Claim]]]:
    """Each heading of a file of claims, empty for lines before the first, with its claims."""
    heading, record, lines = "", "", []
    for line in claims.splitlines():
        if line.startswith("#"):
            yield heading, lines
            heading, record, lines = line, "", []
        elif match := re.fullmatch(r"in (\S+)", line):
            record = match[1]
        elif line:
            text, _, expression = line.partition(" = ")
            cells = f"| {text.replace(' ', ' | ')} |" if set(text.split()) <= {"yes", "no"} else text
            lines.append(Claim(record, text, figures_in(cells), expression))
    yield heading, lines


def wrong_values(claim: Claim, records: dict[str, Any]) -> Iterator[str]:
    """Figures of a claim that are not their record's."""
    try:
        parts = [evaluate(part, claim.record, records) for part in expanded(claim.expression)]
    except Wrong as error:
        yield f"{error} ({claim.expression})"
        return
    found = [(value, part.unit) for part in parts for value in part.values]
    if len(found) != len(claim.figures):
        yield f"{len(claim.figures)} figures for {len(found)} values: {claim.expression}"
        return
    for figure, (value, unit) in zip(claim.figures, found, strict=True):
        factor = 1.0
        if figure.unit:
            if unit is None or UNITS[unit or "x"][0] != UNITS[figure.unit][0]:
                yield f"{figure.text}: the record's unit is {unit or 'unknown or a ratio'} ({claim.expression})"
                continue
            factor = size(unit) / size(figure.unit)
        if not figure.prints(value * factor):
            yield (
                f"{figure.text}: {claim.record} has {value * factor:.6g} {figure.unit}".rstrip() + f" ({claim.expression})"
            )


def matched(figures: list[Figure], claims: list[Claim]) -> tuple[set[int], list[str]]:
    """Finds the claims' figures among those of a text, in order. The places found, and errors."""
    places, errors, position = set(), [], 0
    for claim in claims:
        if not claim.figures or " ".join(figure.text for figure in claim.figures) != claim.text:
            errors.append(f"no figures, or something else beside them: {claim.text} = {claim.expression}")
        for wanted in claim.figures:
            at = next((i for i in range(position, len(figures)) if figures[i].text == wanted.text), None)
            if at is None:
                errors.append(f"{wanted.text} ({claim.expression}): not in the text above, or not in this order")
            else:
                places.add(figures[at].start)
                position = at + 1
    return places, errors


def columns(text: str) -> set[int]:
    """The beginnings and ends of the cells in columns whose heading has a measured unit: the places of their numbers."""
    places, headings, offset = set(), [], 0
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            headings = []
        else:
            cells = list(re.finditer(r"[^|]+", line))
            if not headings:
                headings = [bool(HEADED.search(cell[0])) for cell in cells]
            else:
                for cell, measured in zip(cells, headings, strict=False):
                    if measured:
                        places |= {offset + cell.start() + figure.start for figure in figures_in(cell[0])}
        offset += len(lines[number]) + 1
    return places


@dataclass(frozen=True)
class Checked:
    """The result for a page: errors, and the figures that a claim or a line made from records holds."""

    errors: list[str]
    held: list[Figure]


def without(text: str, phrases: list[str]) -> tuple[str, list[str]]:
    """The text with these phrases blanked, and those that it does not have. A phrase may go on in the next line."""
    missing = []
    for phrase in phrases:
        pattern = re.compile(
            r"(?<![\w.,-])" + r"\s+".join(re.escape(word) for word in phrase.split()) + r"(?![\w%]|[.,]\d)"
        )
        if not pattern.search(text):
            missing.append(phrase)
        text = blank(text, pattern)
    return text, missing


def check_page(
    page: str, claims: str, records: dict[str, Any], made: list[str] | None = None, exceptions: list[str] | None = None
) -> Checked:
    """Holds the text of a page to the records; `made` are its lines made from them, which stand there word by word."""
    lines = page.split("\n")
    errors = [
        f"the records make this line, and the page does not have it: {line}" for line in made or () if line not in lines
    ]
    errors += [f"no record has this line of a log: {m[0]}" for m in LOGGED.finditer(page) if m[0] not in (made or ())]
    held, text, offset = [], visible(page), 0
    for line in lines:
        if line in (made or ()):
            held += [
                Figure(f.text, offset + f.start, offset + f.end, f.sign, f.digits, f.suffix, f.unit)
                for f in figures_in(line)
            ]
            text = text[:offset] + " " * len(line) + text[offset + len(line) :]
        offset += len(line) + 1
    text, missing = without(text, exceptions or [])
    errors += [f"an exception that the page does not have (any more): {phrase}" for phrase in missing]
    found, named, start = figures_in(text), set(), 0
    for heading, section in sections(claims):
        match = re.compile(rf"^{re.escape(heading)}$", re.MULTILINE).search(text if heading else "", start)
        if heading and match is None:
            errors.append(f"the page has no such heading (any more), or not in this order: {heading}")
            continue
        start = match.start() if match else 0
        end = re.compile(r"^#+ ", re.MULTILINE).search(text, match.end()) if match else None
        inside = [figure for figure in found if start <= figure.start < (end.start() if end else len(text))]
        places, unmatched = matched(inside, section)
        errors += unmatched
        errors += [error for claim in section for error in wrong_values(claim, records)]
        named |= places
    measured = columns(text) | {
        f.start for f in found if f.is_measured or ABOUT.search(text[max(0, f.start - 12) : f.start])
    }
    for figure in found:
        if figure.start in named:
            held.append(figure)
        elif figure.start in measured:
            line = page.count("\n", 0, figure.start)
            errors.append(f"line {line + 1}: no record is named for {figure.text.strip()}: {lines[line].strip()}")
    return Checked(errors, held)


def prose_of(path: Path) -> str:
    """The docstrings and comments of a Python file, a line each where they stand."""
    source = path.read_text()
    lines = [""] * (source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                end = first.end_lineno or first.lineno
                lines[first.lineno - 1 : end] = source.split("\n")[first.lineno - 1 : end]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = " " * token.start[1] + token.string.lstrip("#")
    return "\n".join(lines)


def commit_errors(records: dict[str, Any], history: bool, exceptions: dict[str, str]) -> list[str]:
    """Records whose commit is no hexadecimal number of 7 to 40 digits or, with `history`, is not in this repository."""
    errors = []
    for name, record in records.items():
        if name in exceptions:
            continue
        if record.get("uncommitted_changes"):
            errors.append(f"{name}: its code had uncommitted changes")
        for key in ("commit", "old_commit"):
            if key == "old_commit" and key not in record:
                continue
            commit = str(record.get(key))
            if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
                errors.append(f"{name}: {key} is {commit}, which names no commit")
            elif history and not exists(commit):
                errors.append(f"{name}: {key} {commit} is not in the history")
    return errors


def exists(commit: str) -> bool:
    """True if HEAD grew from this commit: a branch that is gone may have left others behind."""
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def has_history() -> bool:
    """True if all commits are here: not in a tarball, not in a shallow clone."""
    command = ["git", "rev-parse", "--is-shallow-repository"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (ROOT / ".git").exists() and run.stdout.strip() == "false"
