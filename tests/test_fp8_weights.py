"""Weights in fp8 for generation: the scales of rows, the loss that a command measures, and products that read them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handgrad.api.actions import evaluate
from handgrad.api.model import load
from handgrad.cli import main
from handgrad.generation.fp8_weights import PRODUCTS, buffers_of, fp8_rows, quantized, rounded, row_scales, with_fp8_weights
from handgrad.interop.sources import open_weights
from handgrad.memory.arena import make_plan
from handgrad.models import parameter_table
from handgrad.ops import DECODE_OPERATIONS
from tests.interop.models import make_checkpoint

HELLO = [{"role": "user", "content": "Hello"}]
NETWORKS = {
    "gpt2": {"sizes": (2, 2, 32, 64)},
    "llama": {"architecture": "llama", "sizes": (2, 4, 32, 64), "llama": "kv_heads=2,feed_forward=64,tied"},
    "modern": {"architecture": "modern", "sizes": (2, 2, 32, 64), "techniques": "rotary,untied_head,value_embeddings"},
}


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_scales_are_powers_of_two_that_use_the_format() -> None:
    """The largest number of a row comes out from 224 to 448; a row of zeros stays one; rounding twice changes nothing."""
    weight = matrix(40, 33) * torch.exp2(torch.arange(40.0) - 20).unsqueeze(1)
    weight[7] = 0
    weight[8, 0], weight[8, 1:] = 448.0, 0.1
    weight[9] *= 449 / weight[9].abs().max()
    scales = row_scales(weight)
    assert torch.equal(scales.log2(), scales.log2().round()) and scales[7] == 1 and scales[8] == 1 and scales[9] == 2
    largest = (weight / scales.unsqueeze(1)).abs().amax(1)
    others = torch.arange(40) != 7
    assert (largest[others] >= 224).all() and (largest <= 448).all()
    rows, _ = quantized(weight)
    values = rows.float() * scales.unsqueeze(1)
    again, scales_again = quantized(values)
    assert torch.equal(again.float() * scales_again.unsqueeze(1), values) and not rows[7].float().any()
    assert torch.equal(values.bfloat16().float(), values), "bf16 holds them exactly"
    normal = weight.abs() > 2.0**-6 * scales.unsqueeze(1)
    assert ((values - weight).abs()[normal] <= weight.abs()[normal] / 16).all()


@pytest.mark.parametrize("network", list(NETWORKS))
def test_matrices_of_products_are_rounded_and_nothing_else(network: str, tmp_path: Path) -> None:
    run, shape = make_checkpoint(tmp_path / "run", "bytes", **NETWORKS[network])
    source = open_weights(str(run))
    names = {row.name for row in fp8_rows(shape)}
    assert any("qkv" in name for name in names) and ("head" in names) != ("wte" in names)
    for row in parameter_table(shape):
        before, after = source.weight(row), rounded(shape, source.weight)(row)
        assert torch.equal(before, after) == (row.name not in names), row.name
        assert (before - after).norm() <= before.norm() / 16


@pytest.mark.parametrize("network", list(NETWORKS))
def test_every_product_of_a_step_reads_fp8(network: str, tmp_path: Path) -> None:
    """Each matrix once; the text of one, and of several, is that of the rounded weights."""
    pytest.importorskip("triton")
    run, _ = make_checkpoint(tmp_path / "run", "bytes", **NETWORKS[network])
    model = load(run, device="cpu", backend="reference", fp8_weights=True)
    plain = model.generate("Hello", max_tokens=12, temperature=0)
    assert plain == model.generate(["Hello", "Ho"], max_tokens=12, temperature=0)[0]
    views = make_plan(buffers_of(model.shape)).allocate(torch.device("cpu"))
    bound = with_fp8_weights(model.ops, model.shape, model.weights, views)
    read: list[tuple[int, ...]] = []

    def decoded(operation: Callable[..., None], *tensors: Any, **options: Any) -> None:
        """As the kernels read them."""
        given = list(tensors)
        for place, tensor in enumerate(tensors):
            if (weight := bound.decode.found.get(tensor)) is not None:
                assert weight.rows.dtype == torch.float8_e4m3fn
                given[place] = (weight.rows.float() * weight.scales.unsqueeze(1)).to(tensor.dtype)
                read.append(tuple(weight.shape))
        operation(*given, **options)

    bound.decode.call = decoded
    model._writing.ops_of_one, model._writing.last = bound, None
    assert model.generate("Hello", max_tokens=12, temperature=0) == plain
    matrices = [row.shape for row in fp8_rows(model.shape)]
    assert len(read) % len(matrices) == 0 and sorted(read[: len(matrices)]) == sorted(matrices)


def test_a_command_measures_their_loss(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", **NETWORKS["gpt2"])
    losses = []
    for flags in ([], ["--fp8-weights"]):
        asked = ["evaluate", str(run), "--data", str(shards), "--device", "cpu", "--eval-tokens", "640", *flags]
        assert main(asked) == 0
        told = capsys.readouterr().out
        assert ("weights rounded to fp8" in told) == bool(flags)
        losses.append(float(told.partition("loss ")[2].split()[0]))
    model = load(run, device="cpu", fp8_weights=True)
    found = evaluate(model, shards, eval_tokens=640).loss
    assert losses[1] == pytest.approx(found, abs=6e-5) and 0 < abs(losses[1] - losses[0]) < 0.1


@pytest.mark.parametrize("command", ["sample", "chat"])
def test_commands_write_with_them(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", **NETWORKS["gpt2"])
    flags = ["--device", "cpu", "--temperature", "0", "--max-tokens", "12"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main([command, str(run), "--fp8-weights", *flags]) == 0
    told, model = capsys.readouterr().out, load(run, device="cpu", fp8_weights=True)
    options = {"temperature": 0, "max_tokens": 12}
    expected = model.generate("", **options) if command == "sample" else "".join(model.chat(HELLO, **options))
    assert told.rstrip("\n") == expected.rstrip("\n") and expected


def test_operations_that_carry_weights_are_known() -> None:
    assert set(PRODUCTS) <= set(DECODE_OPERATIONS)
    assert {name for name in DECODE_OPERATIONS if "linear" in name} == set(PRODUCTS)
