"""The modern network's kernels that write fp8 as they are launched at its presets' sizes, compiled without a GPU
(`tables`)."""

import triton

from handgrad.joins.fp8.cuda import activations, elementwise, mix, rmsnorm, rotary
from handgrad.joins.fp8.formats import E4M3, E5M2, VANISHES_AT, largest_number
from handgrad.joins.fp8.sizes import NONLINEARITY_ELEMENTS, QUADS, QUADS_TILE
from handgrad.ops.sizes import backward_tile, forward_tile, rmsnorm_backward_tile
from tests.kernels.compiling import compile_kernel
from tests.kernels.modern_kernel_table import SCALARS

ARCHITECTURES = (90, 100)
TYPES = {"fp8e4nv": E4M3, "fp8e5": E5M2}
HEADS = ((12, 64), (6, 128), (24, 128), (16, 100))  # H, D
SIZES = dict.fromkeys(("elements", "N4", "F", "N", "length"), "i32:16") | {"PARTS": "i32"}
UNALIGNED = dict.fromkeys(("scaling", "inp_scaling", "statistics"), "*fp32") | {"rstd": "*fp32:16", "epsilon": "fp32"}

Launch = tuple[triton.JITFunction, dict[str, object], int]


def launches(form: str) -> dict[str, Launch]:
    """name: (kernel, its constants, warps), as the operations launch them."""
    kind = TYPES[form]
    limits: dict[str, object] = {"LARGEST": largest_number(kind), "VANISHES_AT": VANISHES_AT[kind]}
    tile = {"EVEN": True, "QUADS": QUADS, "COLUMNS": QUADS_TILE[1]}
    found: dict[str, Launch] = {
        "relu2_forward": (
            activations._relu2_forward,
            {**limits, "EVEN": True, "BLOCK": NONLINEARITY_ELEMENTS},
            activations.WARPS,
        ),
        "relu2_backward": (activations._relu2_backward, {**limits, **tile}, elementwise.BACKWARD_WARPS),
    }
    for C in (768, 1600, 3072):
        block, rows, warps = forward_tile(C)
        constants = {**limits, "C": C, "BLOCK_C": block, "ROWS": rows, "PLUS": 0, "out": None}
        found[f"rmsnorm_forward of {C}"] = rmsnorm._forward, constants | {"gain": None}, warps
        block, rows, warps = rmsnorm_backward_tile(C)
        found[f"rmsnorm_backward of {C}"] = rmsnorm._backward, {"C": C, "BLOCK_C": block, "ROWS": rows}, warps
        for name, absent in SCALARS.items():
            block, rows, warps = forward_tile(C)
            constants = {**limits, "C": C, "BLOCK_C": block, "ROWS": rows, "out": None} | dict.fromkeys(absent)
            found[f"mix_rmsnorm_forward of {C}, {name}"] = mix._forward, constants, warps
            _, block, rows, warps, stages = backward_tile(1 << 16, C, 2)
            constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "STAGES": stages} | dict.fromkeys(absent)
            absent = [*absent, *(["dfirst"] if "first" in absent else [])]
            found[f"mix_rmsnorm_backward of {C}, {name}"] = mix._backward, constants | dict.fromkeys(absent), warps
    for H, D in HEADS:
        pairs, warps = rotary.tile(D)
        sizes = {
            "COLUMNS": 3 * H * D,
            "HEADS": 3 * H,
            "D": D,
            "QUERIES": H,
            "QUADS": QUADS,
            "BLOCK_P": pairs,
            "plain": None,
        }
        sizes |= {"TURNED": 2 * H, "TURN_SCALE": 1.0}
        sizes |= dict.fromkeys(("frequencies", "q_gain", "k_gain", "partials"))
        for name, absent, rotated in (
            ("qk_norm", {}, False),
            ("rotary", {"rstd": None, "qkv": None}, True),
            ("qk_norm_rotary", {}, True),
        ):
            constants = {**limits, **sizes, **absent, "ROTARY": rotated}
            found[f"{name}_backward of {H} heads of {D}"] = rotary._backward, constants, warps
    return found


def compile_one(job: tuple[str, str, str, int]) -> dict[str, object]:
    name, dtype, form, arch = job
    kernel, constants, warps = launches(form)[name]
    forms = dict.fromkeys(("rows", "drows", "columns", "dcolumns"), f"*{form}:16")
    signature = {n: (SIZES | UNALIGNED | forms).get(n, f"*{dtype}:16") for n in kernel.arg_names}
    made = compile_kernel(kernel, signature, constants, warps, 3, arch)
    return {"kernel": name, "dtype": dtype, "form": form, "arch": arch, "warps": warps, **made}


def jobs_of_tests() -> list[tuple[str, str, str, int]]:
    """All in bf16 and e4m3 on Hopper, and each with another of the other values."""
    usual = [(name, "bf16", "fp8e4nv", 90) for name in launches("fp8e4nv")]
    return usual + [(n, "fp16", "fp8e5", 100) for n in launches("fp8e5") if n.endswith(("128", "768", "ward"))]
