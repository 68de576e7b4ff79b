"""The checks that a model of transformers and ours are the same, for the tests of each network."""

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from handgrad.api.model import load
from handgrad.evaluation.load import checkpoint_weights
from handgrad.interop import huggingface
from handgrad.settings.config import ModelShape
from handgrad.storage.checkpoint import find
from tests.conftest import make_model
from tests.interop.models import our_logits, random_tokens, their_logits

LOGITS = 1e-4  # the largest difference of two logits in float32


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def check_logits(model: transformers.PreTrainedModel, run: Path) -> list[int]:
    """Equal logits by the run's weights and by its loaded model, over a whole context of random tokens, returned."""
    ours = load(run, device="cpu")
    tokens = random_tokens(ours.shape)
    logits = their_logits(model, tokens)
    assert (our_logits(run, tokens) - logits).abs().max() <= LOGITS
    assert (ours.logits([tokens])[0] - logits).abs().max() <= LOGITS
    return tokens


def check_likeliest(model: transformers.PreTrainedModel, run: Path, tokens: list[int]) -> None:
    """Of their greedy text each token is the likeliest after those before, by our whole forward."""
    text = greedy_text(model, tokens)
    assert len(text) == 200 and len(set(text)) > 10
    rows = load(run, device="cpu").logits([tokens + text])[0]
    assert rows[len(tokens) - 1 : -1].argmax(-1).tolist() == text


def greedy_text(model: transformers.PreTrainedModel, start: list[int]) -> list[int]:
    """Their 200 tokens after `start`, with their cache."""
    options = {"do_sample": False, "max_new_tokens": 200, "eos_token_id": None, "pad_token_id": 0}
    inputs = torch.tensor([start])
    return model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)[0, len(start) :].tolist()


def check_gradients(model: transformers.PreTrainedModel, run: Path) -> None:
    """Equal to 1e-10, of the run's weights in a `model` that computes all in float64."""
    source = checkpoint_weights(find(str(run)))
    ours = make_model(source.shape, 2, 31)
    for row in ours.table:
        row.stored(ours.flat).copy_(source.weight(row))
    ours.forward()
    ours.backward(torch.tensor([1 / 62], dtype=torch.float64))
    logits = model(ours.act.tokens).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), ours.act.targets.flatten()).backward()
    gradients = {name: values.grad for name, values in model.named_parameters()}
    for row in ours.table:
        right = torch.cat([gradients[name] for name in huggingface.their_tensors(ours.shape, row)])
        error = (row.stored(ours.flat_gradients) - right).norm() / right.norm().clamp_min(1e-9)
        assert error <= 1e-10, f"{row.name}: relative error {error:.3g}"


def norms_in_float64(model: transformers.PreTrainedModel, plus: int = 0) -> None:
    """Their RMS norms compute in float64, which otherwise do in float32; `plus`: a gain is stored as its distance."""

    def rms_norm(self: nn.Module, x: Tensor) -> Tensor:
        epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight + plus, epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = rms_norm.__get__(module)


def angles_in_float64(position_ids: Tensor, frequencies: tuple[float, ...], scale: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) as their rotary embedding returns them."""
    angles = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    return scale * angles.cos(), scale * angles.sin()


def check_same_model(
    before: transformers.PreTrainedModel, after: transformers.PreTrainedModel, shape: ModelShape, *keys: str
) -> None:
    """Type, these keys of the configuration, weights bit by bit, and what they compute."""
    assert type(after.config) is type(before.config)
    for key in keys:
        assert getattr(after.config, key) == getattr(before.config, key), key
    stored, expected = after.state_dict(), before.state_dict()
    assert stored.keys() == expected.keys() and all(torch.equal(stored[name], expected[name]) for name in expected)
    tokens = random_tokens(shape)
    assert torch.equal(their_logits(before, tokens), their_logits(after, tokens))


def check_same_files(before: Path, after: Path) -> None:
    """The tokenizer's files as they came."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (after / name).read_bytes() == (before / name).read_bytes(), name
