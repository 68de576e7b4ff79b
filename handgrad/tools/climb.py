"""The climb's steps, and their grades: a reader's function beside the reference, and the known mistake that fits it.

Pages, stubs and tables are data: `climb/` of the repository, `handgrad/climb` of a wheel. A step's table is a module with

    cases(draw)       a `Case` per size, drawn in float64
    answers(case)     the right outputs by name, from the reference; it may add intermediate values to the case
    MISTAKES          (output, words, formula of the case): the output that a known mistake gives
    TERMS             optional: output -> function of the case -> terms by name, whose sum is the output
    TOLERANCE         optional: largest error, relative to the largest number of the output
    call(f, case)     optional: the outputs of a function that changes its input
    further(f, cases) optional: words about what else is wrong, or ""
    operations(f)     optional: the operations of a training by the reader's function f, by name
    grade(path)       instead of the first three, for a step that is no function of tensors: words by output
"""

import importlib.util
import inspect
import json
import math
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import handgrad
from handgrad.errors import UsageError, storage_errors

PROGRESS, RIGHT, TOLERANCE = "progress.json", "right", 1e-9
UNWRITTEN = "raise NotImplementedError"
Pairs = list[tuple[Tensor, Tensor]]  # of an output: the reader's, the right one


class Case(SimpleNamespace):
    """One call of a reader's function: its arguments by name, in order, and the sizes that may explain a wrong factor."""

    def __init__(self, sizes: dict[str, int], **inputs: Any):
        super().__init__(**inputs)
        self.sizes, self.inputs = sizes, tuple(inputs.values())


def data_folder() -> Path:
    package = Path(handgrad.__file__).parent
    return next(folder for folder in (package / "climb", package.parent / "climb") if folder.is_dir())


def steps() -> list[str]:
    """The steps in order, like 01_softmax_and_loss."""
    return sorted(path.stem for path in (data_folder() / "steps").glob("[0-9]*.py"))


def start(folder: Path) -> None:
    """Writes the climb's folder. Raises `UsageError` if something is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"expected a new or empty folder, found files in {folder}; name another")
    with storage_errors(f"writing {folder}"):
        shutil.copytree(data_folder() / "steps", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        write_progress(folder, {"started": time.time(), "steps": {}})


def read_progress(folder: Path) -> dict[str, Any]:
    """When the climb began; by step the number of checks and when it was right first. Raises `UsageError`."""
    try:
        return json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"expected a climb in {folder.absolute()}; `handgrad climb start DIR` writes one") from None
    except ValueError:
        raise UsageError(f"{folder / PROGRESS} is damaged; start in another folder and copy your files there") from None


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    (folder / PROGRESS).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def module_from(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"climb_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def table_of(step: str) -> ModuleType:
    return module_from(data_folder() / "grading" / f"{step}.py")


def at_line(error: BaseException, path: Path) -> str:
    """The error, with the last line of `path` that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{path.name}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"


def is_unwritten(path: Path) -> bool:
    return path.is_file() and UNWRITTEN in path.read_text(encoding="utf-8")


def read_function(folder: Path, step: str) -> Callable[..., Any]:
    """The reader's function of a step. Raises `UsageError` if there is none yet, or if its file cannot be run."""
    path, name = (folder / f"{step}.py").absolute(), step.partition("_")[2]
    if is_unwritten(path):
        raise UsageError(f"{name} is not written yet; its page is {step}.md, its place {step}.py")
    try:
        return getattr(module_from(path), name)
    except (Exception, SystemExit) as error:
        raise UsageError(at_line(error, path)) from None


def grade(folder: Path, step: str) -> dict[str, str]:
    """For each output of a step's function "right", or what is wrong. Raises `UsageError` if it cannot be compared."""
    table, function, path = table_of(step), read_function(folder, step), (folder / f"{step}.py").absolute()
    if hasattr(table, "grade"):
        return table.grade(path)
    draw, verdicts = torch.Generator().manual_seed(0), {}
    cases = list(table.cases(lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)))
    right = [table.answers(case) for case in cases]
    call = getattr(table, "call", call_on_copies)
    try:
        given = [checked(call(function, case), expected) for case, expected in zip(cases, right, strict=True)]
        for place, name in enumerate(right[0]):
            pairs = [(mine[place], expected[name]) for mine, expected in zip(given, right, strict=True)]
            verdicts[name] = diagnosis(table, name, cases, pairs)
        if hasattr(table, "further") and {*verdicts.values()} == {RIGHT}:
            verdicts["further"] = table.further(function, cases) or RIGHT
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(at_line(error, path)) from None
    return verdicts


def call_on_copies(function: Callable[..., Any], case: Case) -> Any:
    """The outputs of a call on copies of the inputs. Raises `UsageError` for an input that has changed."""
    copies = tuple(value.clone() if isinstance(value, Tensor) else value for value in case.inputs)
    outputs = function(*copies)
    for name, copy, value in zip(inspect.signature(function).parameters, copies, case.inputs, strict=False):
        if isinstance(value, Tensor) and not torch.equal(copy, value):
            raise UsageError(f"the input {name} has changed: compute on copies, the caller still needs it")
    return outputs


