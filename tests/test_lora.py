"""Adapters: gradients against float64 autograd, memory by formula, the text of their numbers, what they do not train."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.generation.decode import prefill
from handgrad.joins.lora import tables
from handgrad.joins.lora.bind import WithAdapters, adapted as with_adapters_of
from handgrad.joins.lora.tables import LoraDesign, adapters_of, merged
from handgrad.memory.arena import make_plan
from handgrad.memory.rows import named
from handgrad.models import named_weights
from handgrad.networks.lora import LoraShape, parse_lora
from handgrad.ops import Backend, cpu, reference
from handgrad.run.resolve import resolve
from handgrad.settings.config import ModelShape, RunConfig, check
from tests import llama_twin
from tests.conftest import Model, make_model
from tests.lora_twin import PRODUCTS, added, gpt2_logits
from tests.test_sampling import make_buffers

GPT2 = ModelShape(57, 19, 2, 4, 24)
SHAPES = {"gpt2": GPT2, **{family: llama_twin.shape_of(family, layers=2) for family in llama_twin.EVERY}}


class Adapted:
    """A model with adapters of random numbers, its base without gradients."""

    def __init__(
        self,
        shape: ModelShape,
        text: str,
        ops: Any,
        recompute: int = 0,
        dtype: torch.dtype = torch.float64,
        length: int = 17,
        noise: float = 0.3,
    ):
        self.model: Model = make_model(shape, 3, length, dtype, recompute=recompute, chunk=20, noise=noise)
        self.adapters = tuple(adapters_of(shape, parse_lora(text)))
        design = LoraDesign(self.adapters)
        self.table = design.table(1)
        generator = torch.Generator().manual_seed(3)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.views = {row.name: torch.randn(row.shape, generator=generator, dtype=exact).to(dtype) for row in self.table}
        self.gradients = {row.name: torch.zeros(row.shape, dtype=exact) for row in self.table}
        self.model.weights = with_adapters_of(self.adapters, self.model.weights, self.views, self.gradients)
        memory = make_plan(tables.buffers(design, self.model.table, 3 * length, dtype)).allocate(torch.device("cpu"))
        for view in memory.values():
            view.fill_(float("nan"))
        self.model.ops = WithAdapters(ops, memory)
        nothing = {row.name: None for row in self.model.table}
        self.model.gradients = named(self.model.module.Weights, nothing, shape.num_layers)

    def run(self, recompute: int = 0) -> None:
        self.model.forward()
        losses = self.model.act.losses
        self.model.backward(torch.tensor([1 / 51], dtype=losses.dtype, device=losses.device), recompute)

    def stored(self) -> dict[str, Tensor]:
        return {row.name: row.stored(self.model.flat) for row in self.model.table}


def autograd(
    adapted: Adapted, on: set[str], r: int, s: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    shape, act = adapted.model.shape, adapted.model.act
    leaves = {name: values.to(dtype, copy=True).requires_grad_() for name, values in adapted.views.items()}
    weights = added({n: v.to(dtype) for n, v in adapted.stored().items()}, leaves, shape, on, r, s)
    twin = gpt2_logits if shape.architecture == "gpt2" else llama_twin.logits
    logits = twin(weights, act.tokens, shape)
    loss = F.cross_entropy(logits.flatten(0, 1), act.targets.flatten())
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


EVERY = {"gpt2": "qkv+o+up+down", **dict.fromkeys(("llama", "gemma3", "olmo"), "q+k+v+o+gate+up+down")}


@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_gradients_equal_autograd(ops: Any, name: str, recompute: int) -> None:
    shape = SHAPES[name]
    adapted = Adapted(shape, "rank=3,alpha=1.5", ops, recompute)
    before = adapted.model.flat.clone()
    adapted.run(recompute)
    loss, expected = autograd(adapted, set(EVERY[shape.architecture].split("+")), 3, 0.5)
    assert abs(adapted.model.act.losses.mean() - loss) <= 1e-12 * loss
    for row, found in adapted.gradients.items():
        error = (found - expected[row]).norm() / expected[row].norm()
        assert error <= 1e-10, f"{row}: relative error {error:.3g}"
    assert adapted.model.flat.equal(before)


@pytest.mark.parametrize(
    ("name", "on"), [("gpt2", "o+up"), ("qwen2", "q+v"), ("qwen3", "k+up+o"), ("llama", "v"), ("wide", "gate+down")]
)
def test_a_choice_of_products(name: str, on: str) -> None:
    """The others keep their weights, and have no gradients."""
    adapted = Adapted(SHAPES[name], f"rank=2,on={on}", reference)
    adapted.run()
    loss, expected = autograd(adapted, set(on.split("+")), 2, 2.0)
    assert abs(adapted.model.act.losses.mean() - loss) <= 1e-12 * loss
    for row, found in adapted.gradients.items():
        error = (found - expected[row]).norm() / expected[row].norm()
        assert error <= 1e-10, f"{row}: relative error {error:.3g}"


@pytest.mark.parametrize("name", SHAPES)
def test_recomputation_keeps_the_bits(name: str) -> None:
    found = []
    for level in (0, 1, 2, 3):
        adapted = Adapted(SHAPES[name], "rank=3", cpu, level, torch.bfloat16)
        adapted.run(level)
        found.append(adapted.gradients)
    assert all(found[0][row].equal(other[row]) for other in found[1:] for row in found[0])


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_added(name: str) -> None:
    """Those of a second micro-batch, here the same one, to those of the first."""
    once, twice = (Adapted(SHAPES[name], "rank=3", reference) for _ in range(2))
    once.run()
    twice.run()
    twice.run()
    for row, found in twice.gradients.items():
        torch.testing.assert_close(found, 2 * once.gradients[row], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_compute_the_same(name: str) -> None:
    """In float32, up to the rounding of the sum."""
    adapted = Adapted(SHAPES[name], "rank=3,alpha=1.5", reference, dtype=torch.float32)
    adapted.model.forward()
    unmerged = adapted.model.act.lnf.clone()
    rows = {row.name: row for row in adapted.model.table}
    for adapter in adapted.adapters:
        weight = rows[adapter.weight].view(adapted.model.flat)
        weight.copy_(merged(weight, adapter, adapted.views.__getitem__))
    adapted.model.ops = reference
    adapted.model.weights = named_weights(SHAPES[name], adapted.model.flat, adapted.model.table)
    adapted.model.forward()
    assert (unmerged - adapted.model.act.lnf).abs().max() <= 1e-4 and unmerged.abs().max() > 1


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", SHAPES)
def test_generation_reads_the_adapters(ops: Any, name: str) -> None:
    """After a prefill longer than the memory of u, and step by step."""
    shape = replace(SHAPES[name], sequence_length=70)
    adapted = Adapted(shape, "rank=3,alpha=1.5", ops)
    model, leaves = adapted.model, adapted.views
    text = torch.randint(57, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    buf = make_buffers(shape, 1, torch.float64, prefill_tokens=70)
    prefill(partial(model.module.prefill, model.ops, model.weights, buf, shape), buf, [text[:66]], range(1))
    every = {product for products in PRODUCTS[shape.architecture].values() for product in products}
    weights = added(adapted.stored(), leaves, shape, every, 3, 0.5)
    twin = gpt2_logits if shape.architecture == "gpt2" else llama_twin.logits
    expected = twin(weights, torch.tensor([text]), shape)[0]
    for place in range(66, 70):
        buf.tokens.fill_(text[place])
        buf.positions.fill_(place)
        model.module.decode_step(model.ops.decode, model.weights, buf, shape)
        torch.testing.assert_close(buf.logits[0, :57], expected[place], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_gradients_are_as_good_as_bf16_autograd(name: str) -> None:
    """The error against float64 is at most twice that of PyTorch's own backward run wholly in bf16."""
    shape, on = SHAPES[name], set(EVERY[SHAPES[name].architecture].split("+"))
    ours = Adapted(shape, "rank=3,alpha=1.5", reference, dtype=torch.bfloat16)
    ours.run()
    _, exact = autograd(ours, on, 3, 0.5)
    _, theirs = autograd(ours, on, 3, 0.5, torch.bfloat16)
    our_error = math.hypot(*((ours.gradients[row].double() - exact[row]).norm() for row in exact))
    their_error = math.hypot(*((theirs[row].double() - exact[row]).norm() for row in exact))
    assert our_error <= 2 * their_error, f"{our_error:.3g} > 2 * {their_error:.3g}"


