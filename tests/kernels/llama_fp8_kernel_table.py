"""The Llama family's kernels that write fp8 as they are launched at published sizes, compiled without a GPU (`tables`)."""

from handgrad.joins.fp8.cuda import activations, attention, elementwise, rmsnorm, rotary
from handgrad.joins.fp8.formats import VANISHES_AT, largest_number
from handgrad.joins.fp8.sizes import QUADS, QUADS_TILE, SWIGLU_TILE
from handgrad.ops.sizes import attention_tile, backward_tile, forward_tile
from tests.kernels.compiling import compile_kernel
from tests.kernels.modern_fp8_kernel_table import SIZES, TYPES, UNALIGNED, Launch

CHANNELS = (576, 640, 1024, 1536, 2048)  # 640: of Gemma 3 270M, whose gains are 1 + w
HEADS = ((9, 3, 64), (32, 8, 64), (16, 8, 128), (12, 2, 128))  # H, K, D: SmolLM2, Llama 3.2, Qwen3, Qwen2.5
DTYPES = SIZES | UNALIGNED | {"epsilon": "fp32", "partials": "*fp32:16", "frequencies": "*fp64:16", "lse": "*fp32:16"}
DTYPES |= {"H": "i32", "T": "i32:16", "C": "i32:16", "row_stride": "i32:16"}


def launches(form: str, *, newer: bool = True) -> dict[str, Launch]:
    """name: (kernel, its constants, warps), as the operations launch them; `newer`: on a data-centre GPU."""
    kind = TYPES[form]
    limits: dict[str, object] = {"LARGEST": largest_number(kind), "VANISHES_AT": VANISHES_AT[kind]}
    tile = {"EVEN": True, "QUADS": QUADS, "COLUMNS": QUADS_TILE[1]}
    forward = {"EVEN": True, "ROWS": SWIGLU_TILE[0], "COLUMNS": SWIGLU_TILE[1]}
    found: dict[str, Launch] = {
        "swiglu_forward": (activations._swiglu_forward, {**limits, **forward}, activations.WARPS),
        "swiglu_backward": (activations._swiglu_backward, {**limits, **tile}, elementwise.BACKWARD_WARPS),
    }
    for C in CHANNELS:
        block, rows, warps = forward_tile(C)
        constants = {**limits, "C": C, "BLOCK_C": block, "ROWS": rows, "PLUS": int(C == 640), "out": None}
        found[f"gained_rmsnorm_forward of {C}"] = rmsnorm._forward, constants, warps
        _, block, rows, warps, stages = backward_tile(1 << 16, C, 2)
        constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "STAGES": stages}
        found[f"gained_rmsnorm_backward of {C}"] = rmsnorm._gain_backward, constants, warps
    for H, K, D in HEADS:
        heads, (pairs, warps) = H + 2 * K, rotary.tile(D)
        sizes = {"HEADS": heads, "TURNED": H + K, "D": D, "QUADS": QUADS, "BLOCK_P": pairs, "plain": None}
        sizes |= {**limits, "TURN_SCALE": 1.0}
        sizes |= {"COLUMNS": heads * D, "QUERIES": H, "ROTARY": True}
        constants = sizes | dict.fromkeys(("rstd", "qkv", "q_gain", "k_gain", "partials"))
        found[f"rotary_backward of {H} heads of {D}"] = rotary._backward, constants, warps
        found[f"gained_qk_norm_backward of {H} heads of {D}"] = rotary._backward, sizes, warps
        config = attention_tile("forward", D, narrow=True, newer=newer, grouped=True)
        constants = {**limits, "D": D, "WIDTH": D, "QUERIES": config.queries, "KEYS": config.keys, "TAIL": False}
        constants |= {"GROUP": H // K, "starts": None}
        found[f"attention_forward of {H} heads of {D}"] = attention.forward_kernel, constants, config.warps
    return found


def compile_one(job: tuple[str, str, str, int]) -> dict[str, object]:
    name, dtype, form, arch = job
    newer = arch in (90, 100)
    kernel, constants, warps = launches(form, newer=newer)[name]
    forms = dict.fromkeys(("rows", "drows", "columns", "dcolumns"), f"*{form}:16")
    signature = {n: (DTYPES | forms).get(n, f"*{dtype}:16") for n in kernel.arg_names}
    stages, options = 3, {}
    if name.startswith("attention"):
        config = attention_tile("forward", int(name.split()[-1]), narrow=True, newer=newer, grouped=True)
        stages, options = config.stages, {"maxnreg": config.registers} if config.registers else {}
    made = compile_kernel(kernel, signature, constants, warps, stages, arch, **options)
    return {"kernel": name, "dtype": dtype, "form": form, "arch": arch, "warps": warps, **made}


def jobs_of_tests() -> list[tuple[str, str, str, int]]:
    """All in bf16 and e4m3 on Hopper, and some but attention's with another of the other values."""
    usual = [(name, "bf16", "fp8e4nv", 90) for name in launches("fp8e4nv")]
    some = [n for n in launches("fp8e5") if n.endswith(("12 heads of 128", "576", "ward")) and "attention" not in n]
    return usual + [(n, "fp16", "fp8e5", 100) for n in some]