def checked(found: Any, expected: dict[str, Tensor]) -> list[Tensor]:
    """The outputs as a list. Raises `UsageError` for a wrong number, shape or dtype of outputs."""
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    if len(outputs) != len(expected):
        raise UsageError(f"expected {len(expected)} outputs ({', '.join(expected)}), found {len(outputs)}")
    for (name, right), output in zip(expected.items(), outputs, strict=True):
        if not isinstance(output, Tensor):
            raise UsageError(f"expected a tensor for {name}, found {type(output).__name__}; is a return missing?")
        if output.shape != right.shape or output.dtype != right.dtype:
            turned = " (transposed?)" if output.ndim > 1 and output.mT.shape == right.shape else ""
            shown = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (right, output)]
            raise UsageError(f"expected {name} as {shown[0]}, found {shown[1]}{turned}")
    return [output.clone() for output in outputs]


def close(found: Tensor, right: Tensor, tolerance: float) -> bool:
    """True if the tensors agree, NaN and infinities included, up to `tolerance` of the largest finite number."""
    largest = right.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
    return torch.allclose(found.double(), right.double(), rtol=0, atol=tolerance * largest, equal_nan=True)


def diagnosis(table: ModuleType, name: str, cases: list[Case], pairs: Pairs) -> str:
    """ "right", or the known mistake, the terms and factors, or else the place that explains an output."""
    tolerance = getattr(table, "TOLERANCE", TOLERANCE)
    if all(close(mine, right, tolerance) for mine, right in pairs):
        return RIGHT
    for output, words, formula in table.MISTAKES:
        if output == name and all(close(mine, formula(c), tolerance) for c, (mine, _) in zip(cases, pairs, strict=True)):
            return words
    terms = getattr(table, "TERMS", {}).get(name)
    parts = [terms(c) if terms else {"": right} for c, (_, right) in zip(cases, pairs, strict=True)]
    return wrong_terms([c.sizes for c in cases], parts, pairs, tolerance) or first_difference(name, pairs, tolerance)


def wrong_terms(sizes: list[dict[str, int]], parts: list[dict[str, Tensor]], pairs: Pairs, tolerance: float) -> str:
    """Names the terms of an output that are missing or have a wrong sign or factor, by least squares; "" if factors do not
    explain it."""
    factors, found = [], []
    for terms, (mine, right) in zip(parts, pairs, strict=True):
        columns = torch.stack([term.expand(right.shape).reshape(-1).double() for term in terms.values()], 1)
        if not (mine.isfinite().all() and columns.isfinite().all()):
            return ""
        factors.append(torch.linalg.lstsq(columns, mine.reshape(-1, 1).double(), driver="gelsd").solution)
        if not close((columns @ factors[-1]).view(mine.shape), mine, 10 * tolerance):
            return ""
    for place, part in enumerate(parts[0]):
        match named_factor([factor[place].item() for factor in factors], sizes):
            case "":
                return ""
            case "0":
                found.append(f"lacks {part}" if part else "is zero everywhere")
            case "-1":
                found.append(f"has {part or 'everything'} with the wrong sign")
            case factor if factor != "1":
                found.append(f"has {part or 'everything'} {factor} times")
    return " and ".join(found)


def named_factor(values: list[float], sizes: list[dict[str, int]]) -> str:
    """The name of a factor that has these values in the cases; "" if it is none of the likely ones."""
    likely = {"0": [0.0], "1": [1.0], "2": [2.0], "1/2": [0.5]}
    for name in sizes[0]:
        likely[name] = [float(each[name]) for each in sizes]
        likely[f"√{name}"] = [math.sqrt(size) for size in likely[name]]
        likely |= {f"1/{key}": [1 / size for size in likely[key]] for key in (name, f"√{name}")}
    for name, expected in likely.items():
        for sign in (1, -1):
            wanted = [sign * size for size in expected] * (len(values) if len(expected) == 1 else 1)
            if all(math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-7) for pair in zip(values, wanted, strict=True)):
                return f"{'-' * (sign < 0)}{name}"
    same = all(math.isclose(value, values[0], rel_tol=1e-5) for value in values)
    return f"{values[0]:.4g}" if same and len(values) > 1 else ""


def first_difference(name: str, pairs: Pairs, tolerance: float) -> str:
    """The first number that differs and the direction; the rows or columns, if only few differ."""
    mine, right = next((mine.double(), right.double()) for mine, right in pairs if not close(mine, right, tolerance))
    bad = ~torch.isclose(mine, right, rtol=0, atol=tolerance * right.nan_to_num(0, 0, 0).abs().max().item(), equal_nan=True)
    places, cosine = bad.nonzero(), torch.cosine_similarity(mine.flatten(), right.flatten(), dim=0).item()
    first = tuple(places[0].tolist())
    words = f"differs in {len(places)} of {bad.numel()} numbers, first at {list(first)}: {mine[first].item():.6g}, where"
    words += f" {right[first].item():.6g} is right"
    for axis, size in enumerate(bad.shape):
        if len(some := places[:, axis].unique().tolist()) <= size // 2:
            words += f"; on axis {axis} only at {', '.join(map(str, some))}"
    return words + (f"; the cosine of both is {cosine:.3f}" if mine.isfinite().all() else "; NaN or infinities are in it")
