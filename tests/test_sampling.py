"""Generation: cached logits are the uncached ones, alone and in a batch, past the context, one slot after the other."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from handgrad.errors import NumericsError, UsageError
from handgrad.generation.decode import decode_buffers, decode_tensors, prefill
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions, check_writing
from handgrad.memory.arena import make_plan
from handgrad.models import gpt2
from handgrad.ops import reference as ops
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_buffers(
    shape: ModelShape, batch: int, dtype: torch.dtype = torch.float64, prefill_tokens: int = 0
) -> gpt2.Decoding:
    """Buffers full of NaN: what is read was written."""
    views = make_plan(decode_buffers(shape, batch, dtype, ops, prefill_tokens=prefill_tokens)).allocate(torch.device("cpu"))
    for view in views.values():
        view.fill_(float("nan") if view.is_floating_point() else 1)
    return decode_tensors(shape, views)


def make_decoder(model: Model, batch: int, options: SamplingOptions = GREEDY, end_of_text: int | None = None) -> Decoder:
    buf = make_buffers(model.shape, batch, model.flat.dtype, prefill_tokens=2 * model.shape.sequence_length)
    return Decoder(model.shape, ops, model.weights, buf, options, end_of_text=end_of_text)


def uncached(model: Model, context: list[int]) -> Tensor:
    """The logits (T, V) of a fresh forward over the context; the model has one sample of maxT tokens."""
    model.act.tokens.zero_()
    model.act.tokens[0, : len(context)] = torch.tensor(context)
    model.forward()
    return model.act.lnf[: len(context)] @ model.weights.wte[: model.shape.vocab_size].t()


def written(decoder: Decoder, texts: list[Continuation]) -> list[list[int]]:
    for _ in decoder.generate(texts):
        pass
    return [text.tokens for text in texts]


def behind(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The decoder as on a GPU: tokens arrive when the next step is on its way already."""

    class Event:
        def record(self) -> None: ...
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    decoder.host_tokens = [torch.empty_like(decoder.buf.chosen) for _ in range(2)]
    return decoder


def counted_steps(decoder: Decoder) -> list[int]:
    """A list that grows by one element with every step."""
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps))
        decoder.launch_step()

    decoder.step = step
    return steps


def in_precision(model: Model, dtype: torch.dtype) -> Model:
    """The same weights, rounded to `dtype` already, in another precision."""
    other = make_model(model.shape, 1, model.shape.sequence_length, dtype)
    other.flat.copy_(model.flat)
    return other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cached_logits_are_the_uncached_ones(dtype: torch.dtype) -> None:
    """Four ragged sequences: a part of each taken in at once, padded, and the rest one by one. Beside float64, the error is
    at most twice that of the uncached forward in the same precision."""
    shape, lengths, starts = ModelShape(57, 80, 2, 2, 16), [80, 9, 79, 31], [70, 0, 66, 20]
    model = make_model(shape, 1, 80, dtype)
    exact = model if dtype == torch.float64 else in_precision(model, torch.float64)
    texts = [torch.randint(57, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    buf = make_buffers(shape, 4, dtype, prefill_tokens=160)
    launch = partial(gpt2.prefill, ops, model.weights, buf, shape)
    prefill(launch, buf, [text[:start] for text, start in zip(texts, starts, strict=True)], range(4))
    found: list[list[Tensor]] = [[] for _ in texts]
    for step in range(13):
        places = [min(start + step, length - 1) for start, length in zip(starts, lengths, strict=True)]
        buf.tokens.copy_(torch.tensor([text[place] for text, place in zip(texts, places, strict=True)]))
        buf.positions.copy_(torch.tensor(places))
        gpt2.decode_step(ops.decode, model.weights, buf, shape)
        for row, logits in enumerate(buf.logits):
            if starts[row] + step < lengths[row]:
                found[row].append(logits[:57].double().clone())
    for text, start, rows in zip(texts, starts, found, strict=True):
        expected = uncached(exact, text)[start : start + len(rows)]
        error = float((torch.stack(rows) - expected).abs().max())
        their_error = float((uncached(model, text)[start : start + len(rows)].double() - expected).abs().max())
        assert error <= (1e-12 if dtype == torch.float64 else 2 * their_error), (error, their_error)


@pytest.mark.parametrize("prompt", [[5, 1], [(7 * i) % 23 for i in range(190)]])
def test_greedy_text_equals_that_of_fresh_forwards(prompt: list[int]) -> None:
    shape = ModelShape(23, 400, 2, 2, 16)
    model = make_model(shape, 1, 400, noise=0.8)
    [found] = written(make_decoder(model, 1), [Continuation(prompt, 200, 0)])
    expected = uncached(model, prompt + found)[len(prompt) - 1 : -1].argmax(1).tolist()
    assert found == expected and len(found) == 200 and len(set(found)) > 1


def test_equal_prompts_are_prefilled_once() -> None:
    """Each text equals the one that its prompt gives without the others. The first step reads a prompt's last token, so two
    prompts that differ in it alone share a prefill."""
    model, drawn = make_model(ModelShape(23, 48, 2, 2, 16), 1, 48, noise=0.8), SamplingOptions(1.0)
    prompts = [[5, 1, 7, 3], [5, 1, 7, 2, 9], [5, 1, 7, 3], [5, 1, 7, 4], [5, 1, 7, 2, 9], [8]]
    decoder, sequences = make_decoder(model, 6, drawn), list[int]()

    def counted(batch: int, length: int, *, append: bool) -> None:
        sequences.append(batch)
        Decoder.prefill(decoder, batch, length, append=append)

    decoder.prefill = counted
    found = written(decoder, [Continuation(prompt, 12, seed) for seed, prompt in enumerate(prompts)])
    alone = [written(make_decoder(model, 1, drawn), [Continuation(p, 12, seed)])[0] for seed, p in enumerate(prompts)]
    assert found == alone and sum(sequences) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])  # at 30 the draws decide
