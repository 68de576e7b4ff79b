"""The GELU kernels that write fp8, and the sums of fp8 rows, as they are launched at GPT-2's sizes, compiled
without a GPU (`tables`)."""

import math

from handgrad.joins.fp8.cuda import activations, elementwise, linear
from handgrad.joins.fp8.formats import E4M3, E5M2, LARGEST_EXPONENT, LARGEST_MANTISSA, VANISHES_AT
from handgrad.joins.fp8.sizes import NONLINEARITY_ELEMENTS, QUADS, QUADS_TILE
from tests.kernels.compiling import compile_kernel

ARCHITECTURES = (90, 100)
TYPES = {"fp8e4nv": E4M3, "fp8e5": E5M2}
SIZES = dict.fromkeys(("elements", "N4", "F", "O", "N"), "i32:16")
UNALIGNED = dict.fromkeys(("scaling", "inp_scaling", "statistics"), "*fp32")


def compile_one(job: tuple[str, str, str, bool, int]) -> dict[str, object]:
    name, dtype, form, even, arch = job
    kind = TYPES[form]
    largest = LARGEST_MANTISSA * 2.0 ** LARGEST_EXPONENT[kind]
    limits: dict[str, object] = {"LARGEST": largest, "VANISHES_AT": VANISHES_AT[kind], "EVEN": even}
    tile: dict[str, object] = {"QUADS": QUADS, "COLUMNS": QUADS_TILE[1]}
    sums: dict[str, object] = {name: getattr(linear, name) for name in ("ROWS", "COLUMNS", "STAGES")}
    forward, backward = activations.WARPS, elementwise.BACKWARD_WARPS
    kernel, constants, warps, elements = {
        "forward": (activations._gelu_forward, limits | {"BLOCK": NONLINEARITY_ELEMENTS}, forward, NONLINEARITY_ELEMENTS),
        "backward": (activations._gelu_backward, limits | tile, backward, math.prod(QUADS_TILE)),
        "sums": (linear._sum_fp8_rows, sums, linear.WARPS, 0),
    }[name]
    types = dict.fromkeys(("rows", "drows", "dcolumns"), f"*{form}:16") | {"columns": "*fp8e4nv:16", "sums_acc": "*fp32:16"}
    types |= dict.fromkeys(("hidden", "dgelu"), f"*{dtype}:16") | {"dout": f"*{form}:16", "PARTS": "i32"}
    signature = SIZES | UNALIGNED | types
    made = compile_kernel(kernel, {n: signature.get(n, "") for n in kernel.arg_names}, constants, warps, 3, arch)
    return {
        "kernel": name,
        "dtype": dtype,
        "form": form,
        "even": even,
        "arch": arch,
        "warps": warps,
        "lane_elements": elements // (32 * warps),
        **made,
    }


def jobs_of_tests() -> list[tuple[str, str, str, bool, int]]:
    return [
        (name, dtype, form, even, arch)
        for name in ("forward", "backward", "sums")
        for dtype in ("bf16", "fp16")
        for form in TYPES
        for even in (True, False)
        for arch in ARCHITECTURES
        if name != "sums" or (dtype == "bf16" and even)
    ]
