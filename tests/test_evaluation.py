"""Held-out loss counts every sample once; generation draws as it says, also past the end of the context."""

from pathlib import Path

import pytest
import torch

from handgrad.config import ModelShape
from handgrad.data.batches import Batches, host_buffers
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer import load_tokenizer
from handgrad.evaluation.generate import choose, decode_buffers, decode_tensors, generate, stream_text
from handgrad.evaluation.loss import mean_loss
from handgrad.model import transformer
from handgrad.ops import reference as ops
from tests.conftest import make_model, make_plan


def test_the_loss_does_not_depend_on_the_micro_batch(shards: Path) -> None:
    """Six samples in micro-batches of 4, 1 and 6: the padding of the last one does not count."""
    batches = Batches(open_dataset(shards).splits["validation"], 16, 0, shuffle=False)
    found = []
    for batch in (4, 1, 6):
        model = make_model(ModelShape(257, 16, 2, 2, 32), batch, 16)
        act, buffers = model.act, host_buffers(model.act.tokens, model.act.targets)
        found.append(mean_loss(ops, model.weights, act, batches, samples=6, vocab_size=257, host_buffers=buffers))
    assert max(found) - min(found) < 1e-12


def test_greedy_text_equals_fresh_forwards_also_past_the_context() -> None:
    """Every token is the likeliest after a whole forward over the context as it then is."""
    shape = ModelShape(23, 8, 2, 2, 16)
    model = make_model(shape, 1, 8, noise=0.3)
    buf = decode_tensors(make_plan(decode_buffers(shape, torch.float64, ops)).allocate(torch.device("cpu")))
    settings = {"vocab_size": 23, "max_tokens": 20, "temperature": 0.0, "top_k": 0, "seed": 0}
    found = list(generate(ops, model.weights, buf, [5, 1], **settings))
    context = [5, 1]
    for token in found:
        if len(context) > 8:
            context = context[-4:]
        model.act.tokens.zero_()
        model.act.tokens[0, : len(context)] = torch.tensor(context)
        transformer.forward_blocks(ops, model.weights, model.act)
        logits = model.act.lnf[len(context) - 1] @ model.weights.wte[:23].t()
        assert token == int(logits.argmax())
        context.append(token)
    assert len(set(found)) > 1


def test_top_k_and_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    generator = torch.Generator().manual_seed(0)

    def frequencies(temperature: float, top_k: int, draws: int = 4000) -> torch.Tensor:
        picks = [choose(logits, temperature=temperature, top_k=top_k, generator=generator) for _ in range(draws)]
        return torch.bincount(torch.tensor(picks), minlength=5) / draws

    assert choose(logits, temperature=1.0, top_k=1, generator=generator) == 1
    assert choose(logits, temperature=1e-320, top_k=0, generator=generator) == 1
    assert frequencies(2.0, 3)[[0, 3]].sum() == 0, "only the three likeliest"
    for temperature in (0.5, 2.0):
        expected = torch.softmax(logits / temperature, 0)
        # Five standard deviations of a frequency over 4000 draws.
        bound = 5 * (expected * (1 - expected) / 4000).sqrt()
        assert ((frequencies(temperature, 0) - expected).abs() <= bound + 1e-9).all()


@pytest.mark.parametrize("text", ["naïve 東京 🦉", ""])
def test_a_character_cut_over_tokens_comes_out_whole(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = [*tokenizer.encode(text).tolist(), tokenizer.end_of_text, 65]
    assert "".join(stream_text(tokenizer, iter(ids))) == text
