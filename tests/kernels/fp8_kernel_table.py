"""Every kernel that quantises as it is launched at GPT-2's sizes, compiled without a GPU (`tables`)."""

import triton

from handgrad.joins.fp8 import formats as fp8
from handgrad.joins.fp8.cuda import classifier, layernorm, quantizing
from handgrad.joins.fp8.sizes import QUANTIZE_TILE
from handgrad.ops.sizes import backward_tile, forward_tile
from tests.kernels.compiling import compile_kernel
from tests.kernels.memory_kernel_table import CHANNELS, FIXED_POINTERS, NUMBERS, V, Vp

ARCHITECTURES = (90, 100)
TYPES = {"fp8e4nv": fp8.E4M3, "fp8e5": fp8.E5M2}
UNALIGNED = dict.fromkeys(("scaling", "statistics", "history"), "*fp32")
UNALIGNED |= {"totals": "*fp64", "report": "*fp64", "largest_exponents": "*i32"}


def launches(C: int, form: str) -> dict[str, tuple[triton.JITFunction, dict[str, object], int]]:
    """name: (kernel, its constants, warps), as the operations launch them."""
    kind = TYPES[form]
    limits = {"LARGEST": fp8.LARGEST_MANTISSA * 2.0 ** fp8.LARGEST_EXPONENT[kind], "VANISHES_AT": fp8.VANISHES_AT[kind]}
    block, rows, warps = forward_tile(C)
    _, back_block, back_rows, back_warps, stages = backward_tile(1 << 16, C, 2)
    forward = {"C": C, "BLOCK_C": block, "ROWS": rows, **limits}
    backward = {"C": C, "BLOCK_C": back_block, "ROWS": back_rows, "BELOW": True, "STAGES": stages}
    softmax = {"V": V, "Vp": Vp, "CAP": 0.0}
    tile = {"ROWS": QUANTIZE_TILE[0], "COLUMNS": QUANTIZE_TILE[1]}
    window = {"WINDOW": 16, "BLOCK": 16, "COUNT_EVERY": 100, "SATURATION_STEPS": 3, "WIDEN": True}
    parts = {"BLOCK": quantizing.PARTS_BLOCK}
    return {
        "quantize": (quantizing._quantize, {**tile, **limits}, quantizing.WARPS),
        "quantize, amax": (quantizing._quantize, {**tile, **limits, "rows": None, "columns": None}, quantizing.WARPS),
        "quantize, rows": (quantizing._quantize, {**tile, **limits, "columns": None}, quantizing.WARPS),
        "transpose": (quantizing._transpose, tile, quantizing.WARPS),
        "count_numbers": (quantizing._count_numbers, {"BLOCK": quantizing.COUNT_BLOCK, **limits}, quantizing.WARPS),
        "rescale": (quantizing._rescale, {**parts, "LARGEST_EXPONENT": 8}, quantizing.PARTS_WARPS),
        "fold_statistics": (quantizing._fold_statistics, parts, quantizing.PARTS_WARPS),
        "update_scaling": (quantizing._update_scaling, window, 1),
        "layernorm_forward": (layernorm._forward, {**forward, "out": None}, warps),
        "layernorm_forward, both": (layernorm._forward, forward, warps),
        "layernorm_backward": (layernorm._backward, backward, back_warps),
        "classifier_forward_backward": (classifier._forward_backward, {**softmax, "IN_PLACE": False}, classifier.WARPS),
        "classifier_forward_backward, both": (
            classifier._forward_backward,
            {**softmax, "IN_PLACE": True},
            classifier.WARPS,
        ),
    }


def compile_one(job: tuple[str, int, str, str, int]) -> dict[str, object]:
    name, C, dtype, form, arch = job
    kernel, constants, warps = launches(C, form)[name]
    types = {**FIXED_POINTERS, "rows": f"*{form}", "columns": f"*{form}", **NUMBERS, "C": "i32:16"}
    signature = {n: UNALIGNED.get(n) or types.get(n, f"*{dtype}").removesuffix(":16") + ":16" for n in kernel.arg_names}
    made = compile_kernel(kernel, signature | {"PARTS": "i32"}, constants, warps, 3, arch)
    return {"kernel": name, "C": C, "dtype": dtype, "form": form, "arch": arch, "warps": warps, **made}


def jobs_of_tests() -> list[tuple[str, int, str, str, int]]:
    """Kernels without C among their constants are compiled once."""
    found = []
    for name, (_, constants, _) in launches(768, "fp8e4nv").items():
        for C in CHANNELS if "C" in constants else CHANNELS[:1]:
            found += [
                (name, C, dtype, form, arch) for dtype in ("bf16", "fp16") for form in TYPES for arch in ARCHITECTURES
            ]
    return found
