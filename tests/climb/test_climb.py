"""The climb: stubs fail in a line, solutions pass, planted mistakes are named, a machine's mistakes are located."""

import ast
import copy
import random
import re
import shutil
from pathlib import Path

import pytest

from handgrad.errors import UsageError
from handgrad.tools import climb

SOLUTIONS = Path(__file__).parent / "solutions"
STEPS = climb.STEPS


def planted() -> list:
    rows = []
    for line in Path(__file__).with_name("planted.txt").read_text().splitlines():
        if line.startswith("= "):
            step = line[2:]
            continue
        change, _, words = line.partition(" ## ")
        old, _, new = change.replace("\\n", "\n").partition(" ==> ")
        rows.append(pytest.param(step, old, new, words, id=f"{step[:2]}: {words}"))
    return rows


def solution(step: str) -> str:
    return (SOLUTIONS / f"{step}.py").read_text()


def graded(folder: Path, step: str, source: str) -> dict[str, str]:
    (folder / f"{step}.py").write_text(source)
    return {output: words for output, words in climb.grade(folder, step).items() if words != climb.RIGHT}


def test_there_are_sixteen_steps_and_two_more() -> None:
    numbers = [int(step[:2]) for step in STEPS]
    assert numbers == [*range(1, 19)] and [path.stem for path in sorted(SOLUTIONS.glob("*.py"))] == STEPS


@pytest.mark.parametrize("step", STEPS)
def test_a_stub_is_refused_in_one_line_and_its_solution_is_right(step: str, tmp_path: Path) -> None:
    climb.start(tmp_path / "new")
    with pytest.raises(UsageError, match=f"^{step[3:]} is not written yet; its page is {step}.md") as told:
        climb.grade(tmp_path / "new", step)
    assert "\n" not in str(told.value)
    assert graded(tmp_path, step, solution(step)) == {}


def test_enough_mistakes_are_planted() -> None:
    counts = [sum(row.values[0] == step for row in planted()) for step in STEPS]
    assert min(counts) >= 5 and sum(counts) > 100


KERNEL = [row.id for row in planted() if row.id.startswith("15: ")]  # the interpreter takes a second for each


@pytest.mark.nightly(but=[row.id for row in planted() if row.id not in KERNEL[2:]])
@pytest.mark.parametrize(("step", "old", "new", "words"), planted())
def test_a_planted_mistake_is_named(step: str, old: str, new: str, words: str, tmp_path: Path) -> None:
    source = solution(step)
    assert source.count(old) >= 1, "the planted text is in the solution"
    imports = "import torch\n" if "torch." in new and "import torch\n" not in source else ""
    wrong = graded(tmp_path, step, imports + source.replace(old, new, 1))
    output, _, rest = words.partition(" ")
    assert next(iter(wrong), "nothing") == output and wrong[output].startswith(rest), wrong


# Mistakes by a machine that has not read the tables: one place of a solution's function changed.

OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Gt: ast.Lt}
SWAPPED = {"sum": "mean", "mean": "sum", "exp": "log", "amax": "amin", "sqrt": "square", "tril": "triu", "triu": "tril"}


def changed(source: str, which: random.Random) -> str:
    """The source with an operator exchanged, a number changed, a method exchanged or a term left out."""
    tree = ast.parse(source)
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    places = []
    for node in ast.walk(ast.Module(function.body, [])):
        if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            places += [(node, "op"), (node, "left")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
            places.append((node, "number"))
        elif isinstance(node, ast.Attribute) and node.attr in SWAPPED:
            places.append((node, "method"))
    node, kind = which.choice(places)
    if kind == "op":
        node.op = OTHER[type(node.op)]()
    elif kind == "number":
        node.value += 1
    elif kind == "method":
        node.attr = SWAPPED[node.attr]
    else:
        kept = copy.copy(node.left)
        node.op, node.left, node.right = ast.Add(), kept, ast.Constant(0)
    return ast.unparse(ast.fix_missing_locations(tree))


def test_a_machines_mistakes_are_named_or_located(tmp_path: Path) -> None:
    """Forty mistakes change a result: the check names thirty or more, or locates them by output and place. It refuses the
    others in one line of a Python error."""
    which, seen, named, located, refused = random.Random(7), set(), [], [], []
    while len(named) + len(located) + len(refused) < 40:
        step = which.choice([step for step in STEPS if not step.startswith("15")])
        source = changed(solution(step), which)
        if source in seen:
            continue
        seen.add(source)
        try:
            wrong = graded(tmp_path, step, source)
        except UsageError as error:
            assert "\n" not in str(error)
            refused.append(f"{step}: {error}")
            continue
        if wrong:
            output, words = next(iter(wrong.items()))
            (located if words.startswith("differs in") else named).append(f"{step}: {output} {words}")
    print(*named, "", *located, "", *refused, sep="\n")
    assert len(named) + len(located) >= 30 and len(named) >= 10
    assert all(re.search(r"first at \[[\d, ]*\]: \S+, where \S+ is right", words) for words in located)


def test_files_of_a_reader_that_cannot_be_graded(tmp_path: Path) -> None:
    """Each is told in a line, with the place in the reader's file."""
    step = "02_linear"
    shutil.copy(SOLUTIONS / f"{step}.py", tmp_path)
    for change, told in (
        (("y = x @", "y = x @@"), "line 5: SyntaxError"),
        (("dy.T @ x", "dy @ x"), "line 7: RuntimeError"),
        (("return y, dx, dweight, dbias", "return y, dx, dweight"), "expected 4 tensors"),
        (("return y, dx, dweight, dbias", "pass"), "expected 4 tensors"),
        (("dweight = dy.T @ x", "dweight = x.T @ dy"), "transposed?"),
        (("dx = dy @ weight", "dx = x.copy_(dy @ weight)"), "the input x has changed"),
        (("dx = dy @ weight", "dx = (dy @ weight).float()"), "found (7, 3) float32"),
        (("def linear(", "def liner("), "no attribute 'linear'"),
        (("y = x @", "raise SystemExit(0); y = x @"), "line 5: SystemExit: 0"),
    ):
        with pytest.raises(UsageError) as error:
            graded(tmp_path, step, solution(step).replace(*change))
        assert told in str(error.value) and "\n" not in str(error.value)
    (tmp_path / f"{step}.py").write_bytes(b"\xff\xfe" + solution(step).encode())
    with pytest.raises(UsageError, match="SyntaxError: "):
        climb.grade(tmp_path, step)
