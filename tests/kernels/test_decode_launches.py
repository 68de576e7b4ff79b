"""The launches of one text's step, noted and not made, and what is loaded before a process's first launch."""

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("nvmath")

from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Decoder, SamplingOptions
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import flat_elements
from handgrad.models import named_weights, parameter_table
from handgrad.ops import cuda
from handgrad.ops.cuda.launch import collecting
from handgrad.settings.config import ModelShape

LLAMA = "kv_heads=1,head_width=64,qk_norm,qkv_bias"
AHEAD = """
import sys
from handgrad.ops.cuda import launch
launch.load_ahead().join()
assert "triton.experimental.gluon" in sys.modules
before = launch.triton_key.cache_info().misses
launch.triton_key()
assert (before, launch.triton_key.cache_info().misses) == (1, 1)
"""
STEP = {"_embedding": 1, "_greatest": 1, "_join": 1, "_advance": 1}


def launches(shape: ModelShape) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Kernels by name, and the grids of the products."""
    dtype, ops, table = torch.float32, cuda, parameter_table(shape)
    rows = [Buffer("parameters", (flat_elements(table),), dtype, "parameters"), *decode_buffers(shape, 1, dtype, ops)]
    views = make_plan(rows).allocate(torch.device("cpu"))
    weights: Any = named_weights(shape, views["parameters"], table)
    decoder = Decoder(shape, ops, weights, decode_tensors(shape, views), SamplingOptions(0), end_of_text=None)
    with collecting() as noted:
        decoder.launch_step()
    products = [launch for kernel, made in noted.items() if name_of(kernel) == "_row_gemm" for launch in made]
    return {name_of(kernel): len(made) for kernel, made in noted.items()}, [grid for grid, _, _ in products]


def name_of(kernel: Any) -> str:
    return kernel.fn.__name__


def test_a_block_of_gpt2_takes_five_kernels() -> None:
    """Four products and attention, and nothing of the block or of the choice runs outside of them."""
    found, grids = launches(ModelShape(3000, 1024, 3, 12, 768))
    assert found == STEP | {"_row_gemm": 4 * 3 + 1, "_attention": 3}
    assert grids[:4] == [(288,), (384,), (384,), (384,)], "qkv, proj, fc, fcproj on 132 multiprocessors"


def test_a_block_of_llama_takes_six_kernels() -> None:
    """GPT-2's, and the norm and rotation of heads; norms and SwiGLU are in the products."""
    found, _ = launches(ModelShape(3000, 1024, 3, 4, 256, "llama", "", LLAMA))
    assert found == STEP | {"_row_gemm": 4 * 3 + 1, "_attention": 3, "_gained_forward": 3}


def test_a_first_launch_does_not_hash_triton() -> None:
    subprocess.run([sys.executable, "-c", AHEAD], check=True)
