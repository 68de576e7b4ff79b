"""The laws of the house: who imports whom, what the package never uses, how long a file may be, that the docs run."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import is_nightly

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "handgrad"
# `export --to hf` copies these beside the weights of a network that transformers lacks: data here, for another program.
EXPORTED = sorted((PACKAGE / "interop" / "transformers_code").glob("*.py"))
MODULES = sorted({*PACKAGE.rglob("*.py")} - {*EXPORTED})

# The house has nine floors: a folder imports what stands on lower floors, and `errors` to `parsing` are for all.
FLOORS = (
    ("errors", "files", "format", "names", "parsing"),
    ("machine", "networks", "settings", "storage"),
    ("data", "memory", "ops"),
    ("models", "optimizers"),
    ("generation", "training"),
    ("joins",),  # what joins a plain step at set-up
    ("evaluation", "interop", "serving"),
    ("run",),
    ("api", "commands", "reports", "tools"),
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS, 1) for part in parts}
DOORS = {
    "cli": 10,
    "__main__": 11,
    "__init__": 10,
}  # `__init__` for type checkers: it imports nothing before its name is used
SIBLINGS = {  # at most eight pairs of one floor of which the first imports the second
    ("settings", "networks"),
    ("interop", "evaluation"),
    ("serving", "evaluation"),
    ("api", "reports"),
    ("api", "tools"),
    ("commands", "reports"),
    ("commands", "tools"),
}
MOST_FLOORS, MOST_SIBLINGS, MOST_ROOT_FILES = 9, 8, 8


def part_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(module: Path) -> set[str]:
    """Parts of handgrad that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where a thing comes from"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            path = name.split(".")
            if path[0] == "handgrad" and len(path) > 1:
                found.add(path[1])
    return found - {"__version__"}  # the package's own name and version are for all


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_follow_the_law(module: Path) -> None:
    part, floors = part_of(module), FLOOR_OF | DOORS
    assert part in floors, f"{part} is new: give it a floor here and in docs/architecture.md"
    ground = floors[part] == 1
    for imported in imported_parts(module) - {part}:
        lower = floors[imported] < floors[part] or (ground and floors[imported] == 1)
        assert lower or (part, imported) in SIBLINGS, f"{part} may not import {imported}"


def test_the_house_has_nine_floors() -> None:
    """Every exception among siblings is in use."""
    assert len(FLOORS) <= MOST_FLOORS and len(SIBLINGS) <= MOST_SIBLINGS
    used = {(part_of(module), imported) for module in MODULES for imported in imported_parts(module)}
    assert used >= SIBLINGS
    assert len([*PACKAGE.glob("*.py")]) <= MOST_ROOT_FILES


def test_the_law_is_the_one_in_the_docs() -> None:
    """docs/architecture.md shows the same floors, from the top down."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.*?) \|", text, re.MULTILINE)
    shown = {int(number): re.findall(r"`(\w+)`", parts) for number, parts in rows}
    assert shown == {number: [*parts] for number, parts in enumerate(FLOORS, 1)}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_gradients_are_by_hand(module: Path) -> None:
    """No autograd, no modules, no tracing, no pickles in the package."""
    source = module.read_text()
    for banned in (
        "requires_grad",
        "torch.autograd",
        "nn.Module",
        "torch.compile",
        ".backward()",
        "torch.jit",
        "pickle",
        "torch.load",
    ):
        assert banned not in source, f"{module} uses {banned}"


def test_the_exported_code_is_data() -> None:
    """transformers wants modules of torch, with autograd, so these files are no part of the program. Nothing here imports
    them, and they import torch and transformers alone."""
    assert [path.name for path in EXPORTED] == ["configuration_handgrad.py", "modeling_handgrad.py"]
    for path in EXPORTED:
        imports = re.findall(r"^\s*(?:import|from) (\.?\w+)", path.read_text(), re.MULTILINE)
        assert {*imports} <= {"collections", "typing", "torch", "transformers", ".configuration_handgrad"}, path
    for module in MODULES:
        imports = [line for line in module.read_text().splitlines() if re.match(r"\s*(import|from) ", line)]
        assert not any(re.search(r"transformers_code|_handgrad\b|\btransformers\b", line) for line in imports), module


# Ways to torch's kernels for a whole layer or its gradient, which are autograd's: `ops.cpu` calls them, and `ops.cuda` for
# cuDNN's convolutions; `ops.reference` is the formula.
LIBRARY = re.compile(r"torch\.ops\b|torch\.nn\b|scaled_dot_product|_fused_")


def test_a_librarys_gradients_have_a_room_of_their_own() -> None:
    callers = {path.relative_to(PACKAGE) for path in MODULES if LIBRARY.search(path.read_text())}
    room = {Path("ops/cpu") / f"{name}.py" for name in ("attention", "linear", "norms", "optimizer", "windows")}
    assert callers == room | {Path("ops/cuda/convolution.py")}


@pytest.mark.parametrize("folder", ["handgrad", "tests", "benchmarks", "examples"])
def test_files_stay_short(folder: str) -> None:
    """A network's file has its tensors and all that is computed of them."""
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    long = {
        str(path): count for path, count in lines.items() if count > (600 if path.parent == PACKAGE / "models" else 400)
    }
    assert not long, f"over 400 lines, or 600 of a network: {long}"


