"""Every memory-bound kernel as it is launched at GPT-2's sizes, compiled without a GPU (`tables`).

bf16 on every architecture, and each of the other dtypes on one: a compilation takes 0.3 s.
"""

import triton

from handgrad.joins.dropout import cuda as dropout
from handgrad.ops.cuda import activations, classifier, column_sums, embedding, layernorm, optimizer, reduction
from handgrad.ops.sizes import BIAS_COLUMNS, BIAS_ROWS, CHUNK, backward_tile, forward_tile
from tests.kernels.compiling import compile_kernel

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
USUAL = (("bf16", 80), ("bf16", 90), ("bf16", 100), ("fp16", 90), ("fp32", 80))
CHANNELS = (768, 1600)
V, Vp = 50257, 50304

NUMBERS = dict.fromkeys(("N", "O", "T", "P", "B", "n", "elements", "size", "stride"), "i32:16")
NUMBERS |= dict.fromkeys(("seed", "first_element", "lanes", "stream", "threshold"), "i32") | {"dropout_scale": "fp32"}
FIXED_POINTERS = {
    "mean": "*fp32",
    "rstd": "*fp32",
    "losses": "*fp32",
    "scale": "*fp32",
    "partials": "*fp32",
    "parts": "*fp32",
    "dwte": "*fp32",
    "dwpe": "*fp32",
    "first_acc": "*fp32",
    "second_acc": "*fp32",
    "third_acc": "*fp32",
    "tokens": "*i64",
    "targets": "*i64",
    "samples": "*i64",
    "sorted_positions": "*i32",
    "controls": "*fp64",
    "sum_acc": "*fp64",
    "sum_of_losses": "*fp64",
    "loss_scale": "*fp32",
    "norm_partials": "*fp32",
    "flat": "*fp32",
    "weight_": "*fp32",
    "m_buffer": "*fp32",
    "v_buffer": "*fp32",
    "gradient": "*fp32",
}


