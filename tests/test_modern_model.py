"""The modern network: gradients against float64 autograd with and without each technique, recompute levels, generation."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from handgrad.generation.decode import prefill
from handgrad.memory.rows import count_parameters, initialize
from handgrad.models import compute_losses, modern, parameter_table
from handgrad.models.passes import head_logits
from handgrad.ops import cpu, reference
from handgrad.settings.config import TECHNIQUES, ModelShape
from tests.conftest import Model, make_model
from tests.model_checks import check_bf16_gradients, check_forward_alone, check_twin_gradients
from tests.techniques import USUAL, toggled
from tests.test_sampling import make_buffers

FIRST, NEW = list(USUAL), [name for name in TECHNIQUES if name not in USUAL]
ODD = ModelShape(57, 19, 3, 3, 42, "modern")
EVERY = ["", *FIRST, ",".join(FIRST), *NEW, ",".join(NEW), "softcap," + ",".join(NEW)]


def shape_without(techniques: str) -> ModelShape:
    """Those of the names that are on by default taken away, the others added."""
    return ModelShape(57, 19, 3, 3, 42, "modern", toggled(techniques))


@pytest.mark.parametrize(
    ("recompute", "batch", "length", "chunk"), [(0, 3, 17, 20), (1, 1, 1, 1), (2, 2, 19, 1 << 20), (3, 2, 7, 5)]
)
@pytest.mark.parametrize("techniques", EVERY)
def test_gradients_equal_autograd(techniques: str, recompute: int, batch: int, length: int, chunk: int) -> None:
    model = make_model(shape_without(techniques), batch, length, recompute=recompute, chunk=chunk, noise=0.3)
    model.run(recompute=recompute, scale=1 / (batch * length))
    check_twin_gradients(model)
    assert (model.table[0].view(model.flat_gradients)[ODD.vocab_size :] == 0).all(), "padded rows have no gradient"


@pytest.mark.parametrize("techniques", EVERY)
def test_a_forward_alone_gives_the_losses_of_training(techniques: str) -> None:
    check_forward_alone(shape_without(techniques))


def test_recompute_levels_keep_less() -> None:
    """Level 1 keeps no hidden layer, level 2 no norms' outputs either, level 3 the streams between blocks alone."""
    found = [{b.name: b.lifetimes for b in make_model(ODD, 2, 8, recompute=level).plan.buffers} for level in range(4)]
    again = [{name for name, lives in level.items() if lives != found[0][name]} for level in found]
    hidden, norms = {f"blocks.{n}.hidden" for n in range(3)}, {f"blocks.{n}.norm{k}" for n in range(3) for k in (1, 2)}
    blocks = {name for name in found[0] if name.startswith("blocks.") and not name.endswith("residual_out")}
    assert again == [set(), hidden, hidden | norms, blocks]


@pytest.mark.parametrize("techniques", EVERY)
def test_recomputation_keeps_the_bits(techniques: str) -> None:
    found = []
    for level in range(4):
        model = make_model(shape_without(techniques), 2, 19, torch.bfloat16, recompute=level, noise=0.3)
        model.run(recompute=level)
        found.append(model.flat_gradients)
    assert all(torch.equal(gradients, found[0]) for gradients in found[1:])


def test_bf16_gradients_are_as_good_as_bf16_autograd() -> None:
    check_bf16_gradients(ODD)


@pytest.mark.parametrize("techniques", EVERY)
def test_the_first_loss_is_that_of_a_guess(techniques: str) -> None:
    """A head of zeros gives every word the same probability; another one knows nothing either."""
    model = make_model(shape_without(techniques), 2, 16, noise=0.0)
    compute_losses(model.ops, model.weights, model.act, model.shape)
    guess = math.log(57)
    if "untied_head" in techniques or "zero_init" in techniques:
        assert model.act.losses.mean() == pytest.approx(guess, rel=0.3)
    else:
        torch.testing.assert_close(model.act.losses, torch.full_like(model.act.losses, guess))


def test_parameters() -> None:
    """Matrices begin at half the size of an orthogonal one's numbers, projections and head at zero; techniques add their
    tensors alone."""
    table = {row.name: row for row in parameter_table(ModelShape(50257, 1024, 12, 6, 768, "modern", toggled("")))}
    assert count_parameters(table.values()) == 2 * 50257 * 768 + 12 * 12 * 768 * 768
    assert table["blocks.3.qkv_weight"].std == 0.5 / math.sqrt(768) and table["blocks.3.fc_weight"].group == "matrix"
    drawn: dict[str, Tensor] = {}
    initialize(parameter_table(shape_without("")), 0, lambda row, values: drawn.update({row.name: values}))
    assert not any("proj" in name or name == "head" for name in drawn) and "blocks.0.fc_weight" in drawn
    names = {row.name for row in parameter_table(shape_without("untied_head"))}
    assert "head" not in names and "wte" in names
    drawn.clear()
    initialize(parameter_table(shape_without("zero_init")), 0, lambda row, values: drawn.update({row.name: values}))
    assert {"head", "blocks.2.proj_weight", "blocks.2.fcproj_weight"} <= drawn.keys()


def test_flops_count_what_is_multiplied() -> None:
    shape = ModelShape(50257, 1024, 12, 6, 768, "modern")
    products = 12 * 12 * 768 * 768 + 50257 * 768
    assert shape.flops_per_token == 6 * products + 6 * 12 * 768 * 1024
    tied = ModelShape(50257, 1024, 12, 6, 768, "modern", toggled("untied_head"))
    assert tied.flops_per_token == shape.flops_per_token


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    "techniques", ["", "rotary", "qk_norm", "softcap,embedding_norm", "untied_head", *NEW, ",".join(NEW)]
)
def test_cached_logits_are_the_forwards(ops: object, techniques: str) -> None:
    """After a prefill and step by step, sequences of other lengths beside each other."""
    shape = ModelShape(57, 80, 2, 2, 16, "modern", toggled(techniques))
    lengths, starts = [80, 9, 31], [66, 0, 20]
    model = make_model(shape, 1, 80, noise=0.4)
    texts = [torch.randint(57, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    buf = make_buffers(shape, 3, torch.float64, prefill_tokens=160)
    launch = partial(modern.prefill, ops, model.weights, buf, shape)
    prefill(launch, buf, [text[:start] for text, start in zip(texts, starts, strict=True)], range(3))
    expected = [whole_logits(model, text) for text in texts]
    for step in range(9):
        places = [min(start + step, length - 1) for start, length in zip(starts, lengths, strict=True)]
        buf.tokens.copy_(torch.tensor([text[place] for text, place in zip(texts, places, strict=True)]))
        buf.positions.copy_(torch.tensor(places))
        modern.decode_step(ops.decode, model.weights, buf, shape)  # type: ignore[attr-defined]
        for row, place in enumerate(places):
            torch.testing.assert_close(buf.logits[row, :57], expected[row][place], rtol=1e-9, atol=1e-9)


def whole_logits(model: Model, text: list[int]) -> Tensor:
    """(T, V), without a cache."""
    alone = make_model(model.shape, 1, len(text))
    alone.act.tokens.copy_(torch.tensor(text))
    for stage in modern.forward(reference, model.weights, alone.act, model.shape):
        stage.run()
    ((_, logits),) = head_logits(reference, model.weights, alone.act)
    if model.shape.softcap:
        reference.softcap_forward(logits, softcap=model.shape.softcap)
    return logits[:, :57].clone()
