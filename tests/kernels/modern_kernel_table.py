"""The kernels of RMS norm, group norm, mixed streams, value embeddings, QK-norm, rotary positions, squared ReLU and a
softly capped classifier as they are launched at real sizes, compiled for Hopper without a GPU (`tables`)."""

import triton

from handgrad.networks.modern import GATE_CHANNELS
from handgrad.ops.cuda import activations, classifier, distill, embedding, groupnorm, mix, rmsnorm, rotary, value_embedding
from handgrad.ops.sizes import backward_tile, forward_tile, rmsnorm_backward_tile
from tests.kernels.compiling import compile_kernel
from tests.kernels.memory_kernel_table import NUMBERS

ARCHITECTURE = 90
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
V, Vp = 50257, 50304
SCALARS = {"both": [], "residual": ["first", "input_scalar"], "input": ["residual_scalar"]}  # and what is then absent
HEADS = {(768, 12, 64), (768, 6, 128), (1600, 16, 100)}  # C, H, D

TYPES = {**NUMBERS, "length": "i32"}
TYPES |= dict.fromkeys(("rstd", "losses", "scale", "gate", "partials"), "*fp32:16") | dict.fromkeys(
    ("targets", "positions", "tokens"), "*i64:16"
)
TYPES |= dict.fromkeys(("mean", "dweights", "dbiases"), "*fp32:16") | {"pixels": "i32:16"}
TYPES |= {"frequencies": "*fp64:16", "epsilon": "fp32", "F": "i32:16"}

Launch = tuple[triton.JITFunction, dict[str, object], int]