def launches(C: int, itemsize: int = 2) -> dict[str, tuple[triton.JITFunction, dict[str, object], int]]:
    """name: (kernel, its constants, warps), as the operations launch them."""
    block, rows, warps = forward_tile(C)
    _, back_block, back_rows, back_warps, stages = backward_tile(1 << 16, C, itemsize)
    forward = {"C": C, "BLOCK_C": block, "ROWS": rows}
    backward = {"C": C, "BLOCK_C": back_block, "ROWS": back_rows, "STAGES": stages}
    softmax = {"V": V, "Vp": Vp, "CAP": 0.0}
    chunk = {"C": C, "CHUNK": CHUNK}
    sums = {"ROWS": optimizer.SUM_ROWS, "COLUMNS": optimizer.SUM_COLUMNS}
    betas = {"BETA1": 0.9, "BETA2": 0.95, "LOG2_BETA1": -0.152, "LOG2_BETA2": -0.074, "EPSILON": 1e-8, "WEIGHT_DECAY": 0.1}
    betas |= {"RATE": 1.0}
    tiles = {"BLOCK": optimizer.UPDATE_ELEMENTS, "TILES": optimizer.UPDATE_TILES}
    return {
        "layernorm_forward": (layernorm._forward, forward, warps),
        "layernorm_backward": (layernorm._backward, {**backward, "BELOW": True}, back_warps),
        "layernorm_backward, nothing below": (layernorm._backward, {**backward, "BELOW": False}, back_warps),
        "column sums": (column_sums._sum_columns, {"ROWS": BIAS_ROWS, "COLUMNS": BIAS_COLUMNS}, column_sums.WARPS),
        "partial sums": (
            column_sums._add_partials,
            {"SLOTS": 3, "ROWS": column_sums.PARTIAL_ROWS, "COLUMNS": column_sums.PARTIAL_COLUMNS},
            column_sums.PARTIAL_WARPS,
        ),
        "classifier_forward": (classifier._forward, {**softmax, "PADDED": 64}, classifier.WARPS),
        "classifier_forward_backward": (classifier._forward_backward, softmax, classifier.WARPS),
        "classifier_forward_backward, untrained": (
            classifier._forward_backward,
            {**softmax, "UNTRAINED": True},
            classifier.WARPS,
        ),
        "gelu_forward": (activations._gelu_forward, {"BLOCK": activations.BLOCK}, activations.WARPS),
        "gelu_backward": (activations._gelu_backward, {"BLOCK": activations.BLOCK}, activations.WARPS),
        "embedding_forward": (embedding._forward, {"C": C, "BLOCK_C": block, "ROWS": rows}, warps),
        "dropout": (dropout._dropout, {"C": C, "BLOCK_C": block, "TILE_ROWS": rows, "residual": None}, warps),
        "dropout and residual": (dropout._dropout, {"C": C, "BLOCK_C": block, "TILE_ROWS": rows}, warps),
        "embedding runs": (embedding._sum_runs, {**chunk, "COLUMNS": embedding.RUN_COLUMNS}, embedding.RUN_WARPS),
        "embedding parts": (
            embedding._join_runs,
            {**chunk, "PARTS": embedding.PARTS, "COLUMNS": embedding.PART_COLUMNS},
            embedding.PART_WARPS,
        ),
        "embedding positions": (
            embedding._sum_samples,
            {"SAMPLES": embedding.SAMPLES, "BLOCK": embedding.POSITION_ELEMENTS},
            embedding.POSITION_WARPS,
        ),
        "loss_sum": (optimizer._loss_sum, sums, optimizer.SUM_WARPS),
        "squared_norms": (
            optimizer._squared_norms,
            {"ROWS": optimizer.NORM_ROWS, "COLUMNS": optimizer.NORM_COLUMNS},
            optimizer.NORM_WARPS,
        ),
        **{
            f"tree_sum of {rows}{', rounded' * rounded}": (
                reduction._tree_sum,
                {"P": rows, "ROUNDED": rounded, "BLOCK": reduction.tree_block(rows, itemsize)},
                reduction.TREE_WARPS,
            )
            for rows in (2, 4, 16, 64)
            for rounded in (False, True)
        },
        "checksum": (
            reduction._checksum,
            {"BLOCK": reduction.CHECKSUM_WORDS, "TILES": reduction.CHECKSUM_TILES},
            reduction.CHECKSUM_WARPS,
        ),
        "digest": (
            reduction._digest,
            {"COLUMNS": reduction.COLUMNS, "ROWS": reduction.DIGEST_ROWS},
            reduction.DIGEST_WARPS,
        ),
        "verdict": (
            optimizer._verdict,
            {"TOKENS": 524288.0, "CLIP_NORM": 1.0, "DYNAMIC": True, **sums},
            optimizer.SUM_WARPS,
        ),
        **{
            f"adamw_update{kind}": (
                optimizer._adamw,
                {"PUBLISH": publishes, "ROUNDED": rounded, "ROUNDED_MOMENTS": moments, **betas, **tiles},
                optimizer.UPDATE_WARPS,
            )
            for kind, publishes, rounded, moments in (
                *(("", True, False, False), (" in place", False, False, False), (" rounded", False, True, False)),
                *((", moments of bf16", True, False, True), (" rounded, moments of bf16", False, True, True)),
            )
        },
    }


def signature_of(name: str, kernel: triton.JITFunction, dtype: str) -> dict[str, str]:
    """Types of the arguments that are not constants. Buffers begin at multiples of 16 bytes, sizes are multiples of 16."""
    own = {"results": "*fp64", "words": "*i32" if dtype == "fp32" else "*i16"}
    if name.startswith(("squared_norms", "tree_sum")):
        own["out"] = "*fp32"
    if name == "checksum":
        own["out"] = "*i64"
    if name == "digest":
        own |= {"out_acc": "*i64", "first": "i32"}
    if name.startswith("adamw"):
        own["weight"] = "*i16" if "rounded" in name else "*fp32"
        own |= dict.fromkeys(("m_buffer", "v_buffer"), "*i16") if "moments" in name else {}
    types = {**FIXED_POINTERS, **own}
    return {n: NUMBERS.get(n) or types.get(n, f"*{dtype}") + ":16" for n in kernel.arg_names}


def compile_one(job: tuple[str, int, str, int]) -> dict[str, object]:
    name, C, dtype, arch = job
    kernel, constants, warps = launches(C, DTYPES[dtype])[name]
    made = compile_kernel(kernel, signature_of(name, kernel, dtype), constants, warps, 3, arch)
    return {"kernel": name, "C": C, "dtype": dtype, "arch": arch, "warps": warps, **made}


def jobs(architectures: tuple[int, ...], dtypes: tuple[str, ...]) -> list[tuple[str, int, str, int]]:
    """Kernels without C among their constants are compiled once."""
    found = []
    for name, (_, constants, _) in launches(768).items():
        for C in CHANNELS if "C" in constants else CHANNELS[:1]:
            found += [(name, C, dtype, arch) for dtype in dtypes for arch in architectures]
    return found


def jobs_of_tests() -> list[tuple[str, int, str, int]]:
    return [job for dtype, arch in USUAL for job in jobs((arch,), (dtype,))]