@pytest.mark.parametrize("prompt", [[5, 1], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]])
def test_past_the_context_the_older_half_is_forgotten(prompt: list[int], temperature: float) -> None:
    """Beside another text, which ends where its context is full. Draws go by the place in the text, not in the context."""
    model = make_model(ModelShape(23, 8, 2, 2, 16), 1, 8, noise=0.8)
    texts = [Continuation(prompt, 20, 77), Continuation([1, 2, 3], 6, 0)]
    found, _ = written(make_decoder(model, 2, SamplingOptions(temperature)), texts)
    context, expected = prompt[-8:], torch.zeros(1, dtype=torch.int64)
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for count, token in enumerate(found):
        if len(context) > 8:
            context = context[-4:]
        seed, place = torch.tensor([77]), torch.tensor([len(prompt) + count])
        logits = uncached(model, context)[-1:]
        ops.decode.choose_tokens(expected, logits, None, seed, place, vocab_size=23, temperature=temperature, **settings)
        assert token == int(expected)
        context.append(token)
    assert len(found) == 20 and len(set(found)) > 1


def test_a_context_of_one_token() -> None:
    model = make_model(ModelShape(23, 1, 1, 2, 16), 1, 1, noise=0.8)
    [found] = written(make_decoder(model, 1), [Continuation([5, 1], 4, 0)])
    context = [1]
    for token in found:
        assert token == int(uncached(model, context)[-1].argmax())
        context = [token]


END = 7
OPTIONS = [GREEDY, SamplingOptions(1.0), SamplingOptions(0.9, 15, 0.9, 0.01, 1.2)]


