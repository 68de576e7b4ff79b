"""The cache of a conversation: an answer takes in its new tokens alone, and says what a fresh cache would have it say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.api.model import Model, load
from handgrad.generation.decode import padded_length
from handgrad.generation.generate import Continuation, Decoder
from handgrad.machine import devices
from handgrad.memory.arena import make_plan
from handgrad.settings.config import ModelShape
from tests.interop.models import make_checkpoint
from tests.test_sampling import make_decoder, make_model

LLAMA = {"architecture": "llama", "sizes": (2, 4, 32, 2048), "llama": "kv_heads=2,feed_forward=64,qk_norm"}
MODERN = {"architecture": "modern", "sizes": (2, 2, 32, 512), "techniques": "rotary,qk_norm,untied_head,value_embeddings"}
NETWORKS = {"gpt2": {"sizes": (2, 2, 32, 512)}, "llama": LLAMA, "modern": MODERN}


def answered(model: Model, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were taken in at once."""
    sizes: list[tuple[int, int]] = []
    enter = Decoder.enter

    def counted(self: Decoder, texts: dict[int, Continuation], most: int) -> None:
        prompt = texts[0].prompt
        sizes.append((len(prompt), len(prompt) - 1 - self.cached_prefix(0, prompt[:-1])))
        enter(self, texts, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "enter", counted)
        answer = "".join(model.chat(messages, temperature=0, max_tokens=20))
    return answer, *sizes[0]


@pytest.fixture(params=list(NETWORKS))
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Model]:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", spread=0.5, **NETWORKS[request.param])
    return lambda: load(run, device="cpu", backend="reference")


def test_a_later_answer_is_that_of_a_fresh_cache(fresh: Callable[[], Model]) -> None:
    """Three turns: each takes in less than its prompt by at least the prompt before, and says the same."""
    model, before = fresh(), 0
    messages = [{"role": "system", "content": "Be kind to all who ask."}]
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer, length, taken = answered(model, messages)
        assert taken <= length - before and taken > 5
        assert answered(fresh(), messages) == (answer, length, length - 1) and len(answer) > 5
        messages.append({"role": "assistant", "content": answer})
        before = length


def test_only_conversations_keep_their_tokens(fresh: Callable[[], Model]) -> None:
    """A text otherwise depends on no text before it, down to its last bit."""
    model = fresh()
    model.generate("Hello there", max_tokens=4, batch=1)
    decoder = model._writing.last
    assert decoder.cached[0] is not None and decoder.cached_prefix(0, decoder.cached[0].cached_tokens()) == 0


def test_tokens_that_a_slot_holds() -> None:
    """Those of prompt and text as far as the reader got; none where steps ran while the slot was free."""
    model = make_model(ModelShape(23, 64, 2, 2, 16), 1, 64, noise=0.8)
    decoder = make_decoder(model, 2)
    short, long = Continuation([5, 1, 2], 3, 0), Continuation([7, 8], 9, 0)
    for _ in decoder.generate([short, long], reuse_cache=True):
        pass
    assert decoder.cached[0] is None
    held = decoder.cached[1].cached_tokens()
    assert held == [7, 8, *long.tokens[:-1]] and len(held) == 10, "nothing took in the last token"
    assert (
        decoder.cached_prefix(1, [*held[:6], 22, 3]) == 6
        and decoder.cached_prefix(1, held[:4]) == 4
        and decoder.cached_prefix(0, held) == 0
    )
    again = Continuation([*held[:8], 3], 5, 0)
    for _ in decoder.generate([again], reuse_cache=True):
        pass
    other = Continuation(list(again.prompt), 5, 0)
    for _ in make_decoder(model, 2).generate([other]):
        pass
    assert again.tokens == other.tokens


def test_lengths_of_prompts() -> None:
    """Few, at most a quarter longer than a prompt from 256 tokens on, and never longer than the cache."""
    assert [padded_length(n, 1000) for n in (1, 32, 33, 257, 513, 700, 999)] == [32, 32, 64, 320, 640, 768, 1000]
    lengths = {padded_length(n, 1 << 17) for n in range(1, (1 << 17) + 1, 31)}
    assert len(lengths) <= 16 + 4 * 7 and all(padded_length(n, 1 << 17) <= max(n * 1.25, n + 32) for n in range(1, 5000))


def test_a_context_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation has the part of it that fits, by halves; what a smaller cache occupies counts as free."""
    shape = {"architecture": "llama", "sizes": (1, 2, 32, 5000), "llama": "feed_forward=64"}
    run, _ = make_checkpoint(tmp_path / "run", "bytes", **shape)
    model = load(run, device="cpu", backend="reference")
    whole, half = (make_plan(model._writing.table(1, tokens)).total_bytes for tokens in (5000, 2500))
    free = [whole]
    monkeypatch.setattr(devices, "available_bytes", lambda device: free[0])
    assert model._writing.fitting(5000) == 5000
    free[0] = whole - 1
    assert model._writing.fitting(5000) == 2500
    free[0] = half - 1
    assert model._writing.fitting(5000) == 1250 and model._writing.fitting(1000) == 1000
    long = [{"role": "user", "content": "x" * 3000}]
    with pytest.warns(UserWarning, match="the last 1246 are read: the context has 1250"):
        list(model.chat(long, max_tokens=4))
    free[0] = half - model._writing.memory.storage.numel()
    assert model._writing.fitting(5000) == 2500
