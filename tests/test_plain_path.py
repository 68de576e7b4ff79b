"""The plain path is plain: few frames from a command to an operation, few lines of few files in a step, no configuration
below the run, and no fp8, dropout, adapter, document or other rank in the files that a reader of a bf16 step opens."""

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from handgrad import cli
from handgrad.ops import cases, cpu
from handgrad.settings.config import RunConfig, to_toml
from tests.test_training import assembly_of

PACKAGE = Path(cli.__file__).parent
MOST_FRAMES, MOST_FILES = 6, 5  # from the entry point to an operation, which does not count
MOST_LAUNCH_FRAMES, MOST_LAUNCH_FILES = 9, 7  # from the entry point to the launch of a kernel, which does not count
# Of a whole step of GPT-2 in bf16 on a CPU, after the first: docs/decisions.md has these counts and when they grew.
STEP_FILES, STEP_LINES = 19, 705
STEP_ROOMS = {"data", "errors.py", "memory", "networks", "ops", "optimizers", "training"}
STEP_ROOMS |= {"models/gpt2.py", "models/passes.py", "settings/batch_schedule.py"}


def frames_above() -> list[str]:
    """The package's files on the stack, from the caller's caller up: one for each frame."""
    files = [Path(frame.filename) for frame in inspect.stack()[2:]]
    return [str(path.relative_to(PACKAGE)) for path in files if path.is_relative_to(PACKAGE)]


def test_a_command_is_few_frames_from_an_operation_and_from_a_kernel(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To a kernel: the stack of this command on a CPU, then the CUDA operation's own, down to a launch that is not made.
    What a step repeats, CUDA graphs replay."""
    names = ("attention_forward", "attention_backward", "linear_residual_forward", "linear_backward", "layernorm_backward")
    names += ("layernorm_linear_forward", "layernorm_linear_gelu_forward", "gelu_linear_backward", "embedding_backward")
    stacks: dict[str, list[str]] = {}
    for name in names:
        operation = getattr(cpu, name)

        def walk(*arguments: Any, name: str = name, operation: Any = operation, **settings: Any) -> None:
            if name not in stacks:
                stacks[name] = frames_above()
            operation(*arguments, **settings)

        monkeypatch.setattr(cpu, name, walk)
    recipe = tmp_path / "run.toml"
    recipe.write_text(to_toml(dataclasses.replace(config, steps=1, warmup_steps=0, eval_every=0, sample_tokens=0)))
    assert cli.main(["train", "--config", str(recipe)]) == 0
    assert len(stacks) == len(names)
    for name, above in stacks.items():
        inside = max(cuda_launches(name, monkeypatch), key=len)
        for files, frames, most in (
            (above, MOST_FRAMES, MOST_FILES),
            ([*inside, *above], MOST_LAUNCH_FRAMES, MOST_LAUNCH_FILES),
        ):
            assert files[-1] == "cli.py", files
            assert len(files) <= frames, f"{name} is {len(files)} frames from the command: {' < '.join(files)}"
            assert len(set(files)) <= most, f"{name} is {len(set(files))} files from the command: {' < '.join(files)}"


def cuda_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The frames above every launch of an operation on a GPU, up to the operation, on tensors of the CPU."""
    from handgrad.ops import cuda

    stacks: list[list[str]] = []
    for module in [module for path, module in sys.modules.items() if path.startswith("handgrad.ops.cuda.")]:
        for launching in ("launch", "multiply"):
            if hasattr(module, launching):
                monkeypatch.setattr(module, launching, lambda *_, **__: stacks.append(frames_above()))
    draw = cases.Draw(torch.bfloat16, torch.device("cpu"))
    scratch = {"scratch": torch.empty(1 << 24, dtype=torch.uint8)}
    if not name.startswith("layernorm_linear"):
        cases.call(getattr(cuda, name), name, draw.arguments(name) | scratch)
    else:
        norm, gemm = (draw.arguments(operation) for operation in ("layernorm_forward", name.removeprefix("layernorm_")))
        outs = [gemm[out] for out in ("out", "hidden") if out in gemm]
        getattr(cuda, name)(*outs, *norm.values(), gemm["weight"], gemm["bias"], **scratch)
    own = [[file for file in stack if file.startswith("ops/") and file != "ops/cases.py"] for stack in stacks]
    assert own
    return own


def test_a_plain_step_runs_few_lines_and_no_room_beside_it(config: RunConfig) -> None:
    """From a micro-batch's tokens to the new weights: the functions that run, and the files that they are in."""
    step = assembly_of(dataclasses.replace(config, precision="bf16")).stepper
    step.step(0)  # which verifies the shards
    called = set[CodeType]()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code) if event == "call" else None)
    try:
        step.step(1)
    finally:
        sys.setprofile(None)
    lines: dict[str, set[int]] = {}
    for code in called:
        if Path(code.co_filename).is_relative_to(PACKAGE):
            source, first = inspect.getsourcelines(code)
            name = str(Path(code.co_filename).relative_to(PACKAGE))
            lines.setdefault(name, set()).update(range(first, first + len(source)))
    beside = [name for name in lines if name not in STEP_ROOMS and name.partition("/")[0] not in STEP_ROOMS]
    assert not beside, f"a plain step calls {beside}"
    files, functions = len(lines), sum(map(len, lines.values()))
    assert files <= STEP_FILES and functions <= STEP_LINES, f"a plain step runs {functions} lines of {files} files"


