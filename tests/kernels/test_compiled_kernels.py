"""Cards that are not there: every kernel that is launched is among those that `benchmarks.compiled_kernels` compiles for
them, a sample of these compiles here, and the page has the record's figures."""

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import handgrad.ops.cuda
from benchmarks import compiled_kernels
from handgrad.errors import UsageError
from handgrad.joins.fp8.formats import E4M3, E5M2, largest_number
from handgrad.ops.cuda import attention_tiles
from tests.kernels import (
    attention_kernel_table as attention,
    decode_kernel_table as decode,
    memory_kernel_table as memory,
    modern_kernel_table as modern,
    muon_kernel_table as muon,
)

ROOT = Path(__file__).parents[2]


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def launched() -> set[Any]:
    """The kernels that the operations hand to a launch: named outside of kernels, and not called."""
    names = [info.name for info in pkgutil.iter_modules(handgrad.ops.cuda.__path__, f"{handgrad.ops.cuda.__name__}.")]
    found = set()
    for name in (*names, "handgrad.joins.dropout.cuda"):
        module = importlib.import_module(name)
        functions = [
            node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        kernels = {function.name for function in functions if is_kernel(function)}
        for function in (function for function in functions if not is_kernel(function)):
            uses = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            found |= {getattr(module, use) for use in uses & kernels}
    return found


def test_every_launched_kernel_is_compiled() -> None:
    """On sm_86, where all of them run but those of fp8."""
    launches = memory.launches(768), modern.launches(2), decode.launches(), muon.launches()
    tables = {kernel for table in launches for kernel, *_ in table.values()}
    tables |= {attention.kernel_of(name, kind) for name, _, kind, *_ in attention.cases_of(86, ("bf16",))}
    left = {f"{kernel.fn.__module__}.{kernel.fn.__name__}" for kernel in launched() - tables}
    assert left == set()
    assert len(launched()) > 40


def test_a_sample_compiles() -> None:
    """Within the cards' shared memory, and without spills."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "benchmarks.compiled_kernels", "--sample"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [row for dtypes in json.loads(process.stdout).values() for row in dtypes.values()]
    assert sum(row["kernels"] for row in rows) == len(compiled_kernels.SAMPLE)
    assert [row for row in rows if row["failed"] or row["over_the_limit"] or row["spilled_bytes"]] == []


def test_ada_rounds_by_way_of_float16_to_the_same_fp8() -> None:
    """Triton's conversion on sm_89, of every bf16 number that the format does not clip, at a scale of one: others move the
    exponent alone."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for form in (E4M3, E5M2):
        x = every[every.abs() <= largest_number(form)]
        once, twice = x.to(form), x.half().to(form)
        assert len(x) > 30_000 and torch.equal(once.view(torch.uint8), twice.view(torch.uint8))
    assert (torch.tensor(2.0**-10 + 2.0**-22).to(E4M3) != torch.tensor(2.0**-10 + 2.0**-22).half().to(E4M3)).item()


def test_the_page_has_the_records() -> None:
    """Nothing failed, nothing is beyond a card's shared memory, and the spills are those that the page names."""
    results = ROOT / "benchmarks" / "results"
    records = (results / f"compiled-kernels{more}.json" for more in ("", "-ada-blackwell"))
    figures = {card: row for path in records for card, row in json.loads(path.read_text())["figures"].items()}
    page = (ROOT / "docs" / "compatibility.md").read_text()
    expected = compiled_kernels.lines(figures)
    assert [line for line in page.splitlines() if line.startswith("| sm_")] == expected
    rows = [row for dtypes in figures.values() for row in dtypes.values()]
    assert len(rows) == 11 and not any(row["failed"] or row["over_the_limit"] for row in rows)


@pytest.mark.parametrize(("found", "widest"), [((7, 5), 128), ((8, 0), 256), ((9, 0), 256), ((12, 0), 256), (None, 256)])
def test_heads_that_a_card_takes(found: tuple[int, int] | None, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handgrad.ops.cuda, "capability_here", lambda: found)
    handgrad.ops.cuda.check_sizes(length=1024, num_heads=2, channels=2 * widest)
    with pytest.raises(UsageError, match=f"heads may have up to {widest} channels, found {widest + 8}"):
        handgrad.ops.cuda.check_sizes(length=1024, num_heads=2, channels=2 * widest + 16)


@pytest.mark.parametrize(
    ("found", "D", "config"),
    [
        ((7, 5), 64, (32, 32, 8, 1, None)),
        ((7, 5), 128, (16, 16, 4, 1, None)),
        ((8, 0), 64, (128, 64, 8, 2, None)),
        ((8, 6), 64, (128, 64, 8, 2, None)),
        ((8, 9), 64, (128, 64, 8, 2, None)),
        ((12, 0), 64, (128, 64, 8, 2, None)),
        ((12, 1), 128, (128, 32, 8, 2, None)),
        ((9, 0), 64, (64, 64, 4, 3, 128)),
        (None, 64, (128, 64, 8, 2, None)),
    ],
)
def test_tiles_of_a_card(found: tuple[int, int], D: int, config: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "capability", lambda device: found)
    assert attention_tiles.choose_config("forward", torch.empty(1, dtype=torch.float16), D) == config
