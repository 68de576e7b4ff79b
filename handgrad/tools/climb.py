"""The climb's steps, and their grades: a reader's function beside the reference, and the known mistake that fits it."""

import copy
import inspect
import math
import runpy
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import handgrad
from handgrad.errors import UsageError, storage_errors

PACKAGE = Path(handgrad.__file__).parent
# Pages, stubs and tables of mistakes are data, beside the package in the repository and inside it in a wheel.
DATA = next(folder for folder in (PACKAGE / "climb", PACKAGE.parent / "climb") if folder.is_dir())
STEPS = sorted(path.stem for path in (DATA / "steps").glob("[0-9]*.py"))
UNWRITTEN, RIGHT, TOLERANCE = "raise NotImplementedError", "right", 1e-9
Pairs = list[tuple[Tensor, Tensor]]  # of an output: the reader's, the right one


class Case(SimpleNamespace):
    """One call of a reader's function: its arguments by name, in order, and the sizes that may explain a wrong factor."""

    def __init__(self, sizes: dict[str, int], **inputs: Any):
        super().__init__(**inputs)
        self.sizes, self.inputs = sizes, tuple(inputs.values())


def start(folder: Path) -> None:
    """Writes the climb's folder. Raises `UsageError` if something is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"expected a new or empty folder, found files in {folder}; name another")
    with storage_errors(f"writing {folder}"):
        shutil.copytree(DATA / "steps", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def table_of(step: str) -> Any:
    """The grading of a step: climb/grading/README.md says what is in it."""
    return SimpleNamespace(**runpy.run_path(str(DATA / "grading" / f"{step}.py")))


def at_line(error: BaseException, path: Path) -> str:
    """The error, with the last line of `path` that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{path.name}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"


def is_unwritten(path: Path) -> bool:
    return path.is_file() and UNWRITTEN in path.read_text(encoding="utf-8", errors="replace")


def read_function(folder: Path, step: str) -> Callable[..., Any]:
    """The reader's function of a step. Raises `UsageError` if there is none yet, or if its file cannot be run."""
    if is_unwritten(path := (folder / f"{step}.py").absolute()):
        raise UsageError(f"{step[3:]} is not written yet; its page is {step}.md, its place {step}.py")
    try:
        return getattr(SimpleNamespace(**runpy.run_path(str(path))), step[3:])
    except (Exception, SystemExit) as error:
        raise UsageError(at_line(error, path)) from None


