"""Attention's kernels: right in the interpreter (float32), and without spills when compiled for GPUs that are not there.

    TRITON_INTERPRET=0 python -m tests.kernels.test_attention_kernels [all]      prints what each configuration costs

The interpreter's products of 16-bit inputs are garbage: those are checked on a GPU.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from handgrad.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.dropout.masks import Dropout
from handgrad.fp8_shape import WIDEST_HEAD_OF_FP8
from handgrad.ops import reference
from handgrad.ops.cuda import attention_triton
from handgrad.ops.cuda.attention_configs import CONFIGS, Config, shipped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2.0**-24
GARBAGE = 255  # bytes that are NaN as float32

# Queries per tile more and fewer than keys; and the shipped ones, as many of both.
TILES = {"wide": Config(32, 16, 4, 1), "tall": Config(16, 32, 4, 1), "shipped": None}


@pytest.fixture(params=TILES)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TILES[request.param]
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(dtype: torch.dtype, B: int, T: int, H: int, D: int, *, kernels: bool, p: float = 0.0) -> list[Tensor]:
    """out, lse and dqkv over NaN-filled buffers, from the same random inputs, of float32's precision. `p`: dropout's."""
    N, C = B * T, H * D
    site = (Dropout(torch.arange(B, device=DEVICE) + (1 << 32) - 1, p, 1337, 4),) if p else ()
    qkv, dout = (randn(*shape, seed=seed).float().to(DEVICE, dtype) for seed, shape in enumerate([(N, 3 * C), (N, C)]))
    out, lse, dqkv = (torch.full(s, math.nan, dtype=dtype, device=DEVICE) for s in [(N, C), (B, H, T), (N, 3 * C)])
    if kernels:
        ops = dropout_kernels if p else attention_triton
        size = attention_triton.attention_scratch_bytes(batch=B, length=T, num_heads=H)
        scratch = torch.full((size + 16,), GARBAGE, dtype=torch.uint8, device=DEVICE)
        ops.attention_forward(out, lse, qkv, *site)
        ops.attention_backward(dqkv, dout, out, lse, qkv, *site, scratch=scratch)
        assert (scratch[size:] == GARBAGE).all()
    else:
        ops = dropout_reference if p else reference
        ops.attention_forward(out, lse, qkv, *site)
        ops.attention_backward(dqkv, dout, out, lse, qkv, *site)
    return [out, lse, *dqkv.view(N, 3, C).unbind(1)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("B", "T", "H", "D"),
    [
        *((1, 1, 1, 16), (2, 37, 3, 16), (1, 96, 2, 64), (2, 70, 2, 24), (1, 33, 1, 128), (1, 128, 1, 16), (3, 64, 1, 8)),
        *((1, 70, 1, 80), (2, 33, 1, 96), (1, 64, 2, 112), (1, 130, 1, 256), (2, 33, 1, 192)),
    ],
)
def test_float32(B: int, T: int, H: int, D: int) -> None:
    check_float32(B, T, H, D, 0.0)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("B", "T", "H", "D"), [(2, 37, 3, 16), (1, 70, 2, 24), (1, 33, 1, 128), (1, 33, 1, 256)])
def test_float32_with_dropout(B: int, T: int, H: int, D: int) -> None:
    check_float32(B, T, H, D, 0.3)


def check_float32(B: int, T: int, H: int, D: int, p: float) -> None:
    """As exact as the reference in float32, up to a factor of two and one rounding."""
    exact = run(torch.float64, B, T, H, D, kernels=False, p=p)
    plain = run(torch.float32, B, T, H, D, kernels=False, p=p)
    found = run(torch.float32, B, T, H, D, kernels=True, p=p)
    for name, e, p, f in zip(("out", "lse", "dq", "dk", "dv"), exact, plain, found, strict=True):
        # One token attends to itself alone: dq and dk are zero but for rounding, relative to nothing.
        floor = ROUNDING * (e.norm() if T > 1 else math.sqrt(D) * 8)
        error, allowed = (f - e).norm(), 2 * (p - e).norm() + floor
        assert torch.isfinite(f).all() and error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.usefixtures("tiles")
def test_masks_are_the_references() -> None:
    """Queries of zero look at all keys alike: values that are unit vectors show which keys were kept, and output gradients
    that are unit vectors show the same in the values' gradient."""
    B, T, H, D = 2, 64, 2, 64
    site = Dropout(torch.arange(B, device=DEVICE) + (1 << 32) - 1, 0.3, 1337, 4)
    unit = torch.eye(D, device=DEVICE)[None, :, None].expand(B, T, H, D)
    qkv = torch.stack([torch.zeros_like(unit), torch.zeros_like(unit), unit], 2).reshape(B * T, 3 * H * D)
    out, dqkv, lse = torch.empty(B * T, H * D), torch.empty(B * T, 3 * H * D), torch.empty(B, H, T)
    out, dqkv, lse = (t.fill_(math.nan).to(DEVICE) for t in (out, dqkv, lse))
    size = attention_triton.attention_scratch_bytes(batch=B, length=T, num_heads=H)
    scratch = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    dropout_kernels.attention_forward(out, lse, qkv, site)
    dropout_kernels.attention_backward(dqkv, unit.reshape(B * T, H * D), out, lse, qkv, site, scratch=scratch)
    mask = (
        torch.stack([dropout_reference.attention_mask(torch.empty(H, T, T, device=DEVICE), site, b) for b in range(B)]) > 0
    )
    mask &= torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
    assert torch.equal(out.view(B, T, H, D).transpose(1, 2) > 0, mask)
    assert torch.equal(dqkv.view(B, T, 3, H, D)[:, :, 2].permute(0, 2, 3, 1) > 0, mask)


