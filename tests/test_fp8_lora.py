"""Adapters beside frozen weights in fp8: to the bit a model whose frozen products round their operands, and near one that
rounds nothing; the forms of its tensors, its memory."""

import math
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from handgrad.generation.decode import prefill
from handgrad.joins.fp8 import reference as fp8_reference, tables, with_lora as frozen
from handgrad.joins.fp8.formats import AMAX, COUNTING, E4M3, GRADIENT_FORMATS, SCALE, Quantized
from handgrad.joins.fp8.tables import Fp8Gemms, fp8_gemms
from handgrad.joins.fp8.with_lora import DEQUANT_SCRATCH, WithDequantizedWeights, WithFp8Adapters, WithFp8FrozenProducts
from handgrad.joins.lora import tables as lora_tables
from handgrad.joins.lora.bind import WithAdapters, adapted as with_adapters_of, without_adapter
from handgrad.machine.gpus import GPUS
from handgrad.memory.arena import make_plan
from handgrad.memory.rows import named
from handgrad.ops import cpu, reference
from handgrad.run.resolve import resolve
from handgrad.settings.config import ModelShape, RunConfig, check
from handgrad.tools.forecast import resolve_for
from tests import llama_twin
from tests.conftest import set_scales
from tests.fp8_models import ROUNDOFF, RoundedProducts
from tests.test_fp8_llama import RoundedLlamaProducts
from tests.test_lora import SMOLLM, Adapted
from tests.test_sampling import make_buffers

LENGTH, LAYERS, VOCABULARY = 16, 2, 57
GPT2 = ModelShape(VOCABULARY, LENGTH, LAYERS, 2, 32)
SHAPES = {"gpt2": GPT2}
SHAPES |= {name: llama_twin.shape_of(name, VOCABULARY, LENGTH, LAYERS) for name in llama_twin.FAMILIES}
LORA = "rank=3,alpha=1.5"
SMALL = 0.1  # of a random adapter beside weights as they are drawn: the attention of larger ones is all on one token
E4M3_GRADIENTS = GRADIENT_FORMATS["e4m3"]


def gemms_of(keep_bf16: str = "") -> Fp8Gemms:
    return fp8_gemms(keep_bf16, "", LAYERS, ("qkv", "proj", "mlp"))


class AdaptedInFp8(Adapted):
    """A model with adapters of random numbers, its base frozen in fp8: every tensor at its own current scale."""

    def __init__(
        self,
        shape: ModelShape,
        text: str = LORA,
        gemms: Fp8Gemms | None = None,
        recompute: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        backends: tuple[Any, ModuleType] = (reference, fp8_reference),
        noise: float = 0.3,
        device: str = "cpu",
    ):
        plain_ops, ops = backends
        super().__init__(shape, text, plain_ops, recompute, dtype, LENGTH, noise)
        model, gemms = self.model, gemms or gemms_of()
        self.views, self.gradients = (
            {name: values.to(device) for name, values in of.items()} for of in (self.views, self.gradients)
        )
        flat = model.flat.to(device)
        rows = tuple(model.module.activations(shape, 3, LENGTH, dtype, plain_ops, chunk=20, training=True))
        forms = frozen.with_16_bits(shape.forms)
        table = tables.quantized_table(model.table, rows, forms, gemms, E4M3_GRADIENTS)
        rounded = frozenset(row.name for row in table if row.kind == tables.WEIGHT)
        sizes = {"num_heads": shape.num_heads, "head_width": shape.head_width, "channels": shape.channels}
        widest = max(max(row.shape) for row in model.table if row.group == "matrix")
        sizes |= {"widest": widest, "padded_vocab_size": shape.padded_vocab_size, "feed_forward": shape.feed_forward}
        parts = ops.statistics_parts(batch=3, length=LENGTH, **sizes)
        buffers = [
            *tables.activation_buffers(rows, forms, gemms, E4M3_GRADIENTS, recompute),
            *tables.weight_buffers(table, model.table, gemms),
            *tables.scaling_buffers(len(table), parts),
        ]
        beside = [frozen.dequant_scratch(model.table, rounded, dtype)]
        beside += lora_tables.buffers(SimpleNamespace(adapters=self.adapters), model.table, 3 * LENGTH, dtype)
        self.plan = make_plan([*frozen.with_shared_operand(buffers), *beside])
        views = self.memory = self.plan.allocate(torch.device(device))
        for name, view in views.items():
            if view.itemsize == 1:
                view.view(torch.uint8).fill_(0x7F)  # NaN in e4m3
            else:
                view.fill_(float("nan") if view.is_floating_point() else 0)
            if name in ("tokens", "targets"):
                view.copy_(getattr(model.act, name))
        views["sorted_positions"].copy_(torch.argsort(model.act.tokens.view(-1), stable=True))
        set_scales(views["fp8.scaling"])
        views |= frozen.shared_operand_views(SimpleNamespace(table=table), views)
        plain = {row.name: row.view(flat) for row in model.table if row.name not in rounded}
        self.forms = tables.quantized_tensors(table, views, plain, current=True)
        views["fp8.scaling"][:, COUNTING] = 0.0
        delayed: Any = SimpleNamespace(ops=ops, tensors={n: replace(form, current=False) for n, form in self.forms.items()})
        for row in model.table:
            if row.name in rounded:
                frozen.quantize_frozen(delayed, views, row.name, row.view(flat))
        layers = shape.num_layers
        weights = plain | {name: self.forms[name] for name in rounded}
        model.weights = named(model.module.Weights, weights, layers)
        model.act = named(model.module.Activations, views | self.forms, layers)
        model.d = named(model.module.Gradients, views | self.forms, layers)
        model.weights = with_adapters_of(self.adapters, model.weights, self.views, self.gradients)
        model.ops = WithFp8Adapters(WithFp8FrozenProducts(plain_ops, ops, views[DEQUANT_SCRATCH]), views)
        self.text_ops = WithAdapters(WithDequantizedWeights(plain_ops, views[DEQUANT_SCRATCH]), views)  # type: ignore[arg-type]


