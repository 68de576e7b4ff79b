"""Step 15: a Triton kernel, in the interpreter and compiled for a GPU that need not be here."""

import json
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

import torch
import triton

from handgrad.errors import UsageError
from handgrad.ops import reference
from handgrad.ops.reference.layernorm import LAYERNORM_EPSILON
from handgrad.tools.climb import RIGHT, Case, at_line, diagnosis

FILLER, ROWS = 3.25, 2  # rows of FILLER behind each tensor: what an unmasked access reads or spoils


def cases():
    draw = torch.Generator().manual_seed(0)
    single, half = torch.float32, torch.bfloat16
    for N, C, dtype, size, shift in (
        (3, 5, single, 0.01, 0.03),
        (2, 13, single, 1.0, -2.0),
        (2, 9, half, 1.0, 1.0),
        (2, 7, single, 1.0, 500.0),
    ):
        x, w, b = (
            (torch.randn(*shape, generator=draw) * by + add).to(dtype)
            for shape, by, add in (((N, C), size, shift), ((C,), 1, 0), ((C,), 1, 0))
        )
        yield Case({"C": C}, x=x, weight=w, bias=b, N=N, C=C, block=triton.next_power_of_2(C), shift=shift)


def spaced(t, C):
    """The tensor, flat, with FILLER behind it."""
    return torch.cat([t.flatten(), torch.full((ROWS * C + 16,), FILLER, dtype=t.dtype)])


def launched(kernel, c):
    """The kernel's y with all behind it."""
    y = torch.full_like(spaced(c.x, c.C), FILLER)
    y[: c.N * c.C] = torch.nan
    tensors = [spaced(t, c.C) for t in (c.x, c.weight, c.bias)]
    kernel[(c.N,)](y, *tensors, c.C, LAYERNORM_EPSILON, BLOCK=c.block)
    return y


def right(c):
    y, statistics = torch.empty(c.N, c.C, dtype=torch.float64), torch.empty(2, c.N, dtype=torch.float64)
    reference.layernorm_forward(y, *statistics, c.x.double(), c.weight.double(), c.bias.double())
    return y.to(c.x.dtype)


def norm(c, *, size=None, mean_size=None, pad=0, divide=None, x=None, keep_mean=False):
    """y where a mistake may count otherwise; `pad`: padded columns that enter the variance as -mean."""
    x = c.x.double() if x is None else x
    mean = x.sum(1, keepdim=True) / (mean_size or c.C)
    centred = x if keep_mean else x - mean
    variance = ((centred**2).sum(1, keepdim=True) + pad * mean**2) / (size or c.C)
    normal = centred / (divide(variance) if divide else (variance + LAYERNORM_EPSILON).sqrt())
    return (normal[:, : c.C] * c.weight.double() + c.bias.double()).to(c.x.dtype)


def unmasked(c):
    """Rows as an unmasked load sees them: the next row's numbers behind."""
    flat = spaced(c.x, c.C).double()
    return torch.stack([flat[row * c.C : row * c.C + c.block] for row in range(c.N)])


MISTAKES = (
    ("y", "lets the padded columns into the variance: they are minus the mean after the subtraction, mask once more", lambda c: norm(c, pad=c.block - c.C)),
    ("y", "divides both sums by BLOCK: a row has C channels", lambda c: norm(c, size=c.block, mean_size=c.block)),
    ("y", "divides both sums by BLOCK, and lets the padded columns into the variance", lambda c: norm(c, size=c.block, mean_size=c.block, pad=c.block - c.C)),
    ("y", "divides the mean by BLOCK: a row has C channels", lambda c: norm(c, mean_size=c.block)),
    ("y", "divides the variance by BLOCK: a row has C channels", lambda c: norm(c, size=c.block)),
    ("y", "divides the variance by C - 1", lambda c: norm(c, size=c.C - 1)),
    ("y", "lacks epsilon", lambda c: norm(c, divide=torch.sqrt)),
    ("y", "adds epsilon to the deviation: it belongs under the root", lambda c: norm(c, divide=lambda v: v.sqrt() + LAYERNORM_EPSILON)),
    ("y", "divides by the variance: take its root", lambda c: norm(c, divide=lambda v: v + LAYERNORM_EPSILON)),
    ("y", "does not take the mean away", lambda c: norm(c, keep_mean=True)),
    ("y", "reads past the row: the load needs a mask", lambda c: norm(c, x=unmasked(c))),
    ("y", "reads row 0 in every program: add the row's offset", lambda c: norm(c, x=c.x[:1].double().expand(c.N, -1))),
    ("y", "lacks the bias", lambda c: norm(Case({}, x=c.x, weight=c.weight, bias=c.bias * 0, C=c.C))),
    ("y", "lacks the weight", lambda c: norm(Case({}, x=c.x, weight=c.weight * 0 + 1, bias=c.bias, C=c.C))),
    ("y", "adds the bias before the weight multiplies", lambda c: norm(Case({}, x=c.x, weight=c.weight, bias=c.bias.double() * c.weight.double(), C=c.C))),
)  # fmt: skip


def grade(path: Path) -> dict[str, str]:
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile_it, path)
        kernel, found = runpy.run_path(str(path))["triton_layer_norm"], []
        every = list(cases())
        try:
            found = [launched(kernel, c) for c in every]
        except Exception as error:  # the reader's kernel may raise anything
            raise UsageError(f"{at_line(error.__cause__ or error, path)} (in the interpreter)") from None
        pairs = [(y[: c.N * c.C].view(c.N, c.C), right(c)) for y, c in zip(found, every, strict=True)]
        verdicts = {"y": verdict(every, pairs)}
        spoilt = any((y[c.N * c.C :] != FILLER).any() for y, c in zip(found, every, strict=True))
        verdicts["memory"] = "behind y is written: the store needs a mask" if spoilt else RIGHT
        return verdicts | compiled.result()


def verdict(every: list[Case], pairs: list) -> str:
    """float32 to four digits, then bf16 to its last bit, then a row whose mean is 500 times its deviation to three digits."""
    for places, tolerance, instead in (
        ([0, 1], 1e-4, ""),
        ([2], 2.0**-7, "is right in float32 alone: convert bf16 after each load, and compute in float32"),
        ([3], 1e-3, "loses digits where the mean is large: subtract the mean before you square, not after"),
    ):
        table = SimpleNamespace(MISTAKES=MISTAKES, TOLERANCE=tolerance)
        words = diagnosis(table, "y", [every[n] for n in places], [pairs[n] for n in places])
        if words != RIGHT:
            return instead or words
    return RIGHT


def compile_it(path: Path) -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernel.py")), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {"compiled": f"does not compile for a GPU: {lines[-1].strip() if lines else done.returncode}"}
    cost = json.loads(done.stdout)
    shown = f"{cost['registers']} registers, {cost['shared']} bytes of shared memory, {cost['spills']} spills on an H100"
    needed = 3 * 1024 * 2  # x, weight and bias in bf16
    if cost["spills"]:
        return {"compiled": f"spills registers to memory: {shown}"}
    if cost["read"] > needed:
        return {
            "compiled": f"reads {cost['read']} bytes a row, where {needed} are enough: keep the row in registers ({shown})"
        }
    print(f"compiled: {shown}, {cost['read']} bytes read a program")
    return {"compiled": RIGHT}
