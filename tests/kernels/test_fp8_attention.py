"""Attention with quantised outputs in float32 by Triton's interpreter, where there is no GPU (tests/gpu has it on one)."""

import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_fp8_attention_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.joins.fp8.cuda import attention
from handgrad.joins.fp8.formats import E4M3, E5M2
from handgrad.joins.fp8.sizes import attention_parts
from handgrad.ops.cuda import attention as ops_attention, attention_triton
from handgrad.ops.sizes import AttentionTile, attention_tile, rows_of
from tests.documents import document_starts
from tests.kernels import fp8_attention_checks as checks, fp8_stand_ins
from tests.kernels.fp8_checks import make
from tests.kernels.memory_checks import Draw
from tests.kernels.pairs import every_pair

TILES = {"wide": AttentionTile(32, 16, 4, 1), "tall": AttentionTile(16, 32, 4, 1), "attention_tile": None}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_stand_ins.install(monkeypatch)


@pytest.mark.parametrize(
    ("shape", "tiles", "kind"), every_pair(product([(2, 37, 1, 16), (1, 64, 2, 24)], TILES, [E4M3, E5M2]))
)
def test_bits(shape: tuple[int, ...], kind: torch.dtype, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TILES[tiles]
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)
    checks.run(Draw(torch.float32, "cpu"), *shape, kind, counting=tiles != "wide")


def test_bits_of_columns_in_another_format() -> None:
    """At the scale of the rows."""
    checks.run(Draw(torch.float32, "cpu"), 2, 37, 2, 16, E4M3, counting=True, columns=E5M2)


def test_bits_behind_cudnns_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass quantises what cuDNN's kernel, for which Triton's stands in, wrote in 16 bits."""
    calls: list[int] = []

    def forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, window: int) -> None:
        calls.append(window)
        attention_triton.attention_forward(out, lse, qkv)

    monkeypatch.setattr(ops_attention, "forward_in_cudnn", lambda *_: True)
    monkeypatch.setattr(ops_attention, "cudnn_forward", forward)
    checks.run(Draw(torch.float32, "cpu"), 2, 37, 2, 16, E4M3, counting=True)
    assert len(calls) == 5, "the 16-bit forward, and one for each set of forms"


def test_bits_in_the_tiles_of_a_data_centre_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the gradients' kernels take them."""
    launched: dict[str, tuple[int, ...]] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        names = "QUERIES", "KEYS", "num_warps", "num_stages", "maxnreg"
        launched[kernel.fn.__name__.removesuffix("_kernel")] = tuple(options.get(name) for name in names)
        usual(kernel, grid, *arguments, **options)

    usual = attention.launch
    monkeypatch.setattr(attention, "launch", launch)
    tile = AttentionTile(64, 64, 4, 1)
    monkeypatch.setattr(attention, "is_data_centre", lambda _: True)
    monkeypatch.setattr(attention_triton, "choose_config", lambda *_: tile)
    checks.run(Draw(torch.float32, "cpu"), 1, 80, 1, 64, E4M3, counting=True)
    own = {name: tuple(gradients_tile) for (name, _), gradients_tile in attention.TILES.items()}
    assert launched == {"forward": tuple(tile)} | own


@pytest.mark.parametrize("tiles", ["wide", "tall"])
def test_bits_within_documents(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "choose_config", lambda *_: TILES[tiles])
    starts = document_starts([[5, 1, 20, 11], [30, 7]])
    checks.run(Draw(torch.float32, "cpu"), 2, 37, 1, 16, E4M3, counting=False, starts=starts)


def test_room_for_statistics() -> None:
    """As many parts as programs, with every configuration for 16 bits; and fewer are refused."""
    for width, newer in product((64, 128), (True, False)):
        rows = [rows_of(name, attention_tile(name, width, narrow=True, newer=newer)) for name in ("forward", "dq", "dkdv")]
        forward, dq, dkdv = (6 * -(-1000 // size) for size in rows)
        sizes = {"batch": 2, "num_heads": 3, "length": 1000, "head_width": width}
        assert attention_parts("forward", **sizes) >= forward
        assert attention_parts("dq", "dkdv", **sizes) >= dq + dkdv
    sizes = {"batch": 64, "num_heads": 12, "length": 1024, "head_width": 64}
    assert attention_parts("forward", **sizes) == 64 * 12 * 16 == attention_parts("dq", "dkdv", **sizes) // 2
    qkv, lse = torch.zeros(64, 48), torch.zeros(1, 1, 64)
    scratch = torch.zeros(8 * 64, dtype=torch.uint8)
    dqkv = make(64, 48, 3, E4M3, "cpu")
    dqkv = replace(dqkv, statistics=dqkv.statistics[:, :3].contiguous())
    out = torch.zeros(64, 16)
    with pytest.raises(AssertionError, match="3 parts, 4 needed"):
        attention.attention_backward(dqkv, out, out, lse, qkv, scratch=scratch)