class RoundedBase(RoundedLlamaProducts):
    """Plain products, but those of weights that are wanted in fp8 round their operands, and make no weight gradient."""

    PARTS: ClassVar = {**RoundedProducts.PARTS, **RoundedLlamaProducts.PARTS}

    def __init__(self, model: Any, gemms: Fp8Gemms):
        self.gemms = gemms
        self.part_of = {
            without_adapter(getattr(block, name)).data_ptr(): (layer, part)
            for layer, block in enumerate(model.weights.blocks)
            for name, part in self.PARTS.items()
            if hasattr(block, name)
        }

    def linear_backward(  # type: ignore[override]
        self, dinp: Tensor, dweight: Any, dbias: Any, dout: Tensor, inp: Tensor, weight: Tensor, **scratch: Any
    ) -> None:
        if self.wants(weight, "dgrad"):
            dinp.copy_(torch.mm(self.rounded(dout, E4M3), self.rounded(weight, E4M3)))
        else:
            reference.linear_backward(dinp, dweight, dbias, dout, inp, weight)


def rounding_twin(shape: ModelShape, text: str, gemms: Fp8Gemms, dtype: torch.dtype = torch.bfloat16) -> Adapted:
    twin = Adapted(shape, text, reference, dtype=dtype, length=LENGTH)
    own = twin.model.ops
    twin.model.ops = WithAdapters(RoundedBase(twin.model, gemms), own.memory)  # type: ignore[arg-type]
    return twin


KEPT = {"all": "", "without mlp": "mlp", "without parts of layers": "0.qkv,1.proj"}
CASES = [*(("all", LORA, name) for name in SHAPES), *((kept, LORA, "qwen3") for kept in KEPT if kept != "all")]
CASES += [("without parts of layers", LORA, "gpt2"), ("all", "rank=2,on=q+v", "llama"), ("all", "rank=2,on=down", "qwen2")]
CASES += [("all", "rank=2,on=up", "gpt2")]


@pytest.mark.parametrize(("kept", "text", "name"), CASES)
def test_the_frozen_products_and_no_others_round_their_operands(kept: str, text: str, name: str) -> None:
    """At every recompute level, the bits of a model that keeps no fp8 number anywhere."""
    gemms = gemms_of(KEPT[kept])
    twin = rounding_twin(SHAPES[name], text, gemms)
    twin.run()
    for recompute in (0, 1, 2, 3):
        adapted = AdaptedInFp8(SHAPES[name], text, gemms, recompute)
        adapted.run(recompute)
        assert adapted.model.act.losses.equal(twin.model.act.losses)
        for row, gradient in twin.gradients.items():
            assert gradient.any() and adapted.gradients[row].equal(gradient), row


