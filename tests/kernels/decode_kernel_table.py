"""The kernels of generation as they are launched at GPT-2's sizes, compiled without a GPU.

    python -m tests.kernels.decode_kernel_table      prints what they cost as JSON

Needs a process without TRITON_INTERPRET.
"""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import triton

from handgrad.ops.cuda import choosing, decode, rotary
from tests.kernels.compiling import compile_kernel

ARCHITECTURES = (80, 90, 100)
PLAIN = {"RMS_NORM": False, "RELU2": False}
POINTERS = (
    "out",
    "x",
    "ln_weight",
    "ln_bias",
    "weight",
    "bias",
    "residual",
    "keys",
    "values",
    "qkv",
    "logits",
    "wte",
    "wpe",
)
SIGNATURE = dict.fromkeys(POINTERS, "*bf16:16")
SIGNATURE |= dict.fromkeys(("positions", "tokens", "tokens_out", "seeds"), "*i64:16")
SIGNATURE |= dict.fromkeys(("values_out", "largest", "rstd"), "*fp32:16") | dict.fromkeys(
    ("ids", "ids_out", "broken", "broken_out"), "*i32:16"
)
SIGNATURE |= dict.fromkeys(("O", "K", "C", "maxT", "D", "stride"), "i32:16") | dict.fromkeys(
    ("H", "V", "parts", "N", "length"), "i32"
)
SIGNATURE |= dict.fromkeys(("SCALE", "temperature", "penalty", "least"), "fp32")


def launches() -> dict[str, tuple[triton.JITFunction, dict[str, object], int]]:
    """name: (kernel, its constants, warps), as the operations launch them."""
    found: dict[str, tuple[triton.JITFunction, dict[str, object], int]] = {}
    for name, O, K, absent in (
        *(("RMS norm, qkv", 2304, 768, ("residual",)), ("RMS norm, relu2", 3072, 768, ("residual",))),
        ("residual without bias", 768, 3072, ()),
    ):
        rows, block, warps = decode.product_tile(O, K)
        constants = {"ROWS": rows, "BLOCK": block, "LATE": name == "RMS norm, qkv", "GELU": False}
        constants |= {"RMS_NORM": "norm" in name, "RELU2": "relu2" in name}
        found[name] = decode._row_product, constants | dict.fromkeys(("ln_weight", "ln_bias", "bias", *absent)), warps
    for C, H, D in ((768, 12, 64), (768, 6, 128), (1600, 16, 100), (2048, 8, 256)):
        heads, pairs, warps = rotary.tile(2 * H, D, 2, rotary.FORWARD_BYTES_PER_WARP)
        constants = {"C3": 3 * C, "HEADS": 2 * H, "D": D, "BLOCK_H": heads, "BLOCK_P": pairs, "ROTARY": True}
        constants |= {"SCALE": 1.0, "frequencies": None}
        found[f"QK-norm and rotation of {H} heads"] = rotary._forward, constants, warps
    nothing = {"ln_weight": None, "ln_bias": None, "residual": None}
    for C in (768, 1600):
        for name, O, K in (("qkv", 3 * C, C), ("proj", C, C), ("fc", 4 * C, C), ("fcproj", C, 4 * C), ("head", 50304, C)):
            rows, block, warps = decode.product_tile(O, K)
            absent = set(nothing) - ({"residual"} if "proj" in name else {"ln_weight", "ln_bias"})
            constants = {"ROWS": rows, "BLOCK": block, "LATE": name == "qkv", "GELU": name == "fc", **PLAIN}
            absent |= {"bias"} if name == "head" else set()
            found[f"{name} of {C}"] = decode._row_product, constants | dict.fromkeys(absent), warps
    for name, (elements, warps) in {"few": decode.FEW_ATTENTIONS, "many": decode.MANY_ATTENTIONS}.items():
        found[f"attention, {name}"] = decode._attention, {"KEYS": elements // 64, "BLOCK": 64, "GROUP": 1}, warps
        found[f"grouped attention, {name}"] = decode._attention, {"KEYS": elements // 64, "BLOCK": 64, "GROUP": 3}, warps
        wide = {"KEYS": elements // 256, "BLOCK": 256, "GROUP": 4}
        found[f"grouped attention of 256, {name}"] = decode._attention, wide, max(warps, 4)
    found["embedding"] = decode._embedding, {"BLOCK": 1024}, 2
    found["token embedding"] = decode._embedding, {"BLOCK": 1024, "positions": None, "wpe": None}, 2
    found["greatest"] = choosing._greatest, {"seen": None, "BLOCK": choosing.CHOICES}, 4
    found["draw"] = choosing._draw, {"seen": None, "BLOCK": choosing.CHOICES, "PARTS": 64}, 4
    found["join"] = choosing._join, {"seen": None, "PARTS": 64}, 1
    return found


def compiled(name: str, arch: int) -> dict[str, object]:
    kernel, constants, warps = launches()[name]
    signature = dict(SIGNATURE)
    if name == "join":
        signature["values"] = "*fp32:16"
    overlaps = arch >= 90
    options = {"launch_pdl": True} if overlaps else {}
    result = compile_kernel(kernel, signature, constants | {"OVERLAPS": overlaps}, warps, 3, arch, **options)
    before, _, _ = result["ptx"].partition("griddepcontrol.wait")
    widths = [int(v or 1) * int(b) // 8 for v, b in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", before)]
    return {
        "kernel": name,
        "arch": arch,
        "registers": result["registers"],
        "stack": result["stack"],
        "weight_bytes_before_waiting": 32 * warps * sum(w for w in widths if w == 16) if overlaps else None,
        "tile_bytes": 2 * int(constants.get("ROWS", 0)) * int(constants.get("BLOCK", 0)),
    }


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(compiled, name, arch) for name in launches() for arch in ARCHITECTURES]
        json.dump([job.result() for job in jobs], sys.stdout, indent=1)