def grade(folder: Path, step: str) -> dict[str, str]:
    """For each output of a step's function "right", or what is wrong. Raises `UsageError` if it cannot be compared."""
    table, function, path = table_of(step), read_function(folder, step), (folder / f"{step}.py").absolute()
    if hasattr(table, "grade"):
        return table.grade(path)
    function = function if hasattr(table, "IN_PLACE") else on_copies(function)
    call, verdicts = getattr(table, "call", lambda function, case: function(*case.inputs)), {}
    draw = torch.Generator().manual_seed(0)
    cases = list(table.cases(lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)))
    right = [table.answers(case) for case in cases]
    try:
        results = [checked(call(function, case), expected) for case, expected in zip(cases, right, strict=True)]
        for index, name in enumerate(right[0]):
            pairs = [(yours[index], expected[name]) for yours, expected in zip(results, right, strict=True)]
            verdicts[name] = diagnosis(table, name, cases, pairs)
        if hasattr(table, "further") and {*verdicts.values()} == {RIGHT}:
            verdicts["it"] = table.further(function, cases) or RIGHT
    except (Exception, SystemExit) as error:
        raise error if isinstance(error, UsageError) else UsageError(at_line(error, path)) from None
    return verdicts


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on copies of its inputs. Raises `UsageError` if it changes one, also inside a list or a namespace."""

    def call(*inputs: Any) -> Any:
        copies = copy.deepcopy(inputs)
        outputs = function(*copies)
        for name, now, then in zip(inspect.signature(function).parameters, copies, inputs, strict=False):
            if not all(map(torch.equal, tensors_in(now), tensors_in(then))):
                raise UsageError(f"the input {name} has changed: compute on copies, the caller still needs it")
        return outputs

    return call


def tensors_in(value: Any) -> list[Tensor]:
    inner = vars(value).values() if isinstance(value, SimpleNamespace) else value if isinstance(value, list | tuple) else ()
    return [value] if isinstance(value, Tensor) else [tensor for each in inner for tensor in tensors_in(each)]


def checked(result: Any, expected: dict[str, Tensor]) -> list[Tensor]:
    """The outputs as a list. Raises `UsageError` for a wrong number, kind, shape or dtype of outputs."""
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    if len(outputs) != len(expected) or not all(isinstance(output, Tensor) for output in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise UsageError(f"expected {len(expected)} tensors ({', '.join(expected)}), found {kinds}; is a return missing?")
    for (name, right), output in zip(expected.items(), outputs, strict=True):
        shown = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (right, output)]
        if shown[0] != shown[1]:
            turned = " (transposed?)" if output.ndim > 1 and output.mT.shape == right.shape else ""
            raise UsageError(f"expected {name} as {shown[0]}, found {shown[1]}{turned}")
    return [output.clone() for output in outputs]


def close(yours: Tensor, right: Tensor, tolerance: float) -> bool:
    """True if the tensors agree, NaN and infinities included, up to `tolerance` of the largest finite number."""
    largest = right.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
    return torch.allclose(yours.double(), right.double(), rtol=0, atol=tolerance * largest, equal_nan=True)


def diagnosis(table: Any, name: str, cases: list[Case], pairs: Pairs) -> str:
    """ "right", or the known mistake, the terms and factors, or else the place that explains an output."""
    tolerance = getattr(table, "TOLERANCE", TOLERANCE)
    if all(close(yours, right, tolerance) for yours, right in pairs):
        return RIGHT
    for output, words, formula in table.MISTAKES:
        if output == name and all(close(yours, formula(c), tolerance) for c, (yours, _) in zip(cases, pairs, strict=True)):
            return words
    terms = getattr(table, "TERMS", {}).get(name)
    parts = [terms(c) if terms else {"": right} for c, (_, right) in zip(cases, pairs, strict=True)]
    return wrong_terms([c.sizes for c in cases], parts, pairs, tolerance) or first_difference(name, pairs, tolerance)


def wrong_terms(sizes: list[dict[str, int]], parts: list[dict[str, Tensor]], pairs: Pairs, tolerance: float) -> str:
    """Names the terms of an output that are missing or have a wrong factor, by least squares, or says ""."""
    factors, faults = [], []
    for terms, (yours, right) in zip(parts, [(m.double(), r.double()) for m, r in pairs], strict=True):
        columns = torch.stack([term.double().expand(right.shape).reshape(-1) for term in terms.values()], 1)
        if not (yours.isfinite().all() and columns.isfinite().all()):
            return ""
        factors.append(torch.linalg.lstsq(columns, yours.reshape(-1, 1), driver="gelsd").solution)
        if not close((columns @ factors[-1]).view(yours.shape), yours, 10 * tolerance):
            return ""
    for index, part in enumerate(parts[0]):
        factor, whole = named_factor([factor[index].item() for factor in factors], sizes), part or "everything"
        if not factor:
            return ""
        words = {"0": f"lacks {part}" if part else "is zero everywhere", "-1": f"has {whole} with the wrong sign"}
        faults += [words.get(factor, f"has {whole} {factor} times")] * (factor != "1")
    return " and ".join(faults)


def named_factor(values: list[float], sizes: list[dict[str, int]]) -> str:
    """The name of a factor that has these values in the cases; "" if it is none of the likely ones."""
    if all(abs(value) < 1e-7 for value in values):
        return "0"
    likely = {"1": [1.0] * len(values)}
    for form, power in (("{}", 1.0), ("1/{}", -1.0), ("√{}", 0.5), ("1/√{}", -0.5)):
        likely |= {form.format(name): [each[name] ** power for each in sizes] for name in sizes[0]}
    for name, expected in likely.items():
        for sign in (1, -1):
            if all(math.isclose(sign * v, e, rel_tol=1e-5) for v, e in zip(values, expected, strict=True)):
                return f"{'-' * (sign < 0)}{name}"
    same = all(math.isclose(value, values[0], rel_tol=1e-5) for value in values)
    return f"{values[0]:.4g}" if same and len(values) > 1 else ""


def first_difference(name: str, pairs: Pairs, tolerance: float) -> str:
    """The first number that differs; the rows or columns, if only few differ; and the direction."""
    own, right = next((own.double(), right.double()) for own, right in pairs if not close(own, right, tolerance))
    bad = ~torch.isclose(own, right, rtol=0, atol=tolerance * right.nan_to_num(0, 0, 0).abs().max().item(), equal_nan=True)
    indices, cosine = bad.nonzero(), torch.cosine_similarity(own.flatten(), right.flatten(), dim=0).item()
    first = tuple(indices[0].tolist())
    words = f"differs in {len(indices)} of {bad.numel()} numbers, first at {list(first)}: {own[first].item():.9g}, where"
    words += f" {right[first].item():.9g} is right"
    for axis, size in enumerate(bad.shape):
        some = indices[:, axis].unique().tolist()
        words += f"; on axis {axis} only at {', '.join(map(str, some))}" * (len(some) <= size // 2)
    return words + (f"; the cosine of both is {cosine:.3f}" if bad.numel() > 1 and own.isfinite().all() else "")