def bound(gemms: Fp8Gemms, llama: bool) -> float:
    """Of a gradient's relative error: `tests.test_fp8_model.bound` without weight gradients, which are not in fp8. Both
    operands of a forward product and of an input gradient bring their roundoff; SwiGLU multiplies two such numbers."""
    products = sum({"qkv": 1, "proj": 1, "mlp": 2}[part] for _, part in gemms.blocks)
    products += llama * sum(part == "mlp" for _, part in gemms.blocks) / 2
    return math.sqrt(products * 4 * ROUNDOFF[E4M3] ** 2)


@pytest.mark.parametrize(("kept", "name"), [*(("all", name) for name in SHAPES), ("without mlp", "qwen3")])
def test_gradients_are_as_near_as_the_format_admits(kept: str, name: str) -> None:
    """From those of the same numbers in float32 without fp8."""
    gemms = gemms_of(KEPT[kept])
    exact = Adapted(SHAPES[name], LORA, reference, 0, torch.float32, LENGTH, noise=0.1)
    rounded = AdaptedInFp8(SHAPES[name], gemms=gemms, noise=0.1)
    exact.model.flat.copy_(rounded.model.flat)
    for row, values in exact.views.items():
        values.copy_(rounded.views[row].mul_(SMALL))
    exact.run()
    rounded.run()
    admitted = bound(gemms, name != "gpt2")
    for row, gradient in exact.gradients.items():
        error = (rounded.gradients[row] - gradient).norm() / gradient.norm()
        assert 0.005 < error <= admitted, f"{row}: relative error {error:.3g}, admitted {admitted:.3g}"


@pytest.mark.parametrize("name", SHAPES)
def test_the_fast_path_of_a_cpu_computes_the_same(name: str) -> None:
    """Up to the formats' error, of products in fp8 beside its own kernels; twice the same bits."""
    found, again, wanted = (AdaptedInFp8(SHAPES[name], backends=(ops, fp8_reference)) for ops in (cpu, cpu, reference))
    for adapted in (found, again, wanted):
        adapted.run()
    for row, gradient in wanted.gradients.items():
        assert (found.gradients[row] - gradient).norm() <= bound(gemms_of(), name != "gpt2") * gradient.norm(), row
        assert found.gradients[row].equal(again.gradients[row])


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_tensor_has_the_forms_that_are_read_and_no_others(name: str) -> None:
    """A frozen weight has rows alone; an activation and a gradient 16 bits and rows."""
    adapted = AdaptedInFp8(SHAPES[name], gemms=gemms_of("0.qkv"))
    quantised = [form for form in adapted.forms.values() if isinstance(form, Quantized)]
    assert len(quantised) == len({id(form) for form in quantised}) and all(form.columns is None for form in quantised)
    for block in adapted.model.weights.blocks:
        for weight in vars(block).values():
            form = without_adapter(weight)
            assert not isinstance(form, Quantized) or form.plain is None
    first, second = adapted.model.weights.blocks
    forms = (without_adapter(block.qkv_weight) for block in (first, second))
    assert [type(form) for form in forms] == [Tensor, Quantized]
    for form in (*vars(adapted.model.act.blocks[1]).values(), *vars(adapted.model.d.blocks[1]).values()):
        assert not isinstance(form, Quantized) or (form.plain is not None and form.rows is not None)
    assert not any(view.endswith(".columns") for view in adapted.memory)
    assert not adapted.memory.keys() & {"dturned", "dgelu"}, "nothing passes through a workspace"


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_frozen_weight_is_rounded_at_its_own_scale(name: str) -> None:
    """At the scale that a delayed one comes to, as its numbers stay; and the numbers that it stands for are exact."""
    adapted = AdaptedInFp8(SHAPES[name])
    for row in adapted.model.table:
        form = adapted.forms.get(row.name)
        if form is None:
            continue
        weight = row.view(adapted.model.flat).float()
        assert form.statistics[AMAX].max() == weight.abs().max()
        assert 224 < weight.abs().max() * form.scaling[SCALE] <= 448
        assert form.scaling[COUNTING] == 1
        text = WithDequantizedWeights(reference, adapted.memory[DEQUANT_SCRATCH]).in_16_bits(form)
        assert text.dtype == torch.bfloat16 and text.float().equal(form.rows.float() * form.inverse_scale)
        assert (text - weight).abs().max() <= 2**-4 * weight.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_text_reads_the_rounded_weights(ops: Any, name: str) -> None:
    """The logits of a model in 16 bits whose weights are the rounded ones, and not those of the weights as they were."""
    shape = SHAPES[name]
    adapted = AdaptedInFp8(shape, backends=(ops, fp8_reference))
    twin, before = (Adapted(shape, LORA, ops, 0, torch.bfloat16, LENGTH) for _ in range(2))
    for row in twin.model.table:
        if row.name in adapted.forms:
            form = adapted.forms[row.name]
            row.view(twin.model.flat).copy_(form.rows.float() * form.inverse_scale)
    logits = []
    for model, text_ops in (
        (adapted.model, adapted.text_ops),
        (twin.model, twin.model.ops),
        (before.model, before.model.ops),
    ):
        buf = make_buffers(shape, 1, torch.bfloat16, prefill_tokens=LENGTH)
        prefill(partial(model.module.prefill, text_ops, model.weights, buf, shape), buf, [[3, 1, 4, 1, 5]], range(1))
        buf.tokens.fill_(9)
        buf.positions.fill_(5)
        model.module.decode_step(text_ops.decode, model.weights, buf, shape)
        logits.append(buf.logits.clone())
    assert logits[0].equal(logits[1]) and not logits[0].equal(logits[2])


