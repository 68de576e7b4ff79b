"""The kernels on a GPU: products and attention against float64, the whole model, whole runs, the same bits every time."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.ops import cuda as kernels, reference
from handgrad.ops.cuda import attention_triton
from handgrad.ops.sizes import TURING_TILES
from handgrad.run.assemble import assemble
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.training.step import StepResult
from tests.gpu.models import (
    GEMMA,
    LLAMA,
    LLAMA_UNTIED,
    MODERN,
    MODERN_NEW,
    OLMO,
    SHAPE,
    ZipfBytes,
    ZipfTokens,
    gradients,
    statistics,
)
from tests.gpu.runs import check_allocations, leave_the_same_bits
from tests.test_runs import elsewhere, records

GPU = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SENTINEL = 3.25


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """No TF32 and no reduced-precision sums: neither in the kernels nor in the reference they are held against."""
    devices.set_arithmetic(GPU, "fp32")


def randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=GPU) * scale).to(dtype)


def compare(run: Callable[[ModuleType, torch.dtype], dict[str, Tensor]], dtype: torch.dtype) -> None:
    """Each result's error against float64 on the same (rounded) inputs: at most twice the reference's own in this dtype,
    plus one rounding; and ten runs give the same bits."""
    exact, own, found = run(reference, torch.float64), run(reference, dtype), run(kernels, dtype)
    for name, result in found.items():
        assert torch.isfinite(result).all(), name
        error, reference_error = ((t[name].double() - exact[name]).norm().item() for t in (found, own))
        floor = ROUNDING[result.dtype] * exact[name].norm().item()
        times = TIMES_OF_SCALARS if name == "scalars" else 2
        assert error <= times * reference_error + floor, f"{name}: {error:.3g}, reference {reference_error:.3g}"
    for _ in range(9):
        again = run(kernels, dtype)
        assert all(torch.equal(again[name], result) for name, result in found.items())


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=GPU)


@pytest.fixture(scope="module")
def scratch() -> Tensor:
    size = kernels.scratch_bytes(tokens=16 * 1024, channels=1600, widest=6400)
    return torch.full((size,), 255, dtype=torch.uint8, device=GPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "I", "O"), [(128, 64, 192), (1000, 96, 40), (4096, 768, 2304), (77, 1600, 1600)])
def test_linear(N: int, I: int, O: int, dtype: torch.dtype, scratch: Tensor) -> None:
    inp, weight = randn(N, I, dtype=dtype, seed=1), randn(O, I, dtype=dtype, seed=2, scale=I**-0.5)
    bias, dout = randn(O, dtype=dtype, seed=3), randn(N, O, dtype=dtype, seed=4)

    def run(ops: ModuleType, kind: torch.dtype) -> dict[str, Tensor]:
        x, w, b, dy = (t.to(kind) for t in (inp, weight, bias, dout))
        out, dx = empty(N, O, dtype=kind), empty(N, I, dtype=kind)
        dw, db = (torch.full(s, SENTINEL, dtype=statistics(kind), device=GPU) for s in ((O, I), (O,)))
        ops.linear_forward(out, x, w, b, scratch=scratch)
        ops.linear_backward(dx, dw, db, dy, x, w, scratch=scratch)
        return {"out": out, "dx": dx, "dw": dw, "db": db}

    compare(run, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "C"), [(200, 64), (4096, 768), (1024, 1600)])
def test_fused_products(N: int, C: int, dtype: torch.dtype, scratch: Tensor) -> None:
    """The hidden layer forward, its backward, and the residual sum, each against the composition it stands for."""
    F = 4 * C
    inp, residual, dout = (randn(N, C, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    wide, narrow = randn(F, C, dtype=dtype, seed=4, scale=C**-0.5), randn(C, F, dtype=dtype, seed=5, scale=F**-0.5)
    wide_bias, narrow_bias = randn(F, dtype=dtype, seed=6), randn(C, dtype=dtype, seed=7)

    def run(ops: ModuleType, kind: torch.dtype) -> dict[str, Tensor]:
        x, r, dy, w, v, b, c = (t.to(kind) for t in (inp, residual, dout, wide, narrow, wide_bias, narrow_bias))
        hidden, gelu, dhidden = (empty(N, F, dtype=kind) for _ in range(3))
        out = empty(N, C, dtype=kind)
        dv = torch.full((C, F), SENTINEL, dtype=statistics(kind), device=GPU)
        ops.linear_gelu_forward(gelu, hidden, x, w, b, scratch=scratch)
        ops.linear_residual_forward(out, r, gelu, v, c, scratch=scratch)
        ops.gelu_linear_backward(dhidden, dv, dy, gelu, hidden, v, scratch=scratch)
        return {"hidden": hidden, "gelu": gelu, "out": out, "dhidden": dhidden, "dv": dv}

    compare(run, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "H", "D"),
    [(1, 1, 1, 16), (2, 65, 3, 64), (3, 200, 2, 32), (2, 1024, 12, 64), (1, 777, 2, 128), (2, 256, 2, 96)],
)
def test_attention(B: int, T: int, H: int, D: int, dtype: torch.dtype, scratch: Tensor) -> None:
    C = H * D
    packed, dy = randn(B * T, 3 * C, dtype=dtype, seed=1), randn(B * T, C, dtype=dtype, seed=2)
    sizes = {"batch": B, "length": T, "num_heads": H, "head_width": D}
    own_scratch = torch.full((kernels.attention_scratch_bytes(dtype=dtype, **sizes),), 255, dtype=torch.uint8, device=GPU)

    def run(ops: ModuleType, kind: torch.dtype) -> dict[str, Tensor]:
        qkv, dout = packed.to(kind), dy.to(kind)
        out, lse, dqkv = (
            empty(B * T, C, dtype=kind),
            empty(B, H, T, dtype=statistics(kind)),
            empty(B * T, 3 * C, dtype=kind),
        )
        ops.attention_forward(out, lse, qkv, scratch=scratch)
        ops.attention_backward(dqkv, dout, out, lse, qkv, scratch=own_scratch)
        return {"out": out, "lse": lse, "dqkv": dqkv}

    compare(run, dtype)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_in_turings_tiles(D: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, scratch: Tensor) -> None:
    """On whatever GPU there is: the tiles of a T4."""
    B, T, H, C = 2, 130, 2, 2 * D
    monkeypatch.setattr(attention_triton, "choose_config", lambda name, *_: TURING_TILES[name, D])
    packed, dy = randn(B * T, 3 * C, dtype=dtype, seed=1), randn(B * T, C, dtype=dtype, seed=2)

    def run(ops: ModuleType, kind: torch.dtype) -> dict[str, Tensor]:
        qkv, dout = packed.to(kind), dy.to(kind)
        out, dqkv = empty(B * T, C, dtype=kind), empty(B * T, 3 * C, dtype=kind)
        lse = empty(B, H, T, dtype=statistics(kind))
        ops = attention_triton if ops is kernels else ops
        ops.attention_forward(out, lse, qkv)
        ops.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch)
        return {"out": out, "lse": lse, "dqkv": dqkv}

    compare(run, dtype)


def test_tuning_writes_a_table_that_products_then_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, scratch: Tensor
) -> None:
    from benchmarks import tune
    from handgrad.ops.cuda import cublaslt

    request.addfinalizer(cublaslt.frozen_algorithms.cache_clear)
    monkeypatch.setattr(tune, "SUSTAINED_SECONDS", 0.02)
    monkeypatch.setattr(tune, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(cublaslt, "user_table", lambda: tmp_path / "table.json")
    monkeypatch.setattr(cublaslt, "PLANS", {})
    inp, weight = randn(512, 256, dtype=torch.bfloat16, seed=1), randn(384, 256, dtype=torch.bfloat16, seed=2)
    found, again = (empty(512, 384, dtype=torch.bfloat16) for _ in range(2))
    kernels.linear_forward(found, inp, weight, None, scratch=scratch)
    (product,) = cublaslt.PLANS
    (line,) = tune.tune([product], tmp_path / "table.json")
    assert product.name() in line and product.name() in cublaslt.frozen_algorithms()
    # Another algorithm in the table than the one that would be taken without it.
    other = cublaslt.PLANS[product].candidates(8)[-1]
    table = json.loads((tmp_path / "table.json").read_text())
    table["algorithms"][product.name()] = [f"{int(word):x}" for word in other]
    (tmp_path / "table.json").write_text(json.dumps(table))
    cublaslt.frozen_algorithms.cache_clear()
    cublaslt.PLANS.clear()
    kernels.linear_forward(again, inp, weight, None, scratch=scratch)
    assert (cublaslt.PLANS[product].algorithm == other).all()
    exact = inp.double() @ weight.double().t()
    assert (again.double() - exact).norm() <= 2 * (found.double() - exact).norm()


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"), (torch.float32, "tf32")],
)
@pytest.mark.parametrize(
    "shape",
    [SHAPE, MODERN, MODERN_NEW, LLAMA, LLAMA_UNTIED, GEMMA, OLMO],
    ids=["gpt2", "modern", "modern, all techniques", "llama", "llama, untied", "gemma3", "olmo"],
)
def test_the_model_is_as_good_as_the_reference(dtype: torch.dtype, precision: str, shape: ModelShape) -> None:
    exact = with_scalars_joined(gradients(reference, GPU, torch.float64, shape=shape))
    devices.set_arithmetic(GPU, precision)
    backends = (choose_backend(name, GPU, precision) for name in ("reference", "kernels"))
    own, found = (with_scalars_joined(gradients(ops, GPU, dtype, shape=shape)) for ops in backends)
    for name in found:
        error, reference_error = ((t[name].double() - exact[name]).norm().item() for t in (found, own))
        times = TIMES_OF_SCALARS if name == "scalars" else 2
        assert error <= times * reference_error + ROUNDING[torch.float32] * exact[name].norm().item(), name
    assert (found["wte"][SHAPE.vocab_size :] == 0).all(), "the padded vocabulary has no gradient at all"


# Two errors of equal size in six numbers: the square of their norms' ratio has an F distribution of 6 and 6 degrees of
# freedom, 20 at 99.9 %. A scalar's own bound, from the size of its products, is in tests/kernels/modern_checks.py.
TIMES_OF_SCALARS = math.sqrt(20)


def with_scalars_joined(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """All scalars as one vector: the error of a single number may be small by chance."""
    scalars = [tensor for name, tensor in found.items() if name.endswith("_scalar")]
    joined = {"scalars": torch.cat(scalars)} if scalars else {}
    return {name: tensor for name, tensor in found.items() if not name.endswith("_scalar")} | joined


def state_after(
    steps: int, *, micro_batch: int, graphs: bool, recompute: int = 0, layers: int = 2
) -> tuple[Tensor, list[StepResult]]:
    """Master weights and results of steps of a d12-wide model in bf16 on Zipf-like tokens."""
    sizes = presets.model("d12") | {"num_layers": layers}
    tokens = 2 * micro_batch * 1024
    settings = {"micro_batch": micro_batch, "tokens_per_step": tokens, "precision": "bf16", "recompute": recompute}
    config = RunConfig(**sizes, **settings, steps=50, warmup_steps=5)
    training = assemble(resolve(config, 50257, device=GPU, ops=kernels), ZipfTokens(), graphs=graphs)
    results = [training.stepper.step(step) for step in range(steps)]
    return training.state.master, results


def test_the_same_bits_with_and_without_graphs_at_every_recompute_level() -> None:
    first, results = state_after(6, micro_batch=8, graphs=True)
    assert results[-1].loss < results[0].loss - 0.5
    for graphs, recompute in ((False, 0), (True, 1), (True, 2), (False, 2), (True, 3)):
        again, other = state_after(6, micro_batch=8, graphs=graphs, recompute=recompute)
        assert torch.equal(again, first) and other == results, (graphs, recompute)


def test_fifty_steps_of_a_large_micro_batch_twice() -> None:
    """Large batches are where non-determinism hides."""
    first, results = state_after(50, micro_batch=64, graphs=True, layers=12)
    second, again = state_after(50, micro_batch=64, graphs=True, layers=12)
    assert torch.equal(first, second) and results == again


def test_nothing_is_allocated_after_the_first_steps() -> None:
    sizes = presets.model("d12") | {"num_layers": 2}
    config = RunConfig(**sizes, micro_batch=4, tokens_per_step=8192, precision="bf16")
    check_allocations(config)


@pytest.mark.parametrize(
    ("precision", "master_weights"), [("bf16", True), ("bf16", False), ("fp16", True), ("fp32", True), ("tf32", True)]
)
def test_two_runs_and_a_resumed_one(config: RunConfig, precision: str, master_weights: bool) -> None:
    """The same bits; the third goes on from the checkpoint of step 8."""
    settings = {"precision": precision, "master_weights": master_weights}
    config = dataclasses.replace(config, device="cuda", backend="kernels", **settings)
    leave_the_same_bits(config)


def test_the_loss_follows_the_cpu(config: RunConfig) -> None:
    train(config)
    on_gpu = elsewhere(config, "gpu", device="cuda", backend="kernels", precision="fp32")
    train(on_gpu)
    for a, b in zip(records(config.out, ("step",)), records(on_gpu.out, ("step",)), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-4


def test_a_gradient_that_overflows_halves_the_loss_scale_and_leaves_the_weights_alone(config: RunConfig) -> None:
    config = dataclasses.replace(config, device="cuda", backend="kernels", precision="fp16")
    training = assemble(resolve(config, 257, device=GPU, ops=kernels), ZipfBytes())
    state, step = training.state, training.stepper
    state.set_loss_scale(2.0**24, 0.0)
    state.weights.lnf_weight.fill_(4096.0)
    before = state.master.clone()
    result = step.step(0)
    assert result.skipped is not None and "norm" in result.skipped and math.isfinite(result.loss)
    assert torch.equal(state.master, before)
    assert state.loss_scale[1] == 2.0**23
    assert step.step(1).loss_scale == 2.0**23
