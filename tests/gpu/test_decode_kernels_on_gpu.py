"""The kernels of generation compiled for this machine's GPU, and a whole step of them as a CUDA graph."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.data.codes import GREYS, Codes
from handgrad.generation.decode import decode_buffers, decode_tensors, prefill
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.generation.pictures import PictureDecoder
from handgrad.machine.backend import choose_backend
from handgrad.machine.graphs import Replayed
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import flat_elements, initialize
from handgrad.models import architecture, named_weights, parameter_table
from handgrad.ops.cuda import attention_decode
from handgrad.settings.config import ARCHITECTURES, ModelShape
from tests.kernels import decode_checks as checks
from tests.kernels.decode_checks import check
from tests.kernels.memory_checks import Draw
from tests.techniques import toggled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@pytest.mark.parametrize(
    ("C", "O"), [(24, 7), (100, 33), (768, 2304), (768, 50304), (1600, 4800), (1600, 1600), (6400, 1600), (3072, 768)]
)
def test_row_gemms(draw: Draw, C: int, O: int) -> None:
    check(checks.row_gemms(draw, C, O), terms=4)
    check(checks.swiglu_product(draw, C, O), terms=8)


@pytest.mark.parametrize("position", [0, 63, 64, 257, 1023])
@pytest.mark.parametrize(
    ("H", "K", "maxT", "D"), [(12, 12, 1024, 64), (25, 25, 1024, 64), (8, 2, 8192, 128), (9, 3, 2048, 64)]
)
def test_heads_in_parts(draw: Draw, H: int, K: int, maxT: int, D: int, position: int) -> None:
    check(checks.split_attention(draw, H, K, maxT, D, position))


@pytest.mark.parametrize(
    ("T", "starts", "H", "K", "maxT", "D"),
    [
        (5, [3, 0, 11], 4, 2, 16, 24),
        (64, [700], 25, 25, 1024, 64),
        (130, [64, 0], 9, 3, 2048, 64),
        (64, [1000], 8, 2, 1030, 128),
    ],
)
def test_attention_of_new_tokens(draw: Draw, T: int, starts: list[int], H: int, K: int, maxT: int, D: int) -> None:
    check(checks.attention_append(draw, T, starts, H, K, maxT, D))


@pytest.mark.parametrize("window", [1, 63, 64, 512, 3000])
def test_attention_within_a_window(draw: Draw, window: int) -> None:
    """Of a step, in parts of a head's keys and whole, and of new tokens; nothing before the window is read by a step."""
    for H, K, D in ((12, 12, 64), (8, 2, 128), (4, 1, 256)):
        check(checks.split_attention(draw, H, K, 2048, D, 1500, window=window))
        check(checks.attention_append(draw, 130, [64, 900], H, K, 1100, D, window))
    check(checks.attention(draw, 3, 4, 1024, 256, [1023, 500, 0], window))


@pytest.mark.parametrize("B", [1, 3, 65])
def test_advance(draw: Draw, B: int) -> None:
    checks.advance(draw, B)


@pytest.mark.parametrize(
    ("B", "H", "maxT", "D", "positions"),
    [
        (1, 2, 8, 16, [0]),
        (3, 1, 200, 24, [0, 64, 199]),
        (2, 12, 1024, 64, [1023, 500]),
        (1, 25, 1024, 64, [700]),
        (2, 3, 300, 128, [128, 299]),
    ],
)
def test_attention(draw: Draw, B: int, H: int, maxT: int, D: int, positions: list[int]) -> None:
    check(checks.attention(draw, B, H, maxT, D, positions))