# Memory.


def test_weights_take_a_byte_and_activations_what_they_take_in_bf16() -> None:
    """By formula, for SmolLM2-135M on a GPU: the blocks' matrices a byte a number, the rest of the base two."""
    settings = {"micro_batch": 4, "lora": "rank=16", "init_from": "x", "device": "cuda"}

    def plan(precision: str, recompute: int) -> dict[str, int]:
        config = check(replace(SMOLLM, precision=precision, recompute=recompute, **settings))
        return resolve_for(GPUS["h200"], config, 49152).plan.size_bytes

    C, F, K, L = 576, 1536, 3 * 64, 30
    matrices, slack = L * (C * (C + 2 * K) + C * C + 3 * C * F), 1 << 18
    for recompute in range(4):
        bf16, fp8 = (plan(precision, recompute) for precision in ("bf16", "fp8"))
        assert 0 <= fp8["fp8 weights"] - matrices < slack
        assert abs(bf16["frozen weights"] - fp8["frozen weights"] - 2 * matrices) < slack
        assert abs(fp8["adapters at work"] - bf16["adapters at work"] - 2 * 2 * F * C) < slack
        operand = 4 * 1024 * max(2 * F, C)
        assert 0 <= fp8["activations"] - bf16["activations"] <= operand
        assert fp8["fp8 scales"] < 20 << 20
        same = ("parameters", "master weights", "gradients", "moments")
        assert [fp8[kind] for kind in same] == [bf16[kind] for kind in same]


def test_a_part_in_bf16_keeps_its_weights_in_16_bits() -> None:
    settings = {"micro_batch": 1, "lora": "rank=16", "init_from": "x", "device": "cpu", "precision": "fp8"}
    every, without = (resolve(check(replace(SMOLLM, **settings, fp8_keep_bf16=kept)), 49152) for kept in ("", "mlp"))
    mlp = 30 * 3 * 576 * 1536
    assert without.plan.size_bytes["frozen weights"] - every.plan.size_bytes["frozen weights"] == 2 * mlp
    assert every.plan.size_bytes["fp8 weights"] - without.plan.size_bytes["fp8 weights"] == mlp
    assert every.fp8_only - without.fp8_only == {
        f"blocks.{layer}.{name}" for layer in range(30) for name in ("gate_up_weight", "down_weight")
    }
    none = resolve(check(replace(SMOLLM, **settings, fp8_keep_bf16="qkv,proj,mlp")), 49152)
    assert not none.fp8_only and "fp8 weights" not in none.plan.size_bytes


def test_the_work_is_that_of_bf16() -> None:
    settings = {"lora": "rank=8", "init_from": "x", "device": "cpu"}
    fp8, bf16 = (resolve(check(RunConfig(**settings, precision=name)), 50257) for name in ("fp8", "bf16"))
    assert fp8.flops_per_token == bf16.flops_per_token
    assert [row.name for row in fp8.frozen] == [row.name for row in bf16.frozen]
