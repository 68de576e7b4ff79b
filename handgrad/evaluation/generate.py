"""Text from a model, one token at a time: each token's keys and values are computed once and kept."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.config import ModelShape
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import NumericsError
from handgrad.model.parameters import ModelTensors

KIND = "generation"


@dataclass
class DecodeTensors:
    """The buffers of one decoding step for one sequence, and the caches of all its steps."""

    token: Tensor  # (1, 1) int64
    x: Tensor  # (1, C) the residual stream
    ln: Tensor  # (1, C)
    mean: Tensor  # (1)
    rstd: Tensor  # (1)
    qkv: Tensor  # (1, 3C)
    atty: Tensor  # (1, C)
    branch: Tensor  # (1, C)
    fc: Tensor  # (1, F)
    gelu: Tensor  # (1, F)
    logits: Tensor  # (1, Vp)
    keys: Tensor  # (L, 1, H, maxT, D)
    values: Tensor  # (L, 1, H, maxT, D)
    scratch: Tensor  # (bytes) uint8: what an operation needs for itself


def decode_buffers(shape: ModelShape, dtype: torch.dtype, ops: ModuleType) -> list[Buffer]:
    """The rows of `DecodeTensors` for the arena."""
    C, F, L = shape.channels, shape.feed_forward, shape.num_layers
    scratch_bytes = ops.scratch_bytes(batch=1, length=1, channels=C)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    cache = (L, 1, shape.num_heads, shape.sequence_length, C // shape.num_heads)
    rows: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "token": ((1, 1), torch.int64),
        "x": ((1, C), dtype),
        "ln": ((1, C), dtype),
        "mean": ((1,), stats),
        "rstd": ((1,), stats),
        "qkv": ((1, 3 * C), dtype),
        "atty": ((1, C), dtype),
        "branch": ((1, C), dtype),
        "fc": ((1, F), dtype),
        "gelu": ((1, F), dtype),
        "logits": ((1, shape.padded_vocab_size), dtype),
        "keys": (cache, dtype),
        "values": (cache, dtype),
        "scratch": ((scratch_bytes,), torch.uint8),
    }
    assert list(rows) == [f.name for f in fields(DecodeTensors)]
    return [Buffer(f"{KIND}.{name}", dims, kind, KIND) for name, (dims, kind) in rows.items()]


def decode_tensors(views: dict[str, Tensor]) -> DecodeTensors:
    return DecodeTensors(**{f.name: views[f"{KIND}.{f.name}"] for f in fields(DecodeTensors)})


def decode_step(ops: ModuleType, w: ModelTensors, buf: DecodeTensors, token: int, position: int) -> None:
    """Takes in `token` at `position` (0-based; all earlier ones taken in before) -> buf.logits (1, Vp) for the next."""
    buf.token.fill_(token)
    ops.embedding_forward(buf.x, buf.token, w.wte, w.wpe[position:])
    for layer, block in enumerate(w.blocks):
        ops.layernorm_forward(buf.ln, buf.mean, buf.rstd, buf.x, block.ln1_weight, block.ln1_bias)
        ops.linear_forward(buf.qkv, buf.ln, block.qkv_weight, block.qkv_bias, scratch=buf.scratch)
        ops.attention_decode(buf.atty, buf.keys[layer], buf.values[layer], buf.qkv, position=position)
        ops.linear_forward(buf.branch, buf.atty, block.proj_weight, block.proj_bias, scratch=buf.scratch)
        ops.residual_forward(buf.x, buf.x, buf.branch)
        ops.layernorm_forward(buf.ln, buf.mean, buf.rstd, buf.x, block.ln2_weight, block.ln2_bias)
        ops.linear_gelu_forward(buf.gelu, buf.fc, buf.ln, block.fc_weight, block.fc_bias, scratch=buf.scratch)
        ops.linear_forward(buf.branch, buf.gelu, block.fcproj_weight, block.fcproj_bias, scratch=buf.scratch)
        ops.residual_forward(buf.x, buf.x, buf.branch)
    ops.layernorm_forward(buf.ln, buf.mean, buf.rstd, buf.x, w.lnf_weight, w.lnf_bias)
    ops.linear_forward(buf.logits, buf.ln, w.wte, None, scratch=buf.scratch)


def choose(logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from logits (V): the likeliest at temperature 0, else drawn from softmax(logits / temperature),
    among the `top_k` likeliest if that is not 0. Drawn on the CPU in float64, so a seed means the same everywhere."""
    logits = logits.to("cpu", torch.float64)
    if not torch.isfinite(logits).all():
        raise NumericsError(
            "the model's logits are not finite: its weights have diverged; use an earlier checkpoint, or train again with a"
            " lower --learning-rate"
        )
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits - logits.max()) / temperature  # at most 0: no temperature is too low
    if top_k and top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


def generate(
    ops: ModuleType,
    weights: ModelTensors,
    buf: DecodeTensors,
    prompt: Sequence[int],
    *,
    vocab_size: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Up to `max_tokens` token ids after `prompt` (at least one id).

    When the context is full, the older half is forgotten and the rest is taken in again at the positions it then has.
    """
    assert prompt, "a prompt has at least one token: end-of-text starts a document"
    longest = buf.keys.shape[3]
    generator = torch.Generator().manual_seed(seed)
    context = list(prompt)[-longest:]
    taken = 0  # tokens of the context whose keys and values are in the cache
    for _ in range(max_tokens):
        if len(context) > longest:
            context, taken = context[-max(1, longest // 2) :], 0
        for position in range(taken, len(context)):
            decode_step(ops, weights, buf, context[position], position)
        taken = len(context)
        token = choose(buf.logits[0, :vocab_size], temperature=temperature, top_k=top_k, generator=generator)
        yield token
        context.append(token)


def stream_text(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """The text of `ids` as it comes, up to end-of-text; a character cut over several tokens comes out whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        if token == tokenizer.end_of_text:
            break
        yield decoder.decode(tokenizer.decode_bytes([token]))
    yield decoder.decode(b"", final=True)