CORE = ("memory", "models", "ops", "optimizers", "training")
# docs/architecture.md says what they count. Aim: a core of 10,500 lines.
CORE_LINES, PATH_LINES = 13_210, 5_111


def imported_files(path: Path) -> set[Path]:
    """The core's files that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[2].split(".")[0] in CORE:
            module = PACKAGE.parent / str(node.module).replace(".", "/")
            inner = {module / f"{alias.name}.py" for alias in node.names} if module.is_dir() else set()
            found |= {file for file in inner if file.exists()} or {module.with_suffix(".py")}
    return {file for file in found if file.exists()}


def files_of_gpt2() -> set[Path]:
    """The files of the core that AdamW's training of GPT-2 on a GPU runs: models and training with what they import, and
    the kernels of the operations that these call."""
    begun = {PACKAGE / "models/gpt2.py", PACKAGE / "optimizers/adamw.py", *(PACKAGE / "training").glob("*.py")}
    files, wanted = set[Path](), set[str]()
    while begun:
        files |= begun
        wanted |= {name for file in begun for name in re.findall(r"\bops\.(\w+)", file.read_text())}
        begun = {found for file in begun for found in imported_files(file)} - files
    begun = {
        PACKAGE.parent / f"{str(node.module).replace('.', '/')}.py"
        for node in ast.walk(ast.parse((PACKAGE / "ops/cuda/__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and wanted & {alias.name for alias in node.names}
    }
    while begun := {file for file in begun if file.exists()} - files:
        files |= begun
        begun = {found for file in begun for found in imported_files(file)}
    return files


def test_the_core_keeps_its_budget() -> None:
    core = [file for folder in CORE for file in (PACKAGE / folder).rglob("*.py")]
    for name, files, most in (("the core", core, CORE_LINES), ("the path of GPT-2", files_of_gpt2(), PATH_LINES)):
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert lines <= most, f"{name} has {lines} lines, more than {most}: cut something, or say what was cut"


BELOW_THE_RUN = ("generation", "joins", "memory", "models", "ops", "optimizers", "training", "machine/graphs.py")


@pytest.mark.parametrize("part", BELOW_THE_RUN)
def test_nothing_below_the_run_asks_the_configuration(part: str) -> None:
    path = PACKAGE / part
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        assert "RunConfig" not in file.read_text(), (
            f"{file.relative_to(PACKAGE)} sees the configuration; give it the design"
        )


# A dataclass may be frozen, and a warp has lanes.
ASIDE = re.compile(
    r"fp8|dropout|quanti[sz]e|\branks?\b|\blanes?\b|zero[ _-]?[012]\b|frozen(?!=True| dataclass)|adapter|\blora\b|document",
    re.IGNORECASE,
)
# Files of the plain path that may name some of these, and why.
EXCEPTIONS = {
    "ops/cpu/windows.py": "document",  # whose starts are a window's too; attention imports it
    "ops/cuda/cublaslt.py": "fp8|frozen|lane",  # multiplies fp8 operands like others; its tables freeze algorithms
    "ops/__init__.py": "lane|rank",  # the list of all operations
    "ops/sizes.py": "lane|document",  # of every CUDA kernel, also of attention within documents
    "ops/reference/reduction.py": "lane|rank",  # the sums over lanes
    "ops/cuda/reduction.py": "lane|rank",
    "ops/reference/optimizer.py": "lane",  # the loss of a step is the sum over its lanes
    "memory/activations.py": "document",  # an input that some runs have
    "memory/rows.py": "frozen|lane|rank",  # rows say their bucket, whether they are frozen
    "training/design.py": "fp8|dropout|lane|rank|frozen|lora",  # the design is everything that the run is
    "training/feed.py": "document",  # a source of documents says where they start
    "training/state.py": "lane|rank|frozen",  # the optimizer's ranges, and gradients of frozen parameters
    "training/step.py": "frozen",  # these gradients become zeros
}


def plain_files() -> list[Path]:
    folders = [
        *(PACKAGE / "ops").rglob("*.py"),
        *(PACKAGE / "training").glob("*.py"),
        *(PACKAGE / "optimizers").glob("*.py"),
    ]
    memory = ("rows", "activations")
    return sorted([*folders, PACKAGE / "models/passes.py", *(PACKAGE / "memory" / f"{name}.py" for name in memory)])


@pytest.mark.parametrize("path", plain_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_plain_path_names_nothing_that_stands_beside_it(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    allowed = EXCEPTIONS.get(name, "lane" if name.startswith("ops/cuda/") else "(?!)")
    allowed += "|document" if path.stem.startswith("attention") else ""  # the one operation in which tokens see each other
    lines = [(n, line, ASIDE.findall(line)) for n, line in enumerate(path.read_text().splitlines(), 1)]
    found = [f"{n}: {line.strip()}" for n, line, words in lines if any(not re.match(allowed, w.lower()) for w in words)]
    assert not found, f"{name} names what stands beside the plain path: {found}"


BESIDE_EQUATIONS = re.compile(ASIDE.pattern + "|untrained", re.IGNORECASE)


EQUATION = re.compile(r"#.* = .*\w")  # a comment: x = wte[token]
FIRST_EQUATION = 30  # lines of code from the top, which neither docstrings nor comments nor blank lines are


@pytest.mark.parametrize("model", ["gpt2", "modern", "llama"])
def test_a_model_begins_with_its_equations(model: str) -> None:
    """And its file says nothing of fp8, neither in a row nor in a comment: `networks` has the forms."""
    source = (PACKAGE / "models" / f"{model}.py").read_text()
    tree, lines = ast.parse(source), source.splitlines()
    first = next(number for number, line in enumerate(lines, 1) if EQUATION.search(line))
    code = {line for node in ast.walk(tree) if isinstance(node, ast.stmt) for line in (node.lineno, node.end_lineno or 0)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            code -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    before = sum(number in code for number in range(1, first + 1))
    assert before <= FIRST_EQUATION, f"{model}.py has its first equation after {before} lines of code"
    assert "fp8" not in source


@pytest.mark.parametrize("model", ["gpt2", "modern", "llama", "passes"])
def test_the_models_equations_name_nothing_that_stands_beside_them(model: str) -> None:
    """The rows have inputs for documents; the functions of the model's file know none of it."""
    source = (PACKAGE / "models" / f"{model}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            text = ast.get_source_segment(source, node) or ""
            found = BESIDE_EQUATIONS.search(text)
            assert not found, f"{node.name} names {found}"
