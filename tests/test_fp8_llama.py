"""The Llama family in fp8, a member of each: to the bit one whose products round their operands, near one that rounds
nothing; the forms of its tensors, its memory, its training."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.llama_twin import LARGE, SHAPES, sizes
from handgrad.errors import UsageError
from handgrad.joins.fp8.formats import E4M3, E5M2, GRADIENT_FORMATS, SCALE, Quantized
from handgrad.joins.fp8.tables import Fp8Gemms
from handgrad.machine.gpus import GPUS
from handgrad.networks.fp8 import gradient_format
from handgrad.ops.sizes import power_of_two
from handgrad.run.folder import as_begun
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.tools.forecast import resolve_for
from tests.conftest import Model, make_model, quantized_weights
from tests.fp8_models import (
    BOTH_OF_THE_HEAD,
    LAYERS,
    SETTINGS,
    RoundedLlamaProducts,
    bound,
    gemms_of,
    ignores_padding,
    is_as_near_as,
    rounds_its_operands,
)
from tests.llama_twin import FAMILIES, shape_of
from tests.test_fp8_numbers import LARGEST, bits
from tests.test_fp8_training import steps_of

BATCH, LENGTH, VOCABULARY = 3, 16, 57


def make(
    family: str, dtype: torch.dtype, fp8: Fp8Gemms | None = None, gradients: str = "e5m2", *, recompute: int = 0
) -> Model:
    shape = shape_of(family, VOCABULARY, LENGTH, LAYERS)
    settings = {"recompute": recompute, "chunk": 20, "fp8": fp8, "gradients": GRADIENT_FORMATS[gradients]}
    return make_model(shape, BATCH, LENGTH, dtype, **settings)


CASES = [*((name, "qwen2") for name in SETTINGS), *(("all and head", family) for family in FAMILIES if family != "qwen2")]
CASES += [("mixed gradients", "llama"), ("without qkv", "qwen3"), ("without parts of layers", "llama")]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_the_products_that_are_wanted_and_no_others_round_their_operands(name: str, family: str) -> None:
    plain = make(family, torch.bfloat16)
    plain.ops = RoundedLlamaProducts(plain, *SETTINGS[name])
    rounds_its_operands(plain, lambda level: make(family, torch.bfloat16, *SETTINGS[name], recompute=level))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_gradients_are_as_near_as_the_formats_admit(name: str, family: str) -> None:
    """SwiGLU multiplies two numbers that the product before it has rounded, whose errors add in squares: the two roundoffs
    of each `gate_up` count once more."""
    exact, rounded = make(family, torch.float32), make(family, torch.float32, *SETTINGS[name])
    is_as_near_as(bound(*SETTINGS[name], of_each_mlp=2), exact, rounded)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_padded_vocabulary_touches_nothing(family: str) -> None:
    """Of a head that is tied or not."""
    V, gemms = VOCABULARY, gemms_of("", BOTH_OF_THE_HEAD)
    clean, poisoned = (make(family, torch.bfloat16, gemms) for _ in range(2))
    ignores_padding(clean, poisoned)
    name = "wte" if family == "llama" else "head"
    (row,) = (row for row in clean.table if row.name == name)
    assert (row.view(clean.flat_gradients)[V:] == 0).all(), "padded rows have no gradient"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_has_the_forms_that_are_read_and_no_others(family: str) -> None:
    """Attention's backward passes through 16 bits, as a turn stands before the product; gates stay in 16 bits for the
    slope, and their gradient is fp8 alone."""
    model = make(family, torch.bfloat16, gemms_of("0.qkv", "dgrad"))
    first, second = model.act.blocks
    assert isinstance(first.norm1, Tensor) and isinstance(model.weights.blocks[0].qkv_weight, Tensor)
    for norm in (second.norm1, second.norm2, second.swiglu):
        assert isinstance(norm, Quantized) and norm.plain is None
    assert isinstance(second.hidden, Tensor) and isinstance(second.qkv, Tensor)
    assert isinstance(second.atty, Quantized) and second.atty.plain is not None
    turned, gated = ([getattr(block, name) for block in model.d.blocks] for name in ("dqkv", "dhidden"))
    assert isinstance(turned[0], Tensor) and isinstance(turned[1], Quantized)
    assert turned[1].plain is None and turned[1].workspace is not None
    assert all(isinstance(d, Quantized) and d.plain is None and d.workspace is None for d in gated)
    assert isinstance(model.weights.wte, Tensor) and model.weights.head.rows is None, "its forward stays in 16 bits"
    for name, weight in quantized_weights(model).items():
        if name != "wte":
            assert torch.equal(bits(weight.columns), bits(weight.rows).t()), name


# Runs.


@pytest.mark.parametrize("name", LARGE)
def test_published_sizes_are_accepted_and_planned(name: str) -> None:
    """The two fp8 forms of the weights cost what bf16 weights take once more, the head's as well, and the blocks'
    activations less than in bf16."""
    settings = {"micro_batch": 1, "sequence_length": 1024, "tokens_per_step": 1024, "device": "cpu", **sizes(name)}

    def plan(precision: str, head: str = "auto") -> dict[str, int]:
        return resolve(check(RunConfig(precision=precision, fp8_head=head, **settings)), SHAPES[name][0]).plan.size_bytes

    bf16, fp8, blocks = plan("bf16"), plan("fp8"), plan("fp8", "none")
    matrices = [row for row in resolve(check(RunConfig(**settings)), SHAPES[name][0]).parameters if row.group == "matrix"]
    shape = check(RunConfig(**settings)).shape(SHAPES[name][0])
    head = shape.padded_vocab_size * shape.channels
    assert fp8["fp8 weights"] == 2 * (head + sum(row.elements for row in matrices))
    assert blocks["activations"] < bf16["activations"]


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-0.6B"])
def test_the_bytes_that_a_block_keeps(name: str) -> None:
    """Per token, fewer than in bf16, as docs/llama.md counts them: by level of recomputation."""

    def of_two_more_blocks(precision: str, recompute: int) -> float:
        settings = {"micro_batch": 4, "sequence_length": 1024, "tokens_per_step": 4096, **sizes(name)}
        settings |= {"precision": precision, "recompute": recompute}
        configs = (check(RunConfig(**settings | {"num_layers": layers})) for layers in (10, 12))
        fewer, more = (resolve_for(GPUS["h200"], config, SHAPES[name][0]).plan.size_bytes for config in configs)
        return (more["activations"] - fewer["activations"]) / 4096

    shape = check(RunConfig(**sizes(name))).shape(SHAPES[name][0])
    C, F, HD = shape.channels, shape.feed_forward, shape.num_heads * shape.head_width
    for recompute, saved in enumerate((2 * C + 2 * F - HD, C - HD, -HD)):
        bf16, fp8 = (of_two_more_blocks(precision, recompute) for precision in ("bf16", "fp8"))
        assert bf16 - fp8 == 2 * saved


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_heads": 9, "llama": "head_width=8"}, r"num_heads \* head_width in multiples of 16 .*, found 72"),
        ({"llama": "head_width=4,feed_forward=48"}, r"num_heads \* head_width in multiples of 16 .*, found 8"),
        (
            {"num_heads": 4, "llama": "head_width=4,kv_heads=1,feed_forward=48"},
            r"\(num_heads \+ 2 kv_heads\) \* head_width in multiples of 16 .*, found 24",
        ),
        ({"llama": "feed_forward=72"}, "feed_forward in multiples of 16 for precision fp8, found 72"),
    ],
)
def test_sides_that_fp8_products_cannot_read_are_refused(settings: dict, told: str) -> None:
    config = RunConfig(architecture="llama", precision="fp8", channels=32, num_heads=2, init_from="x")
    with pytest.raises(UsageError, match=told):
        check(replace(config, **settings))


@pytest.mark.parametrize(
    ("name", "vocab_size", "batch", "length"),
    [*((name, SHAPES[name][0], 64, 1024) for name in LARGE), ("SmolLM2-135M", 257, 1, 32)],
)
def test_room_for_statistics_on_a_gpu(name: str, vocab_size: int, batch: int, length: int) -> None:
    """A part for each program of the kernels that make the widest tensors, in the tiles that they have: an activation, or,
    beside few tokens and a small vocabulary, a weight."""
    N = batch * length
    settings = {"micro_batch": batch, "sequence_length": length, "tokens_per_step": N, "precision": "fp8", **sizes(name)}
    design = resolve_for(GPUS["h200"], check(RunConfig(**settings)), vocab_size)
    shape = design.shape
    F, C, QKV = shape.feed_forward, shape.channels, (shape.num_heads + 2 * shape.family.kv_heads) * shape.head_width
    quantised = [(N, 2 * F), (2 * F, C), (QKV, C), (C, F), (shape.padded_vocab_size, C)]
    needed = [-(-rows // 64) * -(-columns // 128) for rows, columns in quantised]
    needed += [-(-N // 32) * -(-F // 128), batch * shape.num_heads * -(-length // 64)]
    needed += [-(-N // (2048 // power_of_two(C)))]  # a norm's rows
    assert design.fp8.statistics_parts == max(needed)


TEXTS = {  # of 32 channels and 2 heads
    "llama": "kv_heads=1,tied,feed_forward=48",
    "qwen2": "kv_heads=1,qkv_bias,feed_forward=80,rope=yarn,rope_factor=2.0,rope_length=16,rope_scale=1.1",
    "qwen3": "kv_heads=2,head_width=24,qk_norm,feed_forward=48",
}


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    settings = {"precision": "fp8", "fp8_window": 2, "fp8_count_every": 1, "fp8_head": BOTH_OF_THE_HEAD}
    return replace(config, architecture="llama", llama=TEXTS["qwen2"], warmup_steps=0, learning_rate=1e-2, **settings)


@pytest.mark.nightly(but=["qwen3"])
@pytest.mark.parametrize("family", TEXTS)
def test_training_in_fp8_learns_what_training_in_bf16_learns(fp8: RunConfig, family: str) -> None:
    """Ten steps that take the loss down by more than a half differ by less than a tenth of that."""
    settings = {"steps": 10, "llama": TEXTS[family]}
    bf16, rounded = (steps_of(dataclasses.replace(fp8, precision=p, **settings), 10)[1] for p in ("bf16", "fp8"))
    assert rounded[-1].loss < rounded[0].loss - 0.5
    for a, b in zip(bf16, rounded, strict=True):
        assert abs(a.loss - b.loss) < 0.05


@pytest.mark.nightly(but=["current-e4m3-qwen3", "delayed-mixed-qwen3"])
@pytest.mark.parametrize(
    ("scaling", "gradients", "family"),
    [
        ("delayed", "e4m3", "qwen2"),
        ("delayed", "mixed", "qwen3"),
        ("current", "mixed", "qwen2"),
        ("current", "e4m3", "qwen3"),
    ],
)
def test_recompute_levels_give_the_same_bits(fp8: RunConfig, scaling: str, gradients: str, family: str) -> None:
    fp8 = dataclasses.replace(fp8, fp8_scaling=scaling, fp8_gradients=gradients, llama=TEXTS[family])
    expected, *told = steps_of(fp8, 3)
    for recompute in (1, 2, 3):
        training, *told_too = steps_of(dataclasses.replace(fp8, recompute=recompute), 3)
        assert told_too == told
        assert torch.equal(training.state.master, expected.state.master)


def test_gradients_are_in_e5m2_where_e4m3_was_measured_to_cost(fp8: RunConfig) -> None:
    """A run of before keeps the format that it began with."""
    others = ({"architecture": "gpt2", "llama": ""}, {"architecture": "modern", "llama": ""}, {"lora": "rank=8"})
    assert gradient_format(fp8) == "e5m2" and gradient_format(replace(fp8, fp8_gradients="mixed")) == "mixed"
    assert {gradient_format(replace(fp8, **other)) for other in others} == {"e4m3"}
    buffers = {buffer.name: buffer.dtype for buffer in resolve(fp8, 257).plan.buffers}
    gradients = ("dqkv", "dresidual_mid", "dhidden", "dresidual_out")
    assert all(buffers[f"{name}.{form}"] == E5M2 for name in gradients for form in ("rows", "columns"))
    assert buffers["blocks.0.norm1.rows"] == E4M3
    for begun, kept in (("auto", "e5m2"), ("e4m3", "e4m3")):
        run = replace(fp8, out=f"{fp8.out}-{begun}", steps=1, save_every=1, sample_tokens=0)
        train(replace(run, fp8_gradients=begun))
        _, (line,) = as_begun(run)
        assert line.endswith(f"fp8_gradients {kept}")


@pytest.mark.parametrize("family", TEXTS)
def test_every_quantised_tensor_is_counted_whole(fp8: RunConfig, family: str) -> None:
    training, _, found = steps_of(dataclasses.replace(fp8, llama=TEXTS[family]), 3)
    shape = training.design.shape
    N, C, F, Vp = fp8.micro_batch * fp8.sequence_length, fp8.channels, shape.feed_forward, shape.padded_vocab_size
    HD, QKV = (n * shape.head_width for n in (shape.num_heads, shape.num_heads + 2 * shape.family.kv_heads))
    rows = {"norm1": C, "dqkv": QKV, "atty": HD, "dresidual_mid": C, "norm2": C, "swiglu": F, "dhidden": 2 * F}
    counted = {name: width * N for name, width in (rows | {"dresidual_out": C, "lnf": C}).items()}
    counted |= {"qkv_weight": QKV * C, "proj_weight": C * HD, "gate_up_weight": 2 * F * C, "down_weight": C * F}
    counted |= {"wte" if shape.family.tied else "head": Vp * C}
    resolved, scaling = training.design.fp8, training.scaling
    assert len(resolved.table) == 12 * fp8.num_layers + 2 == len({row.name for row in resolved.table})
    assert scaling is not None
    assert scaling.numbers == [counted[row.name.rpartition(".")[2]] for row in resolved.table]
    assert all(line.amax > 0 for line in found[2])


def test_the_static_scale_of_the_logits_clips_nothing(fp8: RunConfig) -> None:
    training, _, _ = steps_of(fp8, 2)
    logits = training.state.activations.logits
    assert logits.format == E5M2
    assert LARGEST[E5M2] / 4 < logits.scaling[SCALE].item() / fp8.tokens_per_step <= LARGEST[E5M2]
