"""Checkpoints with random weights, and the logits of them."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from handgrad.data.tokenizer import Tokenizer, tokenizer_files, tokenizer_record, train_bpe
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.evaluation.load import checkpoint_weights, imported_config, load_model
from handgrad.models import architecture, forward_buffers, named_activations, parameter_table
from handgrad.ops import reference
from handgrad.settings.config import ModelShape, to_dict
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored

transformers.logging.set_verbosity_error()
TRICKY = (
    "Hello world, it's 42!",
    "  two  blanks\n\n\tand a tab   \n   ",
    "naïve café – 你好, мир! 👩‍👩‍👧 e\u0301 \ufeff\u200b\u00a0\u3000x",
    "1234567 3.14159 ½ Ⅷ ٣٤٥ 0x1F",
    "don't WE'LL 'tis 's's ''ll I'M",
    "\r\n\x00\x7f\x85 end \n",
    "def f(x):\n        return x**2  # ok\n",
    "<|endoftext |> <|end",
    "",
)


def bpe() -> Tokenizer:
    return train_bpe([f"the old river number {i} sings over a bright stone. " * 3 for i in range(40)], 320)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: load_tokenizer("gpt2"),
    "bytes": lambda: load_tokenizer("bytes"),
    "bpe": bpe,
}
# Layers, heads, channels, context: a tiny one and two odd ones.
SIZES = {"bytes": (2, 2, 32, 96), "bpe": (3, 3, 33, 97), "gpt2": (1, 5, 35, 77)}


def make_checkpoint(
    out: Path,
    kind: str | Tokenizer,
    seed: int = 3,
    *,
    sizes: tuple[int, int, int, int] | None = None,
    spread: float = 0.2,
    architecture: str = "gpt2",
    techniques: str = "",
    llama: str = "",
    gemma3: str = "",
    olmo: str = "",
    chat: bool = False,
    **settings: object,
) -> tuple[Path, ModelShape]:
    """A run-like folder with random weights of this `spread`, large enough that no text is trivial; of a run with these
    settings, on conversations or on text."""
    tokenizer = TOKENIZERS[kind]() if isinstance(kind, str) else kind
    layers, heads, channels, context = sizes or SIZES[tokenizer.kind]
    own = {"techniques": techniques, "llama": llama, "gemma3": gemma3, "olmo": olmo}
    shape = ModelShape(tokenizer.vocab_size, context, layers, heads, channels, architecture, **own)
    generator = torch.Generator().manual_seed(seed)
    state = []
    for row in parameter_table(shape):
        center = 1.0 if row.init.kind == "constant" else 0.0
        state.append(Stored.of(row.name, center + spread * torch.randn(row.stored_shape, generator=generator)))
    manifest = {
        "config": to_dict(imported_config(shape)) | settings,
        "vocab_size": shape.vocab_size,
        "tokenizer": tokenizer_record(tokenizer),
        "chat": chat,
        "identity": {"data": "abc123", "tokenizer": tokenizer.sha256},
    }
    checkpoint.save(out / "checkpoints", 40, state, manifest, tokenizer_files(tokenizer))
    return out, shape


def our_logits(run: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """(tokens, V), by handgrad's own forward over them all."""
    found = checkpoint_weights(checkpoint.find(str(run)))
    buffers = forward_buffers(found.shape, 1, len(tokens), dtype, reference)
    model = load_model(found, torch.device("cpu"), dtype, reference, buffers)
    act = named_activations(model.shape, model.views)
    act.tokens.copy_(torch.tensor([tokens]))
    for stage in architecture(model.shape).forward(reference, model.weights, act, model.shape):
        stage.run()
    logits = (act.lnf @ model.weights.head.t())[:, : model.shape.vocab_size]
    if model.shape.softcap:
        reference.softcap_forward(logits, softcap=model.shape.softcap)
    return logits


def random_tokens(shape: ModelShape) -> list[int]:
    return torch.randint(shape.vocab_size, (shape.sequence_length,), generator=torch.Generator().manual_seed(1)).tolist()


def their_logits(model: "transformers.GPT2LMHeadModel", tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(checkpoint.find(str(run)).folder / checkpoint.WEIGHTS_FILE)
