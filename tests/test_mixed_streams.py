"""The scalars of the stream, value embeddings, and learning rates of their own: the operations equal float64 autograd to
1e-10, at odd shapes, over NaN-filled outputs and sentinels."""

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.modern_twin import ModernTwin, modern_optimizer
from handgrad.joins.parallel.gradient_sync import gradient_ring
from handgrad.memory.layout import buckets_of
from handgrad.models import parameter_table
from handgrad.ops import UPDATE, cpu, reference
from handgrad.ops.reference.mix import mix_forward
from handgrad.settings.config import ModelShape, RunConfig
from tests.techniques import toggled
from tests.test_modern_model import shape_without
from tests.test_modern_operations import normalized
from tests.test_operations import SENTINEL, close, equal_autograd, nan, randn

NEW = "residual_scalars,input_scalars,value_embeddings"


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.mark.parametrize(("residual", "first"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("N", "C"), [(1, 3), (7, 13)])
def test_mixed_streams(ops: ModuleType, N: int, C: int, residual: bool, first: bool) -> None:
    """The mixture, its norm, and what follows for all that is mixed; both paths of the mixture's gradient."""

    def definition(
        inp: Tensor, first: Tensor | None, residual_scalar: Tensor | None, input_scalar: Tensor | None, **_: Any
    ) -> dict[str, Tensor]:
        mixed = inp if residual_scalar is None else residual_scalar * inp
        mixed = mixed if first is None or input_scalar is None else mixed + input_scalar * first
        return {"mixed": mixed, "out": normalized(mixed)}

    names = ["residual_scalar", "dresidual_scalar_acc"] * (not residual)
    names += ["first", "dfirst_inout", "input_scalar", "dinput_scalar_acc"] * (not first)
    ran = equal_autograd(ops, "mix_rmsnorm_backward", definition, N=N, C=C, **dict.fromkeys(names))
    alone = nan(N, C)
    ops.mix_rmsnorm_forward(**ran.before | {"mixed": None, "out": alone})
    assert torch.equal(ran.after["out"], alone)


def test_the_mixture_is_rounded_once() -> None:
    """In bf16 it is float32's, rounded: r x alone would be rounded to x."""
    x, x0 = torch.full((1, 8), 1.0, dtype=torch.bfloat16), torch.full((1, 8), 0.5, dtype=torch.bfloat16)
    r, s = (torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-8))
    out = torch.empty_like(x)
    mix_forward(out, x, x0, r, s)
    assert (out.double() == torch.tensor(1 + 2.0**-9).bfloat16().double()).all()
    mix_forward(out, x * 3, x0, r * 0.5, s * 0.5)
    assert (out.double() == torch.tensor(1.5 + 2.0**-10).bfloat16().double()).all()