def made_up_texts() -> list[Continuation]:
    """Of many lengths, some longer than the context of 48."""
    prompts = [[(5 * i + n) % 23 for i in range(n)] for n in (1, 40, 3, 60, 11, 2, 47, 30)]
    return [Continuation(prompt, 5 + 9 * (n % 4), seed=n) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def chatty() -> Model:
    """In float32, with texts that end at token 7 (`END`) and texts that do not."""
    return make_model(ModelShape(23, 48, 2, 2, 16), 1, 48, torch.float32, noise=0.8)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_text_is_the_same_alone_and_in_any_batch(options: SamplingOptions, chatty: Model) -> None:
    """Eight texts in 1, 3 and 8 slots: a slot that a text has left goes to the next."""
    found = [written(make_decoder(chatty, batch, options, end_of_text=END), made_up_texts()) for batch in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    alone = made_up_texts()[3]
    assert written(make_decoder(chatty, 1, options, end_of_text=END), [alone]) == [found[0][3]]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_host_that_is_one_step_behind_reads_the_same(
    options: SamplingOptions, chatty: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(make_decoder(chatty, 3, options, end_of_text=END), made_up_texts())
    decoder, texts = behind(make_decoder(chatty, 3, options, end_of_text=END), monkeypatch), made_up_texts()
    steps, at_first = counted_steps(decoder), 0
    for _ in decoder.generate(texts):
        at_first = at_first or len(steps)
    assert at_first == 2
    assert [text.tokens for text in texts] == expected
    assert {text.stopped for text in texts} == {"end_of_text", "max_tokens"}


@pytest.mark.parametrize("late", [False, True])
def test_slots_never_idle_while_texts_wait(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine texts of 4 and 8 tokens in two slots: 24 steps instead of the 32 of one pair after the other."""
    decoder = make_decoder(make_model(ModelShape(23, 48, 1, 2, 16), 1, 48), 2)
    steps = counted_steps(behind(decoder, monkeypatch) if late else decoder)
    texts = [Continuation([n], 8 if n in (0, 3, 5) else 4, 0) for n in range(9)]
    written(decoder, texts)
    assert len(steps) == 24 and sum(len(text.tokens) for text in texts) == 48


def test_why_a_text_ended() -> None:
    model = make_model(ModelShape(23, 48, 2, 2, 16), 1, 48, noise=0.8)
    whole = Continuation([5, 1], 30, 3)
    warm = SamplingOptions(1.0)
    written(make_decoder(model, 1, warm), [whole])
    assert whole.stopped == "max_tokens" and len(whole.tokens) == 30
    last = whole.tokens[11]
    cut = Continuation([5, 1], 30, 3)
    written(make_decoder(model, 1, warm, end_of_text=last), [cut])
    assert cut.stopped == "end_of_text" and cut.tokens == whole.tokens[: whole.tokens.index(last)]
    ended = Continuation([5, 1], 30, 3)
    for text in make_decoder(model, 2, warm).generate([ended]):
        if len(text.tokens) == 4:
            text.stopped = "stop"
    assert ended.stopped == "stop" and ended.tokens == whole.tokens[:4]


def test_a_decoder_forgets_a_reader_that_went_away() -> None:
    model = make_model(ModelShape(23, 48, 2, 2, 16), 1, 48, noise=0.8)
    decoder = make_decoder(model, 2)
    left = Continuation([4], 30, 0)
    next(iter(decoder.generate([left, Continuation([6, 6], 30, 0)])))
    expected = written(make_decoder(model, 1), [Continuation([5, 1], 9, 0)])
    assert written(decoder, [Continuation([5, 1], 9, 0)]) == expected and len(left.tokens) == 1


@pytest.mark.parametrize("longest", [48, 8])
def test_penalised_tokens_are_those_of_prompt_and_text(longest: int) -> None:
    """Greedily, beside a plain penalty on fresh logits, also for tokens that left the context; the end-of-text that began
    the document is not penalised."""
    model = make_model(ModelShape(23, longest, 2, 2, 16), 1, longest, noise=0.8)
    options = SamplingOptions(temperature=0, repetition_penalty=1000)
    [plain] = written(make_decoder(model, 1, end_of_text=0), [Continuation([0, 5, 1], 15, 0)])
    [found] = written(make_decoder(model, 1, options, end_of_text=0), [Continuation([0, 5, 1], 15, 0)])
    assert len(set(plain)) < len(plain), "without it tokens repeat"
    context, seen = [0, 5, 1], {5, 1}
    for token in found:
        if len(context) > longest:
            context = context[-longest // 2 :]
        logits = uncached(model, context)[-1]
        for other in seen:
            logits[other] = logits[other] / 1000 if logits[other] > 0 else logits[other] * 1000
        assert token == int(logits.argmax())
        context.append(token)
        seen.add(token)
    assert len(found) > 8


@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_diverged_is_told(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(ModelShape(23, 48, 2, 2, 16), 1, 48)
    model.weights.wte[7] = float("inf")
    decoder = make_decoder(model, 1)
    with pytest.raises(NumericsError, match="logits are not finite"):
        written(behind(decoder, monkeypatch) if late else decoder, [Continuation([5, 1], 30, 3)])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, 1e-9, float("inf"), float("nan"))),
        ("top_k", (-1,)),
        ("top_p", (0.0, 1.1, -0.5, float("nan"))),
        ("min_p", (-0.1, 1.1, float("nan"))),
        ("repetition_penalty", (0.0, -1.0, 1e9, float("nan"))),
    ],
)
def test_options_that_cannot_be(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"{name} must be .*, found"):
            dataclasses.replace(SamplingOptions(), **{name: value})


def test_options_of_any_type_of_number_are_the_same() -> None:
    """A kernel divides by a float alone."""
    options = SamplingOptions(temperature=2, top_k=np.int64(5), top_p=1, min_p=np.float32(0), repetition_penalty=2)
    assert options == SamplingOptions(2.0, 5, 1.0, 0.0, 2.0)
    assert [type(value) for value in vars(options).values()] == [float, int, float, float, float]


def test_the_largest_seed() -> None:
    check_writing(1, (1 << 32) - 1, ["."])
    for seed in (-1, 1 << 32):
        with pytest.raises(UsageError, match=f"seed must be at least 0 and below 2\\^32, found {seed}"):
            check_writing(1, seed, [])