def test_scratch_is_checked() -> None:
    tensors = [torch.zeros(shape, device=DEVICE) for shape in [(16, 48), (16, 16), (16, 16), (1, 1, 16), (16, 48)]]
    with pytest.raises(AssertionError, match="scratch holds"):
        attention_triton.attention_backward(*tensors, scratch=torch.zeros(64, dtype=torch.uint8, device=DEVICE))


RANDOM = {"samples": "*i64:16", "stream": "i32", "threshold": "i32", "dropout_scale": "fp32"}
FORMATS = {"fp8e4nv": (448.0, 2.0**-10), "fp8e5": (57344.0, 2.0**-17)}
KINDS = {"plain": "ops.cuda.attention_triton", "grouped": "ops.cuda.attention_triton", "dropout": "dropout.cuda.attention"}
KINDS |= dict.fromkeys(FORMATS, "fp8.cuda.attention")
DOCUMENTS = " with documents"  # behind a kind
OLDER = "dkdv", 256  # its tiles have too few rows for Hopper's tensor-core instructions: they run Ampere's
# With documents. (kernel, head width, inputs of 16 bits), and the bytes of a thread: float32 is no precision for speed.
SPILLING, SPILLED = {("dkdv", 256, False)}, 288


def arguments(kernel, D: int, dtype: str, config: Config, *, tail: bool, kind: str) -> tuple[dict, dict, dict]:
    """(signature, constants, options) of a kernel as it is launched at GPT-2's sizes; of `kind` fp8e4nv and fp8e5, that
    write a gradient in fp8 alone."""
    kind, documents = kind.removesuffix(DOCUMENTS), kind.endswith(DOCUMENTS)
    types = {
        "starts": "*i32:16",
        "lse": "*fp32:16",
        "sums": "*fp32:16",
        "H": "i32",
        "T": "i32" if tail else "i32:16",
        "C": "i32:16",
    }
    types |= {"row_stride": "i32:16", "N": types["T"], "PARTS": "i32:16", "scaling": "*fp32", "statistics": "*fp32"}
    types |= {"rows": f"*{kind}:16", "columns": f"*{kind}:16", **RANDOM}
    signature = {name: types.get(name, f"*{dtype}:16") for name in kernel.arg_names}
    constants = {"D": D, "WIDTH": D, "QUERIES": config.queries, "KEYS": config.keys, "TAIL": tail}
    constants |= {"GROUP": 4} if kind == "grouped" else {}
    constants |= {"starts": None} if "starts" in kernel.arg_names and not documents else {}
    if kind in FORMATS:
        largest, vanishes_at = FORMATS[kind]
        constants |= {"LARGEST": largest, "VANISHES_AT": vanishes_at}
        constants |= {"dqkv": None} if "dqkv" in kernel.arg_names else {}
    return signature, constants, {"maxnreg": config.registers} if config.registers else {}


