"""Every measured figure of the pages is its record's; and a forged one is found (`tests/figures.py` says how)."""

import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import speed
from tests import conftest
from tests.figure_exceptions import COMMITS, NOT_YET, PAGES
from tests.figure_tables import ARITHMETIC, made
from tests.figure_values import RECORDS, ROOT, Figure
from tests.figures import Checked, blank, check_page, claims_of, commit_errors, has_history, prose_of, sections
from tests.figures_in_code import CLAIMS, EXCEPTIONS

ALL = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"))
)
HELD = [page for page in ALL if page not in NOT_YET]
made_lines = functools.cache(made)  # half a second: not in every process that collects this file


def claims(page: str) -> str:
    return path.read_text() if (path := claims_of(page)).exists() else ""


def check(page: str, text: str | None = None, records: dict | None = None, claimed: str | None = None) -> Checked:
    """The page, or another text in its stead, with its claims, or others."""
    text = blank((ROOT / page).read_text() if text is None else text, ARITHMETIC)
    claimed = claims(page) if claimed is None else claimed
    records = RECORDS if records is None else records
    return check_page(text, claimed, records, made_lines().get(page), list(PAGES.get(page, {})))


@pytest.mark.parametrize("page", HELD)
def test_every_measured_figure_is_its_records(page: str) -> None:
    errors = check(page).errors
    assert not errors, "\n".join([page, *errors])


def test_pages_not_yet_held_exist_and_are_not() -> None:
    """A page that passes leaves the list."""
    for page in NOT_YET:
        assert check(page).errors, f"{page} passes: take it from NOT_YET"
    assert set(PAGES) <= set(ALL)


def check_code(path: str, claims: str) -> list[str]:
    """The docstrings and comments of a file, held to its claims."""
    return check_page(prose_of(ROOT / path), claims, RECORDS, exceptions=list(EXCEPTIONS.get(path, {}))).errors