# Memory.

SMOLLM = RunConfig(
    architecture="llama", llama="kv_heads=3,feed_forward=1536,tied", num_layers=30, num_heads=9, channels=576
)


@pytest.mark.parametrize(("precision", "weight_bytes"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_the_bases_weights_and_the_adapters(precision: str, weight_bytes: int, ranks: int) -> None:
    """By formula: P weights of the base, r (I + O) numbers for every product with a master, a gradient and two moments."""
    plain = replace(SMOLLM, precision=precision, micro_batch=1, device="cpu", lanes=ranks, tokens_per_step=2048)
    full = resolve(plain, 49152, ranks=ranks)
    design = resolve(replace(plain, lora="rank=16,on=q+k+v+o+gate+up+down", init_from="x"), 49152, ranks=ranks)
    C, F, K, L = 576, 1536, 3 * 64, 30
    inputs_and_outputs = (C + C) + 2 * (C + K) + (C + C) + 2 * (C + F) + (F + C)
    adapters = 16 * inputs_and_outputs * L
    assert sum(row.elements for row in design.parameters) == adapters
    found, before = design.plan.size_bytes, full.plan.size_bytes
    slack = 1 << 18  # of alignment and of the few numbers of a step
    base = sum(row.elements for row in design.frozen)

    def near(kind: str, wanted: int) -> bool:
        return 0 <= found[kind] - wanted < slack * 4

    assert near("frozen weights", weight_bytes * base)
    assert near("parameters", weight_bytes * adapters) and near("gradients", 4 * adapters)
    assert near("moments", 8 * adapters // ranks)
    if precision == "bf16":
        assert near("master weights", 4 * adapters // ranks)
    else:
        assert "master weights" not in found
    N, R, wide = 1024, 3 * 16, 2 * F * 2 * 16
    beside = weight_bytes * (2 * N * R + wide) + 4 * wide
    assert found["activations"] == before["activations"] and near("adapters at work", beside)
    assert sum(found.values()) < 0.65 * sum(before.values())


def test_work_is_without_the_gradients_of_the_base() -> None:
    design = resolve(replace(SMOLLM, lora="rank=8", init_from="x", device="cpu", precision="fp32"), 49152)
    full = design.shape.flops_per_token
    matrices = sum(row.elements for row in design.frozen if row.group == "matrix") + 49152 * 576
    a, b = (sum(row.elements for row in design.parameters if row.name.endswith(end)) for end in ("_A", "_B"))
    assert design.flops_per_token == full - 2 * matrices + 8 * a + 6 * b
    assert resolve(replace(SMOLLM, device="cpu", precision="fp32"), 49152).flops_per_token == full


# The text, and what is refused.


def test_the_text_has_the_numbers() -> None:
    assert parse_lora("rank=8, alpha=4,on=q+v") == LoraShape(8, 4.0, "q+v") and parse_lora("rank=8,alpha=4").scale == 0.5
    assert LoraShape().scale == 2.0 and parse_lora("on=v+q").products(SMOLLM.shape(49152)) == ("q", "v")
    assert LoraShape().products(RunConfig().shape(49152)) == ("qkv", "o", "up", "down")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora": "ranks=8"}, "a number of lora must be one of .*did you mean rank"),
        ({"lora": "rank"}, "lora must be like 'rank=16,alpha=32,on=q.v', found 'rank'"),
        ({"lora": "8"}, "lora must be like 'rank=16,alpha=32,on=q.v', found '8'"),
        ({"lora": "rank=0"}, r"rank of 1 or more and an alpha of 0 \(twice that\) to 3.4e.38 times it, found 'rank=0'"),
        ({"lora": "alpha=nan"}, "an alpha of 0 "),
        ({"lora": "rank=8,rank=4"}, "lora must be like 'rank=.*, found 'rank=4'"),
        ({"lora": "alpha=1e308"}, "found 'alpha=1e308'; try"),
        ({"lora": "on=q+w"}, "a product of llama in lora must be one of q, k, v, o, gate, up, down"),
        ({"architecture": "gpt2", "lora": "on=q"}, "a product of gpt2 in lora must be one of qkv, o, up, down"),
        ({"architecture": "modern"}, "lora is for architecture gpt2 or llama or gemma3 or olmo, found modern"),
        ({"init_from": ""}, "lora 'rank=4' adapts weights, found none; name them with --init-from"),
        ({"optimizer": "muon"}, "lora trains with optimizer adamw, found muon; muon's step is one of a whole"),
        ({"architecture": "gpt2", "dropout": 0.1}, "lora trains with dropout 0.0, found 0.1"),
        ({"freeze": "wte"}, "lora trains with freeze empty, found wte"),
        ({"precision": "fp8", "fp8_head": "dgrad"}, "lora trains with fp8_head none, found dgrad"),
    ],
)
def test_what_it_does_not_do_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**{"architecture": "llama", "lora": "rank=4", "init_from": "x"} | settings))


def test_ranks_of_the_kernels() -> None:
    kernels: Any = SimpleNamespace(BACKEND=Backend("cuda"))
    tables.check(parse_lora("rank=4"), cpu)
    tables.check(parse_lora("rank=8"), kernels)
    with pytest.raises(UsageError, match=r"ranks of lora that are multiples of 8, found 4; --backend reference takes any"):
        tables.check(parse_lora("rank=4"), kernels)