# A cap rises only beside an entry in docs/decisions.md that names what was cut for it.
MOST_LINES, MOST_FILES = 50_485, 328
MOST_FILES_OF = {"run": 21, "models": 10, "networks": 10}


def test_the_package_keeps_its_budget() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    files = len([*PACKAGE.rglob("*.py")])
    assert lines <= MOST_LINES and files <= MOST_FILES, (
        f"{lines} lines in {files} files: cut something, or say what was cut"
    )
    for folder, most in MOST_FILES_OF.items():
        assert len([*(PACKAGE / folder).glob("*.py")]) <= most, folder


MOST_WORDS = 76_800  # of all chapters, their code included


def test_the_docs_keep_their_budget() -> None:
    words = sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    assert words <= MOST_WORDS, f"the chapters have {words} words: say a thing once, or cut one"


# A block of text right below a block of Python is what that prints.
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def python_blocks() -> list:
    pages = sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "tour.md"})  # tests/test_readme.py runs the tour
    return [
        pytest.param(code, printed, id=f"{page.relative_to(ROOT)}:{number}")
        for page in pages
        for number, (code, printed) in enumerate(PYTHON.findall(page.read_text()))
    ]


@pytest.mark.parametrize(("code", "printed"), python_blocks())
def test_python_in_the_docs_runs(code: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    if '"eval_every": 10' in code:  # six runs: half of the steps show as much
        code = code.replace('"steps": 40', '"steps": 20')
    exec(compile(code, "docs", "exec"), {"__name__": "__main__"})
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert not printed or found == [line.rstrip() for line in printed.splitlines()]


def test_figures_in_prose_stand_in_results() -> None:
    """A results file says on what machine, with what versions, at which commit it was made."""
    import json

    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        content = json.loads(path.read_text())
        assert {"machine", "versions", "commit", "date"} <= content.keys(), path.name


def test_the_package_speaks_of_itself_alone() -> None:
    """No path of a machine it was made on, no host of a package index."""
    pattern = re.compile(r"/(wor[k]|hom[e]|roo[t])/|pypi\.or[g]|pythonhoste[d]")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json") or name in ("Makefile", ".ci/run", "NOTICE"):
            found = pattern.search(path.read_text(errors="replace"))
            assert not found, f"{name} mentions {found[0] if found else ''}"


def test_what_make_test_leaves_out(request: pytest.FixtureRequest) -> None:
    """Each file that docs/README.md names for a promise keeps a test in `make test`, and so does each test that keeps
    some of its cases: a case that is misspelt would keep none."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    if len(items) < 5000:
        pytest.skip("of the whole suite alone")
    kept, named = dict[tuple[Path, str], list[str]](), dict[tuple[Path, str], list[str]]()
    for item in items:
        test, case = (item.path, item.originalname), item.callspec.id if hasattr(item, "callspec") else ""
        kept.setdefault(test, []).extend([] if is_nightly(item) else [case])
        for mark in item.iter_markers("nightly"):
            named[test] = sorted(mark.kwargs.get("but", []))
    misspelt = {str(test): cases for test, cases in named.items() if cases != sorted(kept[test])}
    assert not misspelt
    promises = (ROOT / "docs" / "README.md").read_text().partition("# The promises")[2]
    files = [ROOT / name for name in re.findall(r"\]\(\.\./(tests/\S+\.py)\)", promises)]
    runs = {path for (path, _), cases in kept.items() if cases}
    assert len(runs.intersection(files)) >= 40 and not {path for path, _ in kept}.intersection(files) - runs