def test_every_measured_figure_of_the_code_is_its_records() -> None:
    files = sorted(
        str(path.relative_to(ROOT))
        for folder in ("handgrad", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    errors = {path: found for path in files if (found := check_code(path, CLAIMS.get(path, "")))}
    assert not errors, "\n".join(f"{path}: {error}" for path, found in errors.items() for error in found)
    assert {*CLAIMS, *EXCEPTIONS} <= set(files), "a file is gone"


def test_a_forged_figure_of_the_code_is_found() -> None:
    """Every figure of its claims, one up in the text that they quote, or in their own text."""
    random_ = random.Random(5)
    for path, claims in CLAIMS.items():
        lines = claims.split("\n")
        for number, line in enumerate(lines):
            figure, equals, expression = line.partition(" = ")
            if equals:
                forgery = one_more if re.search(r"\d", figure) else other_word
                changed = [*lines[:number], f"{forgery(figure, random_)} = {expression}", *lines[number + 1 :]]
                assert check_code(path, "\n".join(changed)), f"{path}: {figure}"


def test_every_record_names_a_commit() -> None:
    errors = commit_errors(RECORDS, history=False, exceptions=COMMITS)
    assert not errors, "\n".join(errors)
    for name in COMMITS:
        assert commit_errors({name: RECORDS[name]}, has_history(), {}) or not has_history(), f"{name} needs no exception"


def test_the_commits_are_in_the_history() -> None:
    if not has_history():
        pytest.skip("no history here (a tarball or a shallow clone): the commits cannot be looked up")
    errors = commit_errors(RECORDS, history=True, exceptions=COMMITS)
    assert not errors, "\n".join(errors)


def other_digit(text: str, random_: random.Random) -> str:
    """One digit changed, so that the number is another."""
    places = [place for place, character in enumerate(text) if character.isdigit()]
    place = random_.choice(places)
    return text[:place] + str((int(text[place]) + random_.randint(1, 9)) % 10) + text[place + 1 :]


def other_unit(text: str, random_: random.Random) -> str:
    """k for M, m for µ and so on; a number without a unit becomes thousands."""
    swaps = [
        ("k", "M"),
        ("M", "k"),
        ("ms", "s"),
        ("µs", "ms"),
        ("%", "x"),
        ("x", "%"),
        ("TB", "GB"),
        ("GB", "MB"),
        ("mJ", "J"),
    ]
    for old, new in swaps:
        if re.search(rf"\d ?{old}", text):
            return re.sub(rf"(\d ?){old}", rf"\g<1>{new}", text, count=1)
    return re.sub(r"(\d)(?!.*\d)", r"\1k", text)


def one_more(text: str, random_: random.Random) -> str:
    """The last printed digit one up, with carry."""
    match = re.search(r"[\d.,]*\d", text)
    assert match
    digits = str(int(re.sub(r"\D", "", match[0])) + 1).rjust(len(re.sub(r"\D", "", match[0])), "0")
    kept, changed = iter(digits[-len(re.sub(r"\D", "", match[0])) :]), ""
    for character in match[0]:
        changed += next(kept) if character.isdigit() else character
    return text[: match.start()] + changed + text[match.end() :]


def other_sign(text: str, random_: random.Random) -> str:
    return text.replace("-", "+") if text.startswith("-") else f"-{text.removeprefix('+')}"


def other_word(text: str, random_: random.Random) -> str:
    """A cell's other answer, the next larger number, or half as many parts."""
    swaps = {"yes": "no", "no": "yes", "half": "a third", "twice": "three times"}
    swaps |= {"two": "three", "three": "four", "six": "seven", "nine": "ten", "eleven": "twelve", "a": "two", "an": "two"}
    first = text.split()[0]
    return swaps[first.lower()] + text[len(first) :]


DIGITS_FORGED: list[Callable[[str, random.Random], str]] = [other_digit, other_unit, one_more, other_sign]


def forged(page: str, figure: Figure, forgery: Callable, random_: random.Random) -> Iterator[tuple[str, str]]:
    """The page with the figure changed in its text, beside its claims; and with these changed as well, if one names it."""
    text, claimed = (ROOT / page).read_text(), claims(page)
    old = text[figure.start : figure.end]
    new = forgery(old, random_)
    assert new != old
    changed = text[: figure.start] + new + text[figure.end :]
    yield changed, claimed
    headings = [m[0] for m in re.finditer(r"^#+ .*$", text[: figure.start], re.MULTILINE)]
    place = claimed.find(f"{headings[-1]}\n") if headings else -1
    end = claimed.find("\n#", place + 1)
    named = " ".join(old.split())
    line = re.search(
        rf"(?<![\d.,+-]){re.escape(named)}(?![\w.%])(?=[^=\n]* = )", claimed[place : end if end > 0 else len(claimed)]
    )
    if place >= 0 and line:
        at = place + line.start()
        yield changed, claimed[:at] + " ".join(new.split()) + claimed[at + len(named) :]


@pytest.mark.nightly  # of the check itself: the tests above run it on every page
def test_a_forged_figure_is_found() -> None:
    """Forty figures by a fixed seed, each changed in four ways: a digit, the unit, the last digit by one, the sign; and all
    that are words."""
    random_ = random.Random(20261122)
    held = [(page, figure) for page in HELD for figure in check(page).held]
    assert len(held) >= 500
    count = 0
    worded = [(page, figure) for page, figure in held if figure.said is not None]
    assert {figure.text.lower() for _, figure in worded} >= {"a third", "two thirds", "half a percent", "half"}
    held = [(page, figure) for page, figure in held if re.search("[1-9]", figure.text)]  # 0.000 in k is the same
    for page, figure in [*random_.sample(held, 40), *worded]:
        for forgery in DIGITS_FORGED if figure.said is None else [other_word]:
            for text, claimed in forged(page, figure, forgery, random_):
                assert check(page, text, claimed=claimed).errors, f"{page}: {figure.text}, {forgery.__name__}"
                count += 1
    assert count > 240, "most figures were forged in their claims as well"


def test_a_forged_record_is_found() -> None:
    """The figure in the record changed by a twentieth; its commit changed to words, or to one that nobody made."""
    records = copy.deepcopy(RECORDS)
    records["h200-step-124m-llmc"]["figures"]["handgrad"]["tokens_per_second"] *= 1.05
    assert any("615.3k" in error for error in check("docs/results.md", records=records).errors)
    for name in random.Random(1).sample(sorted(set(RECORDS) - set(COMMITS)), 5):
        for commit in ("", "unknown", "12ab", "73fefb0 and more", "73FEFB0", None):
            assert commit_errors({name: {**RECORDS[name], "commit": commit}}, history=False, exceptions=COMMITS)
        changed = {**RECORDS[name], "uncommitted_changes": True}
        assert commit_errors({name: changed}, history=False, exceptions=COMMITS)
        if has_history():
            assert commit_errors({name: {**RECORDS[name], "commit": "0123456789abcdef"}}, history=True, exceptions=COMMITS)


def test_a_figure_without_a_record_is_found() -> None:
    """Added to a page: in its prose and in a table, with every kind of unit. A claim needs a record and a heading."""
    page = "docs/results.md"
    text = (ROOT / page).read_text()
    for added in ("12.5k tok/s", "3 ms", "7 µs", "1.5x", "+2 %", "5 GB", "8 MB", "250 W", "4 mJ", "1.2345", "3 times"):
        assert check(page, f"{text}\n\nIt takes {added}.\n").errors, added
    for said in (
        "nine times as much",
        "a third of it",
        "two of five",
        "half a percent",
        "3.0 million tokens",
        "about 1e-6",
    ):
        assert check(page, f"{text}\n\nIt takes {said}.\n").errors, said
    assert check(page, f"{text}\n\n| a | fits |\n|---|---|\n| b | yes |\n").errors
    assert check(page, f"{text}\n\n```\nstep  500/2500 | loss 1.2 | 9 ms\n```\n").errors
    assert check(page, f"{text}\n\n| a | tok/s |\n|---|---|\n| b | 12 |\n").errors
    for claim in ("in h200-nothing\n3 ms = steps", "in cpu-demo\n3 ms = config.steps", "3 ms = config.steps"):
        assert check(page, f"{text}\n\n## More\n\nIt takes 3 ms.\n", claimed=f"{claims(page)}\n## More\n{claim}\n").errors
    assert check(page, claimed=f"{claims(page)}\n## No such heading\nin cpu-demo\n").errors
    assert not check(page).errors


def test_every_file_of_claims_belongs_to_a_page() -> None:
    pages = {claims_of(page) for page in ALL}
    assert {path for path in (ROOT / "docs/figures").rglob("*") if path.is_file()} <= pages
    for page in ALL:
        assert all(lines for heading, lines in sections(claims(page)) if heading), f"{page}: a heading without claims"


def test_the_picture_is_drawn_from_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/speed.png carries a digest of its figures (tests/test_readme.py compares it); other figures, another digest."""
    before, measured = speed.digest(), speed.measured()
    assert {name for speeds in measured.values() for name in speeds} == set(speed.COLORS)
    measured["124M"]["handgrad, fp8"] = 741301.0
    monkeypatch.setattr(speed, "measured", lambda: measured)
    assert speed.digest() != before


def test_a_record_of_interrupted_tests_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Else its counts would pass for the whole suite's."""
    reporter = SimpleNamespace(stats={"passed": [None] * 3}, write_line=print)
    for status in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED):
        options = {"--record": str(tmp_path / f"{status.name}.json")}
        conftest.pytest_terminal_summary(reporter, status, SimpleNamespace(getoption=options.get))  # type: ignore[arg-type]
    whole, cut = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("OK", "INTERRUPTED"))
    assert cut.pop("interrupted") and cut == whole and whole["tests"]["passed"] == 3
