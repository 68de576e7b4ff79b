"""Muon's kernels as they are launched for the matrices of GPT-2, compiled without a GPU (`tables`)."""

import triton

from handgrad.ops.cuda import muon
from handgrad.ops.sizes import MOMENT_ROWS, SUM_ELEMENTS
from tests.kernels.compiling import compile_kernel

ARCHITECTURES = (80, 90, 100)
TYPES = dict.fromkeys(("R", "C", "size", "elements", "row_stride", "column_stride"), "i32:16") | {"parts": "i32"}
TYPES |= dict.fromkeys(("scale", "added_scale", "x_scale", "norm"), "fp32") | dict.fromkeys(
    ("controls", "results"), "*fp64:16"
)
TYPES |= dict.fromkeys(("sums", "factors", "moments", "m_buffer", "gradient", "weight"), "*fp32:16")


def launches() -> dict[str, tuple[triton.JITFunction, dict[str, object], int, int]]:
    """name: (kernel, its constants, warps, stages), as the operations launch them."""
    tile = {"SIDE": muon.SIDE, "DEPTH": muon.DEPTH, "WHOLE": True}
    product = muon.PRODUCT_WARPS, muon.PRODUCT_STAGES
    wide, tall = {"column_stride": 1}, {"row_stride": 1}
    flat = {"BLOCK": muon.FLAT_ELEMENTS}
    moments = {"BETA2": 0.95, "ROWS": MOMENT_ROWS, "COLUMNS": muon.MOMENT_COLUMNS}
    weights = {"RATE": 4.0, "DECAY": 0.1, "PARTIALS": muon.PARTIALS}
    weights |= {"ROWS": muon.WEIGHT_ROWS, "COLUMNS": muon.WEIGHT_COLUMNS}
    return {
        "momentum": (muon._momentum, {**flat, "MOMENTUM": 0.95}, muon.FLAT_WARPS, 3),
        "squares": (muon._squares, {"BLOCK": SUM_ELEMENTS, "TILE": muon.FLAT_ELEMENTS}, muon.SUM_WARPS, 3),
        "normalize": (muon._normalize, {**flat, "PARTIALS": muon.PARTIALS}, muon.FLAT_WARPS, 3),
        "X X^T": (muon._symmetric, {**tile, **wide, "ADDS": False}, *product),
        "X X^T of a tall matrix": (muon._symmetric, {**tile, **tall, "ADDS": False}, *product),
        "b A + c A A": (muon._symmetric, {**tile, **wide, "ADDS": True}, *product),
        "a X + B X": (muon._product, {**tile, **wide}, *product),
        "a X + B X of a tall matrix": (muon._product, {**tile, **tall}, *product),
        "moments": (muon._moments, moments, muon.MOMENT_WARPS, 3),
        "weights": (muon._weights, {**weights, "PUBLISH": True}, muon.WEIGHT_WARPS, 3),
        "weights in place": (muon._weights, {**weights, "PUBLISH": False}, muon.WEIGHT_WARPS, 3),
    }


def compile_one(job: tuple[str, int]) -> dict[str, object]:
    name, arch = job
    kernel, constants, warps, stages = launches()[name]
    types = {argument: TYPES.get(argument, "*bf16:16") for argument in kernel.arg_names}
    limited = {"maxnreg": muon.HOPPER_REGISTERS} if "WHOLE" in constants and arch // 10 == muon.HOPPER else {}
    made = compile_kernel(kernel, types, constants, warps, stages, arch, **limited)
    return {"kernel": name, "arch": arch, "warps": warps, **made}


def jobs_of_tests() -> list[tuple[str, int]]:
    return [(name, arch) for name in launches() for arch in ARCHITECTURES]
