"""Dropout on a GPU: the reference's masks bit by bit, gradients as good as the reference's, runs that repeat their bits."""

import dataclasses
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.joins.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.joins.dropout.reference import Dropout, attention_mask
from handgrad.machine import devices
from handgrad.ops import cuda as kernels, reference
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig
from handgrad.training.step import StepResult
from tests.gpu.models import ZipfBytes, ZipfTokens, gradients, statistics
from tests.gpu.runs import leave_the_same_bits
from tests.gpu.test_kernels_on_gpu import DTYPES, GPU, HALVES, ROUNDING, compare, empty, randn
from tests.kernels import memory_checks as checks
from tests.kernels.memory_checks import Draw, check_repeats
from tests.test_runs import elsewhere

P = 0.3


@pytest.fixture(autouse=True)
def exact_products() -> None:
    devices.set_arithmetic(GPU, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T", "C"), [(64, 1024, 768), (16, 1024, 1600), (3, 37, 24), (2, 50, 2500)])
def test_alone_and_with_the_residual_sum(B: int, T: int, C: int, dtype: torch.dtype) -> None:
    checks.check_dropouts(Draw(dtype, "cuda"), B, T, C)
    check_repeats(checks.dropouts(Draw(dtype, "cuda"), B, T, C))


def site(B: int) -> Dropout:
    return Dropout(torch.arange(B, device=GPU) + (1 << 32) - 1, P, 1337, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "H", "D"),
    [(1, 1, 1, 16), (2, 65, 3, 64), (3, 200, 2, 32), (2, 1024, 12, 64), (1, 777, 2, 128), (2, 256, 2, 96)],
)
def test_attention(B: int, T: int, H: int, D: int, dtype: torch.dtype) -> None:
    """Also heads of more than 64 channels, which without dropout are cuDNN's."""
    C = H * D
    packed, dy = randn(B * T, 3 * C, dtype=dtype, seed=1), randn(B * T, C, dtype=dtype, seed=2)
    sizes = {"batch": B, "length": T, "num_heads": H, "head_width": D}
    size = dropout_kernels.attention_scratch_bytes(dtype=dtype, **sizes)
    scratch = torch.full((size,), 255, dtype=torch.uint8, device=GPU)

    def run(ops: ModuleType, kind: torch.dtype) -> dict[str, Tensor]:
        qkv, dout = packed.to(kind), dy.to(kind)
        out, dqkv = empty(B * T, C, dtype=kind), empty(B * T, 3 * C, dtype=kind)
        lse = empty(B, H, T, dtype=statistics(kind))
        dropping = dropout_reference if ops is reference else dropout_kernels
        dropping.attention_forward(out, lse, qkv, site(B))
        dropping.attention_backward(dqkv, dout, out, lse, qkv, site(B), scratch=scratch)
        return {"out": out, "lse": lse, "dqkv": dqkv}

    compare(run, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("D", [64, 128])
def test_attentions_masks_bit_by_bit(D: int, dtype: torch.dtype) -> None:
    """Queries of zero look at all keys alike; values that are unit vectors show which of D keys were kept, and output
    gradients that are unit vectors show the same in the values' gradient."""
    B, T, H = 2, 512, 2
    C = H * D
    mask = torch.stack([attention_mask(torch.empty(H, T, T, device=GPU), site(B), b) for b in range(B)]) > 0
    sees = mask & torch.ones(T, T, dtype=torch.bool, device=GPU).tril()
    lse, out, dqkv = empty(B, H, T, dtype=torch.float32), empty(B * T, C, dtype=dtype), empty(B * T, 3 * C, dtype=dtype)
    size = dropout_kernels.attention_scratch_bytes(batch=B, length=T, num_heads=H, head_width=D, dtype=dtype)
    scratch = torch.zeros(size, dtype=torch.uint8, device=GPU)
    for first in range(0, T, D):
        unit = torch.zeros(T, D, dtype=dtype, device=GPU)
        unit[first : first + D] = torch.eye(D, dtype=dtype, device=GPU)
        qkv = torch.zeros(B, T, 3, H, D, dtype=dtype, device=GPU)
        qkv[:, :, 2] = unit[:, None]
        packed = qkv.view(B * T, 3 * C)
        dout = unit[None, :, None].expand(B, T, H, D).reshape(B * T, C)
        dropout_kernels.attention_forward(out, lse, packed, site(B))
        dropout_kernels.attention_backward(dqkv, dout, out, lse, packed, site(B), scratch=scratch)
        kept = out.view(B, T, H, D).transpose(1, 2) > 0
        assert torch.equal(kept, sees[..., first : first + D])
        dv = dqkv.view(B, T, 3, H, D)[:, :, 2].permute(0, 2, 3, 1) > 0
        assert torch.equal(dv, sees[:, :, first : first + D])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_is_as_good_as_the_reference(dtype: torch.dtype) -> None:
    exact = gradients(reference, GPU, torch.float64, dropout=P)
    own, found = (gradients(ops, GPU, dtype, dropout=P) for ops in (reference, kernels))
    for name in found:
        error, reference_error = ((t[name].double() - exact[name]).norm().item() for t in (found, own))
        assert error <= 2 * reference_error + ROUNDING[torch.float32] * exact[name].norm().item(), name


def state_after(steps: int, *, graphs: bool, recompute: int = 0, dropout: float = P) -> tuple[Tensor, list[StepResult]]:
    """Master weights and results of steps of a d12-wide model in bf16."""
    sizes = presets.model("d12") | {"num_layers": 2}
    settings = {"micro_batch": 8, "tokens_per_step": 16384, "precision": "bf16", "recompute": recompute, "dropout": dropout}
    config = RunConfig(**sizes, **settings, steps=50, warmup_steps=5)
    training = assemble(resolve(config, 50257, device=GPU, ops=kernels), ZipfTokens(), graphs=graphs)
    return training.state.master, [training.stepper.step(step) for step in range(steps)]


def test_the_same_bits_with_and_without_graphs_at_every_recompute_level() -> None:
    """A recorded micro-step takes the samples of its own micro-batch: with the first one's masks the bits would differ."""
    first, results = state_after(6, graphs=True)
    assert results[-1].loss < results[0].loss - 0.3
    for graphs, recompute in ((False, 0), (True, 1), (True, 2), (False, 2), (True, 3)):
        again, other = state_after(6, graphs=graphs, recompute=recompute)
        assert torch.equal(again, first) and other == results, (graphs, recompute)
    _, without = state_after(2, graphs=True, dropout=0.0)
    assert without[0].loss != results[0].loss


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_two_runs_and_a_resumed_one(config: RunConfig, precision: str) -> None:
    config = dataclasses.replace(config, device="cuda", backend="kernels", precision=precision, dropout=P)
    leave_the_same_bits(config)


def test_the_loss_follows_the_cpu(config: RunConfig) -> None:
    """The same masks on both machines."""
    config = dataclasses.replace(config, dropout=P, steps=6)
    losses = []
    for device, backend in (("cpu", "reference"), ("cuda", "kernels")):
        design = resolve(elsewhere(config, device, device=device, backend=backend), 257)
        training = assemble(design, ZipfBytes())
        losses.append([training.stepper.step(step).loss for step in range(6)])
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(*losses, strict=True))
