"""Attention within a window beside full attention, forward and backward: TFLOP/s over the pairs that queries see.

    python -m benchmarks.windows --out benchmarks/results/h100-windows.json

Full attention and a window run the kernels that handgrad takes for each, and alternate. FLOPs are two products forward and
five backward over the visible pairs, so a ratio of 1 means that a window costs its share.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import launch_milliseconds
from benchmarks.record import keep_commit, run_main, write_record
from handgrad.machine import devices
from handgrad.models.windows import fill_window_starts
from handgrad.ops.cuda import attention
from handgrad.ops.reference.attention import CAUSAL, Mask

# Heads of queries, of keys, their channels, and the window.
NETWORKS = {
    "Gemma 3 1B": (4, 1, 256, 512),
    "a quarter of Mistral 7B": (8, 2, 128, 4096),
    "SmolLM2 with a window": (9, 3, 64, 512),
}
LENGTHS = (4096, 32768)
TOKENS = 32768
PRODUCTS = {"forward": 2, "backward": 5}
ROUNDS, LAUNCHES = 5, 10


def pairs(length: int, window: int) -> int:
    """The visible pairs of a row."""
    window = min(window or length, length)
    return window * (2 * length - window + 1) // 2


def launches(H: int, K: int, D: int, length: int, window: int) -> dict[str, Callable[[], None]]:
    """The forward and the backward over `TOKENS` tokens in rows of `length`."""
    device, dtype, B = torch.device("cuda"), torch.bfloat16, TOKENS // length
    qkv = torch.randn(TOKENS, (H + 2 * K) * D, device=device, dtype=dtype)
    dout, out = (torch.randn(TOKENS, H * D, device=device, dtype=dtype) for _ in range(2))
    dqkv = torch.empty_like(qkv)
    lse = torch.empty(B, H, length, device=device)
    sizes: dict[str, Any] = {"batch": B, "length": length, "num_heads": H, "kv_heads": K, "head_width": D, "dtype": dtype}
    size = attention.attention_scratch_bytes(**sizes, window=window)
    scratch, mask = torch.empty(max(size, 1 << 20), dtype=torch.uint8, device=device), CAUSAL
    if window:
        starts = torch.empty(B, length, dtype=torch.int32, device=device)
        fill_window_starts(starts, None, window)
        mask = Mask(starts, window, has_documents=False)
    forward = partial(attention.attention_forward, out, lse, qkv, scratch=scratch, mask=mask)
    backward = partial(attention.attention_backward, dqkv, dout, out, lse, qkv, scratch=scratch, mask=mask)
    return {"forward": forward, "backward": backward}


def measure(H: int, K: int, D: int, window: int, length: int) -> dict[str, Any]:
    both = {"full": launches(H, K, D, length, 0), "window": launches(H, K, D, length, window)}
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in PRODUCTS} for kind in both}
    for turn in range(ROUNDS + 1):  # the first compiles
        for kind, directions in both.items():
            for name, launch in directions.items():
                milliseconds = launch_milliseconds(launch, LAUNCHES)
                times[kind][name] += [milliseconds] if turn else []
    found: dict[str, Any] = {"window": window, "length": length}
    for name, products in PRODUCTS.items():
        for kind, seen in (("full", 0), ("window", window)):
            milliseconds = median(times[kind][name])
            flops = products * 2 * (TOKENS // length) * pairs(length, seen) * H * D
            found[f"{kind}_{name}_milliseconds"] = round(milliseconds, 4)
            found[f"{kind}_{name}_tflops"] = round(flops / milliseconds / 1e9, 1)
        found[f"{name}_ratio"] = round(found[f"window_{name}_tflops"] / found[f"full_{name}_tflops"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parsed = parser.parse_args()
    keep_commit()
    devices.set_arithmetic(torch.device("cuda"), "bf16")
    figures: dict[str, Any] = {}
    for name, (H, K, D, window) in NETWORKS.items():
        for length in LENGTHS:
            row = figures[f"{name}, {length}"] = measure(H, K, D, window, length)
            print(name, row, flush=True)
            torch.cuda.empty_cache()
    if parsed.out:
        write_record(parsed.out, torch.device("cuda"), figures=figures)


if __name__ == "__main__":
    run_main(main)
