"""A small model's gradients on any device and backend, and sources of made-up tokens."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins import documents
from handgrad.joins.dropout.bind import WithDropout, scratch_sizes
from handgrad.memory.arena import make_plan
from handgrad.memory.rows import named
from handgrad.models import architecture, document_buffers, named_weights
from handgrad.models.passes import run
from handgrad.settings.config import ModelShape
from handgrad.training.feed import BatchFeed
from tests.conftest import make_model
from tests.techniques import toggled
from tests.test_trained_tokens import Answers

SHAPE = ModelShape(301, 48, 3, 4, 64)
MODERN = ModelShape(301, 48, 3, 2, 64, "modern", toggled(""))
MODERN_NEW = replace(MODERN, techniques=toggled("residual_scalars,input_scalars,value_embeddings"))
# Grouped heads, wider than channels / heads, with all that a member of the family may have.
ALL = "kv_heads=2,head_width=24,feed_forward=160,tied,qkv_bias,qk_norm,rope=llama3,rope_length=16"
LLAMA = ModelShape(301, 48, 3, 4, 64, "llama", llama=ALL)
LLAMA_UNTIED = replace(LLAMA, llama="kv_heads=1")
WINDOWED = "kv_heads=2,head_width=24,feed_forward=160,window=9,full_every=2,score_width=16"
GEMMA = ModelShape(301, 48, 3, 4, 64, "gemma3", gemma3=WINDOWED)
OLMO = ModelShape(
    301, 48, 3, 4, 64, "olmo", olmo="kv_heads=2,feed_forward=160,window=9,full_every=2,rope=yarn,rope_factor=2.0"
)
BATCH, LENGTH = 5, 48
SEED = 1337  # of dropout


def statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradients(
    ops: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    recompute: int = 0,
    dropout: float = 0.0,
    shape: ModelShape = SHAPE,
    packed: bool = False,
) -> dict[str, Tensor]:
    """Losses, and gradients by name, of the same model and batch; the weights are numbers that every dtype holds. `packed`:
    of rows of documents, of which a third of the targets is trained."""
    source, layers, model = make_model(shape, BATCH, LENGTH, torch.float64), shape.num_layers, architecture(shape)
    flat = source.flat.to(torch.bfloat16).to(torch.float16).to(device, dtype)
    flat_gradients = torch.zeros(flat.shape, dtype=statistics(dtype), device=device)
    sizes: Any = scratch_sizes(ops) if dropout else documents.scratch_sizes(ops) if packed else ops
    rows = model.activations(shape, BATCH, LENGTH, dtype, sizes, chunk=100, training=True)
    inputs = document_buffers(model, BATCH, LENGTH) if packed else []
    views = make_plan([*(row.buffer(recompute) for row in rows if not row.of), *inputs]).allocate(device)
    act, d = named(model.Activations, views, layers), named(model.Gradients, views, layers)
    act.tokens.copy_(source.act.tokens)
    act.targets.copy_(source.act.targets)
    if not shape.network.pictures:
        act.sorted_positions.copy_(torch.argsort(source.act.tokens.view(-1), stable=True))
    if packed:
        BatchFeed(Answers(LENGTH), act).fill(0)
    w, g = (named_weights(shape, part, source.table) for part in (flat, flat_gradients))
    backend: Any = documents.operations(ops, act, masked=packed)
    if dropout:
        samples = torch.arange(BATCH, device=device) + 11
        backend = WithDropout(backend, w, g, act, d, samples=samples, probability=dropout, seed=SEED)
    factor = torch.tensor([scale], dtype=statistics(dtype), device=device)
    run(model.forward(backend, w, act, shape))
    run(model.backward(backend, w, g, act, d, factor, shape, recompute=recompute))
    return {"losses": act.losses} | {row.name: row.view(flat_gradients) for row in source.table}


class ZipfTokens:
    """Samples of ids whose frequency falls as 1 / rank, a pure function of their number."""

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None:
        for row in range(len(inputs)):
            generator = torch.Generator().manual_seed(first_sample + row)
            ranks = torch.exp(torch.rand(inputs.shape[1] + 1, generator=generator) * math.log(50257)).long() - 1
            inputs[row], targets[row] = ranks[:-1], ranks[1:]


class ZipfBytes(ZipfTokens):
    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None:
        super().fill(inputs, targets, first_sample)
        inputs.remainder_(257)
        targets.remainder_(257)