def compiled_table(*, everything: bool) -> list[dict]:
    """The cost of each shipped configuration. `everything`: also fp16, and lengths that leave a tail."""
    from tests.kernels.compiling import SHARED_LIMIT, compile_kernel

    modules = {kind: importlib.import_module(f"handgrad.{module}") for kind, module in KINDS.items()}

    def cost(case: tuple) -> dict:
        (name, D, narrow, newer), config, kind, dtype, arch, tail = case
        base = kind.removesuffix(DOCUMENTS)
        kernel = getattr(modules[base], "grouped_dkdv_kernel" if (base, name) == ("grouped", "dkdv") else f"{name}_kernel")
        if kind != "plain":
            groups = {"grouped": base == "grouped", "documents": kind != base}
            config = shipped(name, D, narrow=narrow, newer=newer, **groups)
        signature, constants, options = arguments(kernel, D, dtype, config, tail=tail, kind=kind)
        made = compile_kernel(kernel, signature, constants, config.warps, config.stages, arch, **options)
        return {
            "kernel": f"{kind} {name} D {D} sm_{arch} {dtype}{' tail' * tail} {tuple(config)}",
            "registers": made["registers"],
            "stack": made["stack"],
            "shared": made["shared"],
            "limit": SHARED_LIMIT[arch if newer else 86],
            "most_stack": SPILLED if (name, D, narrow) in SPILLING and kind != base else 32 * (tail or kind != base),
            "wgmma": "wgmma.mma_async" in made["ptx"] if arch == 90 and narrow and (name, D) != OLDER else None,
            "serialized": made["serialized"],
        }

    cases = []
    for (name, D), narrow, newer in product(CONFIGS, (True, False), (True, False)):
        config = shipped(name, D, narrow=narrow, newer=newer)
        dtypes = (("bf16", "fp16") if everything else ("bf16",)) if narrow else ("fp32",)
        tails = (False, True) if everything else (False,)
        architectures = (90, 100) if newer else (80,)
        kinds = ("plain", "dropout") if narrow and (D == 64 or everything) else ("plain",)
        cuts = list(product(kinds, dtypes, architectures, tails))
        if narrow or not newer or everything:
            cuts += product((f"plain{DOCUMENTS}",), dtypes, architectures[: 2 if everything else 1], tails)
        if narrow and newer:  # Triton (3.6, 3.7) compiles the statistics' reductions to one number not for sm_100
            more = f"fp8e4nv{DOCUMENTS}", f"grouped{DOCUMENTS}", f"dropout{DOCUMENTS}"
            fp8 = FORMATS if D <= WIDEST_HEAD_OF_FP8 else ()
            cuts += product((*fp8, "grouped", *more[not fp8 :]), ("bf16",), (90,), tails)
        cases += [((name, D, narrow, newer), config, *cut) for cut in cuts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(cost, cases))


def test_shipped_configurations_compile() -> None:
    """No spills, within shared memory, and on Hopper with its own tensor-core instructions."""
    command = [sys.executable, "-m", "tests.kernels.test_attention_kernels"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 135
    check(rows)


def check(rows: list[dict]) -> None:
    for row in rows:
        # Lengths that leave a tail, and documents, may keep a few words outside the loops in memory.
        assert row["stack"] <= row["most_stack"] and row["shared"] <= row["limit"], row
        assert row["wgmma"] in (None, True) and not row["serialized"], row


if __name__ == "__main__":
    table = compiled_table(everything="all" in sys.argv)
    print("\n".join(map(json.dumps, table)))
    check(table)