def launches(itemsize: int) -> dict[str, Launch]:
    """name: (kernel, its constants, warps), as the operations launch them."""
    found: dict[str, Launch] = {
        "relu2_forward": (activations._relu2_forward, {"BLOCK": activations.BLOCK}, activations.WARPS),
        "relu2_backward": (activations._relu2_backward, {"BLOCK": activations.BLOCK}, activations.WARPS),
    }
    softmax = {"V": V, "Vp": Vp, "CAP": 15.0}
    found["classifier_forward"] = classifier._forward, {**softmax, "PADDED": 64}, classifier.WARPS
    found["classifier_forward_backward"] = classifier._forward_backward, softmax, classifier.WARPS
    weighted = {**softmax, "UNTRAINED": True, "SCALES": 1}
    found["classifier_forward_backward of pairs"] = classifier._forward_backward, weighted, classifier.WARPS
    for reverse in (False, True):
        teacher = {**softmax, "CAP_Q": 30.0, "UNTRAINED": True, "SCALES": 0, "REVERSE": reverse}
        found[f"distill_forward_backward{', reverse' * reverse}"] = distill._distill, teacher, classifier.WARPS
    found["distill_forward_backward, no cap"] = (
        distill._distill,
        {**teacher, "CAP": 0.0, "CAP_Q": 0.0, "UNTRAINED": False},
        classifier.WARPS,
    )
    found["softcap_forward"] = classifier._cap, {"BLOCK": classifier.CAP_BLOCK, "CAP": 15.0}, classifier.WARPS
    for C in (768, 1600):
        block, rows, warps = forward_tile(C)
        constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "wpe": None}
        found[f"token_embedding_forward of {C}"] = embedding._forward, constants, warps
        block, rows, warps = forward_tile(C)
        constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "PLUS": 0, "STRIDE": C, "gain": None}
        found[f"rmsnorm_forward of {C}"] = rmsnorm._forward, constants, warps
        block, rows, warps = rmsnorm_backward_tile(C)
        found[f"rmsnorm_backward of {C}"] = rmsnorm._backward, {"C": C, "BLOCK_C": block, "ROWS": rows}, warps
        for name, absent in SCALARS.items():
            block, rows, warps = forward_tile(C)
            constants = {"C": C, "BLOCK_C": block, "ROWS": rows} | dict.fromkeys(absent)
            found[f"mix_rmsnorm_forward of {C}, {name}"] = mix._forward, constants, warps
            _, block, rows, warps, stages = backward_tile(1 << 16, C, itemsize)
            constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "STAGES": stages} | dict.fromkeys(absent)
            absent = [*absent, *(["dfirst"] if "first" in absent else [])]
            found[f"mix_rmsnorm_backward of {C}, {name}"] = mix._backward, constants | dict.fromkeys(absent), warps
    for C in (64, 192):
        constants = {"C": C, "Q": 8, "BLOCK": triton.next_power_of_2(C // 8)}
        constants["PIXELS"] = groupnorm.ELEMENTS // constants["BLOCK"]
        for way, kernel in (("forward", groupnorm._forward), ("backward", groupnorm._backward)):
            found[f"groupnorm_{way} of {C}"] = kernel, constants, groupnorm.WARPS
    for C, H, D in HEADS:
        (heads, channels, gates), warps = value_embedding.tile(H, D, GATE_CHANNELS, itemsize)
        constants = {"C": C, "H": H, "G": GATE_CHANNELS, "BLOCK_H": heads, "BLOCK_D": channels, "BLOCK_G": gates}
        found[f"value_embedding_backward of {H} heads of {D}"] = value_embedding._backward, constants, warps
        for name, more in (("forward", {"BLOCK_C": 0}), ("decode", {"gate": None, "BLOCK_C": triton.next_power_of_2(C)})):
            more = {**constants, **more, "OVERLAPS": name == "decode"}
            found[f"value_embedding_{name} of {H} heads of {D}"] = value_embedding._forward, more, warps
        for name, normed, rotated in (("qk_norm", True, False), ("rotary", False, True), ("qk_norm_rotary", True, True)):
            sizes = {"C3": 3 * C, "HEADS": 2 * H, "D": D, "ROTARY": rotated, "SCALE": 1.0, "frequencies": None}
            absent = {} if normed else {"rstd": None}
            heads, pairs, warps = rotary.tile(2 * H, D, itemsize, rotary.FORWARD_BYTES_PER_WARP)
            constants = {**sizes, **absent, "positions": None, "BLOCK_H": heads, "BLOCK_P": pairs, "OVERLAPS": False}
            found[f"{name}_forward of {H} heads of {D}"] = rotary._forward, constants, warps
            heads, pairs, warps = rotary.tile(2 * H, D, itemsize, rotary.BACKWARD_BYTES_PER_WARP)
            constants = {**sizes, **absent, "BLOCK_H": heads, "BLOCK_P": pairs} | ({} if normed else {"qkv": None})
            found[f"{name}_backward of {H} heads of {D}"] = rotary._backward, constants, warps
    return found | llama_launches(itemsize)


def llama_launches(itemsize: int) -> dict[str, Launch]:
    """Of the Llama family: SmolLM2's sizes, Qwen3's, and heads of 256."""
    found: dict[str, Launch] = {
        f"{name}_{way}": (kernel, {"BLOCK": activations.GATES_BLOCK, "GELU": name == "geglu"}, activations.GATES_WARPS)
        for name in ("swiglu", "geglu")
        for way, kernel in (("forward", activations._gates_forward), ("backward", activations._gates_backward))
    }
    for C in (576, 640, 1024, 2048):  # 640: of Gemma 3 270M
        block, rows, warps = forward_tile(C)
        form = {"PLUS": int(C == 640), "STRIDE": 3 * C if C == 2048 else C}  # 3 C: queries of OLMo 2 1B
        constants = {"C": C, "BLOCK_C": block, "ROWS": rows, **form}
        found[f"gained_rmsnorm_forward of {C}"] = rmsnorm._forward, constants, warps
        _, block, rows, warps, stages = backward_tile(1 << 16, C, itemsize)
        constants = {"C": C, "BLOCK_C": block, "ROWS": rows, "STAGES": stages, **form}
        found[f"gained_rmsnorm_backward of {C}"] = rmsnorm._gain_backward, constants, warps
    for H, K, D in ((9, 3, 64), (16, 8, 128), (8, 4, 256), (4, 1, 256)):
        columns, turned = (H + 2 * K) * D, H + K
        heads, pairs, warps = rotary.tile(turned, D, itemsize, rotary.FORWARD_BYTES_PER_WARP)
        sizes = {"COLUMNS": columns, "HEADS": turned, "QUERIES": H, "D": D, "SCALE": 1.0, "PLUS": int(K == 1)}
        constants = {**sizes, "BLOCK_H": heads, "BLOCK_P": pairs, "positions": None}
        constants["VALUES"] = triton.next_power_of_2(K * D)
        found[f"gained_qk_norm_forward of {H} heads"] = rotary._gained_forward, constants, warps
        at_positions = {name: value for name, value in constants.items() if name != "positions"} | {"OVERLAPS": True}
        found[f"gained_qk_norm_forward of {H} heads, generation"] = rotary._gained_forward, at_positions, warps
        alone = {"C3": columns, "HEADS": turned, "D": D, "BLOCK_H": heads, "BLOCK_P": pairs, "ROTARY": True, "rstd": None}
        for scale in (1.0, 1.2):
            for name, more in (("", {"positions": None, "OVERLAPS": False}), (", generation", {"OVERLAPS": True})):
                name = f"rotary_forward of {H} heads by table, scale {scale}{name}"
                found[name] = rotary._forward, {**alone, **more, "SCALE": scale}, warps
        heads, pairs, warps = rotary.tile(turned, D, itemsize, rotary.BACKWARD_BYTES_PER_WARP)
        constants = {**sizes, "BLOCK_H": heads, "BLOCK_P": pairs}
        found[f"gained_qk_norm_backward of {H} heads"] = rotary._gained_backward, constants, warps
        alone = {**alone, "BLOCK_H": heads, "BLOCK_P": pairs, "qkv": None}
        for scale in (1.0, 1.2):
            name = f"rotary_backward of {H} heads by table, scale {scale}"
            found[name] = rotary._backward, {**alone, "SCALE": scale}, warps
    return found


def compile_one(job: tuple[str, str, int]) -> dict[str, object]:
    name, dtype, arch = job
    kernel, constants, warps = launches(DTYPES[dtype])[name]
    if constants.get("OVERLAPS"):
        constants = {**constants, "OVERLAPS": arch >= 90}
    signature = {n: TYPES.get(n, f"*{dtype}:16") for n in kernel.arg_names}
    made = compile_kernel(kernel, signature, constants, warps, 3, arch)
    return {"kernel": name, "dtype": dtype, "arch": arch, "warps": warps, **made}


def jobs_of_tests() -> list[tuple[str, str, int]]:
    return [(name, dtype, ARCHITECTURE) for dtype, itemsize in DTYPES.items() for name in launches(itemsize)]