@pytest.mark.parametrize(("B", "C"), [(1, 24), (64, 768), (2, 1600)])
def test_embedding(draw: Draw, B: int, C: int) -> None:
    checks.embedding(draw, B, C)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 1.3, "repetition_penalty": 1.2},
        {"top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_choices(draw: Draw, options: dict[str, float]) -> None:
    checks.choices(draw, 50257, 50304, **options)


NEW = "residual_scalars,input_scalars,value_embeddings"
ALL = "modern, all techniques"


WRITERS = [name for name in ARCHITECTURES if name != "vqvae"]


def model(ops: ModuleType, dtype: torch.dtype, batch: int, network: str) -> tuple[ModelShape, Any, Any]:
    names = {"modern": "zero_init", ALL: f"zero_init,{NEW}"}
    techniques = toggled(names[network]) if network in names else ""
    llama = "kv_heads=1,head_width=128,qk_norm,qkv_bias" if network == "llama" else ""
    shape = ModelShape(50257, 256, 3, 5, 320, network.split(",")[0], techniques, llama)
    table = parameter_table(shape)
    rows = [Buffer("parameters", (flat_elements(table),), dtype, "parameters"), *decode_buffers(shape, batch, dtype, ops)]
    views = make_plan(rows).allocate(torch.device("cuda"))
    flat = views.pop("parameters")
    initialize(table, 0, lambda row, values: row.stored(flat).copy_(values * (8 if row.std else 1)))
    return shape, named_weights(shape, flat, table), decode_tensors(shape, views)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 256 positions has parts as well, where one text is written."""
    monkeypatch.setattr(attention_decode, "FEW_ATTENTIONS", (64 * 64, 4))


@pytest.mark.parametrize("network", [*WRITERS, ALL])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_step_is_the_references(batch: int, network: str) -> None:
    """bf16 logits after a prefill, against float64's: no further off than twice the reference's."""
    prompts = [list(range(3, 40 + 7 * b)) for b in range(batch)]
    found = []
    for ops, dtype in (("kernels", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64)):
        backend = choose_backend(ops, torch.device("cuda"))
        shape, weights, buf = model(backend, dtype, batch, network)
        passes = architecture(shape)
        launch = partial(passes.prefill, backend, weights, buf, shape)
        prefill(launch, buf, [prompt[:-1] for prompt in prompts], list(range(batch)))
        buf.tokens.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
        buf.positions.copy_(torch.tensor([len(prompt) - 1 for prompt in prompts]))
        passes.decode_step(backend.decode, weights, buf, shape)
        found.append(buf.logits[:, : shape.vocab_size].double())
    error, own = ((logits - found[2]).norm().item() for logits in found[:2])
    assert torch.isfinite(found[0]).all() and error <= 2 * own, f"{error:.3g}, reference {own:.3g}"


@pytest.mark.parametrize("network", [*WRITERS, ALL])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [SamplingOptions(0.0), SamplingOptions(0.9), SamplingOptions(0.9, top_k=20)], ids=str)
def test_replayed_steps_write_the_same_text(batch: int, options: SamplingOptions, network: str) -> None:
    """As launches one by one, twice, over a full context: 400 tokens in 256, whose newer half is prefilled again."""
    backend = choose_backend("kernels", torch.device("cuda"))
    shape, weights, buf = model(backend, torch.bfloat16, batch, network)
    texts = []
    for replay in (True, True, False):
        decoder = Decoder(shape, backend, weights, buf, options, end_of_text=None)
        if not replay:
            decoder.step, decoder.graphs = decoder.launch_step, False
        written = [Continuation([5, 6, 7 + b], 400, b) for b in range(batch)]
        for _ in decoder.generate(written):
            pass
        texts.append([text.tokens for text in written])
        captured = [prefill for prefill in decoder.prefills.values() if isinstance(prefill, Replayed) and prefill.graph]
        assert bool(captured) == replay
    assert texts[0] == texts[1] == texts[2] and all(len(text) == 400 for text in texts[0])
    # A random Gemma 3 repeats its last token: its head reads the embedding, which the stream holds scaled by sqrt(C).
    assert network == "gemma3" or len(set(texts[0][0])) > 20, "no text to speak of"


@pytest.mark.parametrize("options", [SamplingOptions(0, repetition_penalty=1.2), SamplingOptions(0.9, top_k=20)], ids=str)
def test_replayed_steps_finish_pictures(options: SamplingOptions) -> None:
    """Pictures of 32 codes, begun by one code and by a line's end, have the others next and no more: the tokens of launches
    one by one, which choose before the host has read the token before."""
    backend, codes = choose_backend("kernels", torch.device("cuda")), Codes(4, 8, (GREYS * 196)[:50_000], captions=True)
    shape, weights, buf = model(backend, torch.bfloat16, 3, "gpt2")
    found = []
    for replay in (True, False):
        decoder = PictureDecoder(codes, shape, backend, weights, buf, options, end_of_text=50256)
        if not replay:
            decoder.step, decoder.graphs = decoder.launch_step, False
        texts = [Continuation([50256, *begun], 60, seed) for seed, begun in enumerate(([7], [50_010], [50_100]))]
        for _ in decoder.generate(texts):
            pass
        found.append([text.tokens for text in texts])
    assert found[0] == found[1]
    for tokens, left in zip(found[0], (31, 32), strict=False):
        assert len(tokens) >= left
        assert [token < 50_000 for token in tokens] == [place < left for place in range(len(tokens))]


@pytest.mark.parametrize("network", [*WRITERS, ALL])
def test_a_conversation_goes_on_as_from_a_fresh_cache(network: str) -> None:
    """In float32, where rounding decides nothing: three prompts, each the one before, its text and new tokens; the third
    replays the graph of the second."""
    backend = choose_backend("kernels", torch.device("cuda"))
    shape, weights, buf = model(backend, torch.float32, 1, network)
    kept = Decoder(shape, backend, weights, buf, SamplingOptions(0.0), end_of_text=None)
    prompt = list(range(3, 60))
    for turn in range(3):
        texts = []
        other = model(backend, torch.float32, 1, network)[1:]
        for decoder in (kept, Decoder(shape, backend, *other, SamplingOptions(0.0), end_of_text=None)):
            text = Continuation(prompt, 12, 0)
            for _ in decoder.generate([text], reuse_cache=True):
                pass
            texts.append(text.tokens)
        assert texts[0] == texts[1] and len(texts[0]) == 12
        prompt = [*prompt, *texts[0], *range(100 + turn, 120 + turn)]
    begun = [prefill for size, prefill in kept.prefills.items() if size[2]]
    assert len(begun) == 1 and isinstance(begun[0], Replayed) and begun[0].graph
