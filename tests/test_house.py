"""The laws of the house: who imports whom, what the package never uses, how long a file may be, that the docs run."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "handgrad"
# `export --to hf` copies these beside the weights of a network that transformers lacks: data here, for another program.
EXPORTED = sorted((PACKAGE / "interop" / "transformers_code").glob("*.py"))
MODULES = sorted({*PACKAGE.rglob("*.py")} - {*EXPORTED})

# Which parts of the package a part may import, besides itself. `errors`, `files`, `names` and
# `parsing` are for all.
# The core, a training step:
CORE = {"config", "networks", "batch_schedule", "arena", "dtypes", "mask"}
CORE |= {"ops", "models", "layout", "optimizers", "graphs", "training"}
BESIDE = {*CORE, "fp8", "dropout", "lora", "parallel"}  # what joins it at set-up
MODEL_AT_WORK = {*BESIDE, "generation", "evaluation", "data", "checkpoint", "backend", "devices", "jsonl", "run_files"}
RUN = {*MODEL_AT_WORK, "audit", "gpus", "interop", "manifest", "presets", "recipes", "rules", "format", "power"}
RUN |= {"tensor_files", "threads", "run"}
LAW = {
    **{part: set() for part in ("errors", "files", "names", "parsing", "format", "run_files", "jsonl", "graphs")},
    **{part: set() for part in ("power", "limits", "tensor_files", "batch_schedule", "networks", "rules")},
    **{part: set() for part in ("processor", "dtypes", "mask")},
    "config": {"batch_schedule", "networks", "rules"},
    "threads": {"limits", "processor"},
    "manifest": {"run_files", "tensor_files"},
    "gpus": set(),
    "presets": {"config", "networks"},
    **{part: {"config", "run_files"} for part in ("recipes", "arena", "data")},
    "checkpoint": {"run_files", "manifest", "tensor_files"},
    "devices": {"config", "run_files", "gpus", "limits", "processor"},
    "ops": {"dtypes", "mask", "processor"},
    "backend": {"config", "ops"},
    "models": {"config", "networks", "arena", "dtypes", "mask"},
    "layout": {"models"},
    "optimizers": {"models", "ops"},
    "training": CORE,
    "parallel": CORE,
    "fp8": {*CORE, "dropout", "lora", "parallel"},
    "dropout": CORE,
    "lora": CORE,
    "audit": {*CORE, "parallel", "jsonl"},
    "generation": {*CORE, "data", "jsonl"},
    "evaluation": MODEL_AT_WORK,
    "interop": MODEL_AT_WORK,
    "run": RUN,
    "local_server": set(),
    "serving": {*MODEL_AT_WORK, "local_server"},
    "reports": {*RUN, "local_server"},
    "tools": RUN,
    "api": {*RUN, "reports", "tools"},
    "commands": {*RUN, "reports", "tools", "serving", "local_server"},
    "cli": {"commands", "config", "parallel", "threads"},
    "__main__": {"cli"},
    "__init__": {"api", "config"},  # for type checkers; nothing is imported before its name is used
}


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
    part = part_of(module)
    assert part in LAW, f"{part} is new: give it a row in the law, and in docs/architecture.md"
    forbidden = imported_parts(module) - LAW[part] - {part, "errors", "files", "names", "parsing"}
    assert not forbidden, f"{part} may not import {', '.join(sorted(forbidden))}"


def test_the_law_is_the_one_in_the_docs() -> None:
    """docs/architecture.md shows the same table."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for part in LAW:
        if not part.startswith("__"):
            assert re.search(rf"\| `[^|]*\b{part}\b[^|]*` \|", text), f"{part} has no row in docs/architecture.md"


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


# Ways to torch's kernels for a whole layer or its gradient, which are autograd's: `ops.cpu` calls them, `ops.reference` is
# the formula.
LIBRARY = re.compile(r"torch\.ops\b|torch\.nn\b|scaled_dot_product|_fused_")


def test_a_librarys_gradients_have_a_room_of_their_own() -> None:
    callers = {path.relative_to(PACKAGE) for path in MODULES if LIBRARY.search(path.read_text())}
    room = {Path("ops/cpu") / f"{name}.py" for name in ("adamw", "attention", "gelu", "layernorm", "linear")}
    assert callers == room


@pytest.mark.parametrize("folder", ["handgrad", "tests", "benchmarks", "examples"])
def test_files_stay_short(folder: str) -> None:
    """A network's file has its tensors and all that is computed of them."""
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    long = {
        str(path): count for path, count in lines.items() if count > (600 if path.parent == PACKAGE / "models" else 400)
    }
    assert not long, f"over 400 lines, or 600 of a network: {long}"


# A cap rises only beside an entry in docs/decisions.md that names what was cut for it. Aim: 42,500 lines in 320 files.
MOST_LINES, MOST_FILES = 45_422, 370
MOST_FILES_OF = {".": 30, "run": 24, "models": 13, "networks": 7}


def test_the_package_keeps_its_budget() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    files = len([*PACKAGE.rglob("*.py")])
    assert lines <= MOST_LINES and files <= MOST_FILES, (
        f"{lines} lines in {files} files: cut something, or say what was cut"
    )
    for folder, most in MOST_FILES_OF.items():
        assert len([*(PACKAGE / folder).glob("*.py")]) <= most, folder


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