@pytest.mark.parametrize(("B", "T", "H", "D", "G"), [(1, 1, 1, 4, 2), (2, 5, 3, 6, 18), (3, 4, 2, 10, 7)])
def test_value_embeddings(ops: ModuleType, B: int, T: int, H: int, D: int, G: int) -> None:
    """Queries and keys stay; the table's rows get their gradient by way of the embedding's backward."""
    N, C, V = B * T, H * D, 5

    def definition(
        qkv_inout: Tensor, norm: Tensor, gate_weight: Tensor, tokens: Tensor, table: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        gate = 2 * torch.sigmoid(norm[:, :G] @ gate_weight.t())
        added = (gate.unsqueeze(-1) * table[tokens.view(-1)].view(N, H, D)).view(N, C)
        return {"qkv_inout": torch.cat([qkv_inout[:, : 2 * C], qkv_inout[:, 2 * C :] + added], 1), "gate": gate}

    tokens = torch.arange(N).view(B, T) * 3 % V
    ran = equal_autograd(ops, "value_embedding_backward", definition, B=B, T=T, H=H, D=D, G=G, V=V, Vp=V, tokens=tokens)
    assert torch.equal(ran.after["qkv_inout"][:, : 2 * C], ran.before["qkv_inout"][:, : 2 * C])
    dtable = torch.full((V, C), SENTINEL, dtype=torch.float64)
    dvalues = ran.backward_after["dvalues"]
    ops.token_embedding_backward(dtable, dvalues, tokens, torch.argsort(tokens.view(-1), stable=True).int())
    close(dtable - SENTINEL, ran.of_inputs["table"])


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_a_step_of_generation_normalises_for_itself(backend: ModuleType) -> None:
    H, D, G = 3, 6, 5
    qkv, stream, weight, table = (
        randn(4, 3 * H * D),
        randn(4, H * D, seed=1) * 3,
        randn(H, G, seed=2),
        randn(7, H * D, seed=3),
    )
    tokens, found, expected = torch.tensor([6, 0, 3, 0]), qkv.clone(), qkv.clone()
    backend.decode.value_embedding_decode(found, stream, weight, tokens, table)
    backend.value_embedding_forward(expected, nan(4, H), normalized(stream), weight, tokens, table)
    close(found, expected)


def test_a_gate_of_zeros_lets_all_pass(ops: ModuleType) -> None:
    table, qkv, tokens = randn(5, 6, seed=1), torch.zeros(3, 18, dtype=torch.float64), torch.tensor([[4, 0, 4]])
    ops.value_embedding_forward(qkv, nan(3, 2), randn(3, 6), torch.zeros(2, 6, dtype=torch.float64), tokens, table)
    assert torch.equal(qkv[:, 12:], table[[4, 0, 4]])


# Their parameters.


def test_who_learns_how_fast() -> None:
    """Tables in every second layer up to the last; scalars and gates do not decay."""
    table = {row.name: row for row in parameter_table(shape_without(NEW), lanes=2)}
    names = [name for name in table if "value" in name]
    assert names == [f"blocks.{layer}.value_{name}" for layer in (0, 2) for name in ("embedding", "gate")]
    rates = {name: (row.group, row.rate, row.bucket) for name, row in table.items() if name.startswith("blocks.0.")}
    assert rates["blocks.0.value_embedding"] == ("embedding", 75.0, "values.0")
    assert rates["blocks.0.value_gate"] == ("vector", 1.0, "values.0")
    assert rates["blocks.0.residual_scalar"] == ("vector", 1.0, "blocks.0")
    assert rates["blocks.0.input_scalar"] == ("vector", 100.0, "blocks.0")
    assert rates["blocks.0.qkv_weight"] == ("matrix", 1.0, "blocks.0")
    assert table["blocks.1.residual_scalar"].init.value == 1 and table["blocks.1.input_scalar"].init.value == 0.1
    assert table["blocks.2.value_gate"].init.kind == "zeros" and table["blocks.2.value_gate"].shape == (3, 32)


def test_no_more_flops() -> None:
    """Tables are looked up."""
    assert shape_without(NEW).flops_per_token == shape_without("").flops_per_token


@pytest.mark.parametrize("lanes", [2, 4])
def test_tables_have_buckets_of_their_own(lanes: int) -> None:
    """Those of the blocks stay equal, and take turns in the ring; a table has memory to itself, and is read before its
    block."""
    shape = ModelShape(57, 19, 6, 3, 42, "modern", toggled(NEW))
    found = {bucket.name: bucket for bucket in buckets_of(parameter_table(shape, lanes), lanes)}
    names = ["blocks.0", "values.1", "blocks.1", "blocks.2", "values.3", "blocks.3", "blocks.4", "values.5", "blocks.5"]
    assert list(found) == ["embedding", *names, "head"]
    assert len({bucket.elements for name, bucket in found.items() if name.startswith("blocks")}) == 1
    places = gradient_ring(tuple(found.values()))
    assert all(places[name].stop - places[name].start == bucket.elements for name, bucket in found.items())
    assert places["blocks.3"] == places["blocks.0"] and places["blocks.5"] == places["blocks.2"]
    second = {f"blocks.{layer}" for layer in (3, 4, 5)}
    alone = sorted((places[name].start, places[name].stop) for name in found if name not in second)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(alone))


def test_the_twin_learns_alike() -> None:
    """Its optimizers have the matrices, rates and decays of the rows."""
    config = RunConfig(architecture="modern", learning_rate=1e-3, weight_decay=0.1)
    twin = ModernTwin(shape_without(NEW))
    optimizer = modern_optimizer(twin, config, fused=False)
    muon, *rest = optimizer.param_groups
    assert len(muon["params"]) == 4 * 3 and all(p.dim() == 2 for p in muon["params"])
    found = {(round(group["lr"] / 1e-3), group["weight_decay"] > 0): len(group["params"]) for group in rest}
    assert found == {(1, True): 2, (1, False): 3 + 2, (100, False): 3, (75, True): 2}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(twin.parameters()))


@pytest.mark.parametrize("rate", [1.0, 100.0])
def test_a_rate_multiplies_the_step_and_not_the_decay(ops: ModuleType, rate: float) -> None:
    """As the optimizer calls it: with the decay over the rate."""
    controls = torch.tensor([3.0, 1e-3, 0, 0], dtype=torch.float64)
    results = torch.tensor([0, 0, 1.0, UPDATE, 1], dtype=torch.float64)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    moved = []
    for decay, gradient in ((0.0, 1.0), (0.1, 0.0)):
        w = torch.ones(128)
        g, m, v = (torch.full_like(w, value) for value in (gradient, 0.0, 0.0))
        ops.adamw_update(w, w, m, v, g, controls, results, **settings, weight_decay=decay / rate, rate=rate)
        moved.append(1 - w[0].item())
    exact = 0.1 / (1 - 0.9**3) / (0.05 / (1 - 0.95**3)) ** 0.5
    assert moved[0] == pytest.approx(1e-3 * rate * exact, rel=1e-3) and moved[1] == pytest.approx(1e-4, rel=1e-2)
