"""The Llama family and Gemma 3: gradients against float64 autograd for each member, recompute levels, generation."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from handgrad.generation.decode import prefill
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from handgrad.ops import cpu, reference
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model
from tests.llama_twin import EVERY, autograd, logits, shape_of
from tests.model_checks import check_forward_alone, check_gradients, exact_and_bf16
from tests.test_sampling import make_buffers


def stored(model: Model, flat: Tensor) -> dict[str, Tensor]:
    return {row.name: row.stored(flat) for row in model.table}


@pytest.mark.parametrize(
    ("recompute", "batch", "length", "chunk"), [(0, 3, 17, 20), (1, 1, 1, 1), (2, 2, 19, 1 << 20), (3, 2, 7, 5)]
)
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_gradients_equal_autograd(ops: object, family: str, recompute: int, batch: int, length: int, chunk: int) -> None:
    model = make_model(shape_of(family), batch, length, recompute=recompute, chunk=chunk, noise=0.3)
    model.ops = ops
    model.run(recompute=recompute, scale=1 / (batch * length))
    loss, expected = autograd(stored(model, model.flat), model.act.tokens, model.act.targets, model.shape)
    assert abs(model.act.losses.mean() - loss) <= 1e-12 * loss
    found = stored(model, model.flat_gradients)
    # One token alone has no gradient of a query.
    check_gradients(((name, gradient, expected[name]) for name, gradient in found.items()), least_norm=1e-5)
    padding = model.table[0].view(model.flat_gradients)[model.shape.vocab_size :]
    assert (padding == 0).all(), "padded rows have no gradient"


@pytest.mark.parametrize("family", EVERY)
def test_recomputation_keeps_the_bits(family: str) -> None:
    """And the memory that it needs is less at every level."""
    found, kept = [], []
    for level in (0, 1, 2, 3):
        model = make_model(shape_of(family), 2, 19, recompute=level)
        model.run(recompute=level)
        found.append(model.flat_gradients)
        kept.append({b.name.partition(".")[2] for b in model.plan.buffers if len(b.lifetimes) == 2})
    assert all(torch.equal(gradients, found[0]) for gradients in found[1:])
    gates = "geglu" if model.shape.architecture == "gemma3" else "swiglu"
    hidden, norms = {"hidden", gates}, {"norm1", "norm2"} & names_of(model)
    norms |= {"qkv"} if "heads" in names_of(model) else set()
    again = [{name.partition(".")[2] for name in names if "." in name} for names in kept]
    assert again == [set(), hidden, hidden | norms, names_of(model) - {"residual_out"}]


def names_of(model: Model) -> set[str]:
    """Of the activations of a block."""
    return {b.name.rpartition(".")[2] for b in model.plan.buffers if b.name.startswith("blocks.")}


@pytest.mark.parametrize("family", EVERY)
def test_a_forward_alone_gives_the_losses_of_training(family: str) -> None:
    check_forward_alone(shape_of(family))


@pytest.mark.parametrize("family", EVERY)
def test_bf16_gradients_are_as_good_as_bf16_autograd(family: str) -> None:
    """The error against float64 is at most twice that of PyTorch's own backward run wholly in bf16."""
    exact, ours = exact_and_bf16(shape_of(family))
    _, theirs = autograd(stored(ours, ours.flat), ours.act.tokens, ours.act.targets, ours.shape)
    found, right = stored(ours, ours.flat_gradients), stored(exact, exact.flat_gradients)
    our_error = math.hypot(*((found[name].double() - right[name]).norm() for name in right))
    their_error = math.hypot(*((theirs[name].double() - right[name]).norm() for name in right))
    assert our_error <= 2 * their_error, f"{our_error:.3g} > 2 * {their_error:.3g}"


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("family", EVERY)
def test_cached_logits_are_the_forwards(ops: object, family: str) -> None:
    """After a prefill and step by step, sequences of other lengths beside each other."""
    shape = shape_of(family, length=80)
    lengths, starts = [80, 9, 31], [66, 0, 20]
    model = make_model(shape, 1, 80, noise=0.4)
    texts = [torch.randint(57, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    buf = make_buffers(shape, 3, torch.float64, prefill_tokens=160)
    launch = partial(model.module.prefill, ops, model.weights, buf, shape)
    prefill(launch, buf, [text[:start] for text, start in zip(texts, starts, strict=True)], range(3))
    expected = [logits(stored(model, model.flat), torch.tensor([text]), shape)[0] for text in texts]
    for step in range(9):
        places = [min(start + step, length - 1) for start, length in zip(starts, lengths, strict=True)]
        buf.tokens.copy_(torch.tensor([text[place] for text, place in zip(texts, places, strict=True)]))
        buf.positions.copy_(torch.tensor(places))
        model.module.decode_step(ops.decode, model.weights, buf, shape)  # type: ignore[attr-defined]
        for row, place in enumerate(places):
            torch.testing.assert_close(buf.logits[row, :57], expected[row][place], rtol=1e-9, atol=1e-9)


# The sizes as published: https://huggingface.co/HuggingFaceTB/SmolLM2-135M, https://huggingface.co/Qwen/Qwen3-0.6B,
# https://huggingface.co/google/gemma-3-270m and https://huggingface.co/google/gemma-3-1b-pt;
# https://huggingface.co/allenai/OLMo-2-0425-1B and https://huggingface.co/allenai/Olmo-3-1025-7B.
SMOLLM2 = ModelShape(49152, 8192, 30, 9, 576, "llama", llama="kv_heads=3,feed_forward=1536,tied,rotary_base=100000.0")
QWEN3 = ModelShape(151936, 40960, 28, 16, 1024, "llama", llama="kv_heads=8,head_width=128,feed_forward=3072,tied,qk_norm")

GEMMA = ModelShape(262144, 32768, 18, 4, 640, "gemma3", gemma3="kv_heads=1,feed_forward=2048")
GEMMA_1B = ModelShape(262144, 32768, 26, 4, 1152, "gemma3", gemma3="kv_heads=1,feed_forward=6912")
OLMO2 = ModelShape(100352, 4096, 16, 16, 2048, "olmo", olmo="feed_forward=8192")
OLMO3 = ModelShape(100278, 65536, 32, 32, 4096, "olmo", olmo="feed_forward=11008,window=4096")
SIZES = [(SMOLLM2, 134_515_008), (QWEN3, 596_049_920), (GEMMA, 268_098_176), (GEMMA_1B, 999_885_952)]
SIZES += [(OLMO2, 1_484_916_736), (OLMO3, 7_298_011_136)]


@pytest.mark.parametrize(("shape", "parameters"), SIZES)
def test_parameters(shape: ModelShape, parameters: int) -> None:
    table = parameter_table(shape)
    assert count_parameters(table) == parameters
    vectors = sum(row.elements for row in table if len(row.shape) == 1)
    T, full = shape.sequence_length, shape.windows.count(0)
    seen = full * T + (shape.num_layers - full) * shape.window * (2 - shape.window / T)
    attention = shape.num_heads * shape.head_width * seen
    read = 0 if shape.network.tied(shape) else shape.vocab_size * shape.channels  # an embedding that is not the head
    assert shape.flops_per_token == 6 * (parameters - vectors - read + attention)


def test_flops_count_what_is_multiplied() -> None:
    """An embedding that is not the head is read, not multiplied."""
    tied, untied = (ModelShape(300, 16, 2, 4, 32, "llama", llama=text) for text in ("tied", ""))
    assert tied.flops_per_token == untied.flops_per_token
    assert count_parameters(parameter_table(untied)) == count_parameters(parameter_table(tied)) + 300 * 32
