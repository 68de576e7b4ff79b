"""The kernels of generation as they are launched at GPT-2's sizes, compiled without a GPU (`tables`)."""

import triton

from handgrad.ops.cuda import attention_decode, choosing, decode, rotary, row_gemms
from handgrad.ops.sizes import CHOICES, attention_tile
from tests.kernels.compiling import compile_kernel

ARCHITECTURES = (80, 90, 100)
POINTERS = (
    "out",
    "x",
    "norm_weight",
    "norm_bias",
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
SIGNATURE |= dict.fromkeys(("values_out", "largest", "rstd", "sums", "tops", "totals"), "*fp32:16")
SIGNATURE |= dict.fromkeys(("ids", "ids_out", "broken", "broken_out", "arrivals"), "*i32:16")
SIGNATURE |= dict.fromkeys(("places", "chosen", "active", "slots"), "*i64:16")
SIGNATURE |= dict.fromkeys(("O", "K", "C", "T", "maxT", "D", "stride"), "i32:16") | dict.fromkeys(
    ("H", "V", "B", "parts", "N", "length"), "i32"
)
SIGNATURE["distance"] = "i64:16"
SIGNATURE |= dict.fromkeys(("SCALE", "temperature", "penalty", "least", "epsilon"), "fp32")


def launches(*, turing: bool = False) -> dict[str, tuple[triton.JITFunction, dict[str, object], int]]:
    """name: (kernel, its constants, warps), as the operations launch them; `turing`: on a GPU before Ampere."""
    found: dict[str, tuple[triton.JITFunction, dict[str, object], int]] = {}
    everything = ("norm_weight", "norm_bias", "bias", "residual")
    whole = dict.fromkeys(("sums", "tops", "totals", "arrivals")) | {"PARTS": 1}

    def product(name: str, O: int, K: int, *given: str, **constants: object) -> None:
        weights = 1 + (constants.get("ACTIVATION") == "swiglu")
        O //= weights
        rows, block, warps = row_gemms.gemm_tile(O, K, weights)
        plain = {
            "ROWS": rows,
            "BLOCK": block,
            "ACTIVATION": "",
            "RMS_NORM": False,
            "STAGES": row_gemms.stages_of(row_gemms.tiles_of(triton.cdiv(O, rows), weights)),
            "PLUS": 0,
        }
        absent = dict.fromkeys(set(everything) - set(given))
        found[name] = row_gemms._row_gemm, plain | constants | absent, warps

    product("RMS norm, qkv", 2304, 768, RMS_NORM=True)
    product("RMS norm, relu2", 3072, 768, RMS_NORM=True, ACTIVATION="relu2")
    product("residual without bias", 768, 3072, "residual")
    for name, C, F in (("576", 576, 1536), ("2048", 2048, 8192)):  # SmolLM2 135M, Llama 3.2 1B
        product(f"gained RMS norm, qkv of {name}", 3 * C, C, "norm_weight", RMS_NORM=True)
        product(f"gained RMS norm, SwiGLU of {name}", 2 * F, C, "norm_weight", RMS_NORM=True, ACTIVATION="swiglu")
        product(f"down of {name}", C, F, "residual")
        product(f"proj of {name}, without bias", C, C, "residual")
    product("SwiGLU of 2048, without a norm", 16384, 2048, ACTIVATION="swiglu")
    product("RMS norm of 1 + w, gates of 640", 4096, 640, "norm_weight", RMS_NORM=True, PLUS=1)
    product("proj of 4096", 4096, 4096, "residual")
    for C in (768, 1600):
        product(f"qkv of {C}", 3 * C, C, "norm_weight", "norm_bias", "bias")
        product(f"proj of {C}", C, C, "bias", "residual")
        product(f"fc of {C}", 4 * C, C, "norm_weight", "norm_bias", "bias", ACTIVATION="gelu")
        product(f"fcproj of {C}", C, 4 * C, "bias", "residual")
        product(f"head of {C}", 50304, C, "norm_weight", "norm_bias")
    for C, H, D in ((768, 12, 64), (768, 6, 128), (1600, 16, 100), (2048, 8, 256)):
        heads, pairs, warps = rotary.tile(2 * H, D, 2, rotary.FORWARD_BYTES_PER_WARP)
        constants = {"C3": 3 * C, "HEADS": 2 * H, "D": D, "BLOCK_H": heads, "BLOCK_P": pairs, "ROTARY": True}
        constants |= {"SCALE": 1.0, "frequencies": None}
        found[f"QK-norm and rotation of {H} heads"] = rotary._forward, constants, warps
    for name, (elements, warps) in {
        "few": attention_decode.FEW_ATTENTIONS,
        "many": attention_decode.MANY_ATTENTIONS,
    }.items():
        found[f"attention, {name}"] = (
            attention_decode._attention,
            whole | {"KEYS": elements // 64, "BLOCK": 64, "GROUP": 1, "WINDOW": 0},
            warps,
        )
        found[f"grouped attention, {name}"] = (
            attention_decode._attention,
            whole | {"KEYS": elements // 64, "BLOCK": 64, "GROUP": 3, "WINDOW": 0},
            warps,
        )
        wide = whole | {"KEYS": elements // 256, "BLOCK": 256, "GROUP": 4}
        for window in (0, 512):
            kernel = f"grouped attention of 256{', within a window' * bool(window)}, {name}"
            found[kernel] = attention_decode._attention, wide | {"WINDOW": window}, max(warps, 4)
    for D, group in ((64, 1), (64, 4)):
        tile = attention_tile("forward", D, narrow=True, newer=True, grouped=group > 1)
        constants = {"D": D, "QUERIES": tile.queries, "KEYS": tile.keys, "WIDTH": D, "GROUP": group}
        found[f"attention of {D} in tiles, {group} heads a key"] = (
            attention_decode._attention_in_tiles,
            constants,
            tile.warps,
        )
    for D, parts in ((64, 4), (64, 16), (128, 16)):
        elements, warps = attention_decode.FEW_OF_128 if D == 128 else attention_decode.FEW_ATTENTIONS
        constants = {
            "KEYS": elements // D,
            "BLOCK": D,
            "GROUP": 1,
            "PARTS": parts,
            "WINDOW": 4096 * (D == 64 and parts == 16),
        }
        found[f"a part of {parts}, heads of {D}"] = attention_decode._attention, constants, warps
    queries, keys, warps = attention_decode.TURING_APPEND_TILE if turing else attention_decode.APPEND_TILE
    for D, group in ((64, 1), (128, 1), (64, 4), (128, 2)):
        constants = {"QUERIES": queries, "KEYS": keys, "BLOCK": D, "GROUP": group, "WINDOW": 4096 * (group == 4)}
        name = f"attention of new tokens, heads of {D}, {group} to a key"
        found[name] = attention_decode._attention_append, constants, warps
    found["advance"] = decode._advance, {"BLOCK": 1}, 1
    found["embedding"] = decode._embedding, {"BLOCK": 1024}, 2
    found["token embedding"] = decode._embedding, {"BLOCK": 1024, "positions": None, "wpe": None}, 2
    found["greatest"] = choosing._greatest, {"seen": None, "BLOCK": CHOICES}, 4
    found["draw"] = choosing._draw, {"seen": None, "BLOCK": CHOICES, "PARTS": 64}, 4
    found["join"] = choosing._join, {"seen": None, "PARTS": 64}, 1
    return found


def compile_one(job: tuple[str, str, int]) -> dict[str, object]:
    name, dtype, arch = job
    kernel, constants, warps = launches(turing=arch < 80)[name]
    signature = SIGNATURE | dict.fromkeys(POINTERS, f"*{dtype}:16")
    if name == "join":
        signature["values"] = "*fp32:16"
    overlaps = arch >= 90
    options: dict[str, object] = {"launch_pdl": True} if overlaps else {}
    if kernel is row_gemms._row_gemm:
        options |= row_gemms.registers(constants["STAGES"], normed="norm_weight" not in constants)
    if "OVERLAPS" in kernel.arg_names:
        constants = constants | {"OVERLAPS": overlaps}
    made = compile_kernel(kernel, signature, constants, warps, 3, arch, **options)
    return {
        "kernel": name,
        "dtype": dtype,
        "arch": arch,
        **made,
        "weight_bytes_before_waiting": 32 * warps * 16 * made["wide_reads_before_waiting"] if overlaps else None,
        "warps": warps,
        "tile_bytes": tile_bytes(name, constants),
        "tiles": max(1, constants.get("STAGES", 0) - 1),
    }


def tile_bytes(name: str, constants: dict[str, object]) -> int:
    halves = 2 if constants.get("ACTIVATION") == "swiglu" else 1
    return 2 * halves * int(constants.get("ROWS", 0)) * int(constants.get("BLOCK", 0))


def jobs_of_tests() -> list[tuple[str, str, int]]:
    return [(name, "bf16", arch) for name in launches() for arch in ARCHITECTURES]
