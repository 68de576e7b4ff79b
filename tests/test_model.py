"""The whole model: gradients against float64 autograd, logits and loss against transformers, recompute levels bit-equal."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from handgrad.format import speed
from handgrad.machine import devices
from handgrad.memory.rows import count_parameters
from handgrad.models import compute_losses, parameter_table
from handgrad.ops import compose, reference
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model
from tests.model_checks import check_bf16_gradients, check_twin_gradients
from tests.techniques import toggled

ODD = ModelShape(vocab_size=57, sequence_length=19, num_layers=3, num_heads=3, channels=33)
MODERN = ModelShape(57, 19, 3, 3, 42, "modern")
NEW = replace(MODERN, techniques=toggled("residual_scalars,input_scalars,value_embeddings"))
both_networks = pytest.mark.parametrize("shape", [ODD, MODERN, NEW], ids=["gpt2", "modern", "modern, all techniques"])


@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
@pytest.mark.parametrize(("batch", "length", "chunk"), [(1, 1, 1), (3, 17, 20), (2, 19, 1 << 20)])
def test_gradients_equal_autograd(batch: int, length: int, chunk: int, recompute: int) -> None:
    model = make_model(ODD, batch, length, recompute=recompute, chunk=chunk)
    model.run(recompute=recompute, scale=1 / (batch * length))
    check_twin_gradients(model)
    assert (model.table[0].view(model.flat_gradients)[ODD.vocab_size :] == 0).all(), "padded rows have no gradient"


def test_the_check_points_at_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong slope of GELU spoils all gradients below it: the last block's tell its place, the right ones above it and the
    wrong ones below. A wrong formula forward is told by the loss."""
    gemms = reference.linear_forward, reference.linear_backward
    forward, backward = reference.gelu_forward, reference.gelu_backward
    _, wrong_backward = compose.with_gelu(*gemms, forward, lambda dhidden, inp: backward(dhidden.mul_(1.001), inp))
    monkeypatch.setattr(reference, "gelu_linear_backward", wrong_backward)
    model = make_model(ODD, 2, 5)
    model.run(scale=1 / 10)
    right = "blocks.2.fcproj_weight, blocks.2.fcproj_bias"
    with pytest.raises(
        AssertionError, match=rf"nearest to the loss .*2.fc_weight .*error 0.001.*; right beside them: {right}$"
    ):
        check_twin_gradients(model)
    wrong_forward, _ = compose.with_gelu(*gemms, lambda out, inp: forward(out, 2 * inp), backward)
    wrong_forward = compose.after_layernorm(reference.layernorm_forward, wrong_forward)
    monkeypatch.setattr(reference, "layernorm_linear_gelu_forward", wrong_forward)
    model.run(scale=1 / 10)
    with pytest.raises(AssertionError, match="the forward differs from the twin's: loss"):
        check_twin_gradients(model)


@both_networks
def test_gradients_are_added(shape: ModelShape) -> None:
    model = make_model(shape, 2, 5)
    model.run()
    once = model.flat_gradients.clone()
    model.run()
    torch.testing.assert_close(model.flat_gradients, 2 * once, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_networks
def test_recompute_levels_give_the_same_bits(dtype: torch.dtype, shape: ModelShape) -> None:
    found = []
    for level in (0, 1, 2, 3):
        model = make_model(shape, 3, 16, dtype, recompute=level)
        model.run(recompute=level)
        found.append((model.flat_gradients, model.act.losses.clone()))
    for gradients, losses in found[1:]:
        assert torch.equal(gradients, found[0][0]) and torch.equal(losses, found[0][1])


def test_bf16_gradients_are_as_good_as_bf16_autograd() -> None:
    check_bf16_gradients(ODD)


def hugging_face(model: Model) -> "transformers.GPT2LMHeadModel":
    """transformers' GPT-2 with the same weights. Its Conv1D keeps (in, out), ours is (out, in)."""
    s = model.shape
    settings = transformers.GPT2Config(
        vocab_size=s.vocab_size,
        n_positions=s.sequence_length,
        n_embd=s.channels,
        n_layer=s.num_layers,
        n_head=s.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    theirs = transformers.GPT2LMHeadModel(settings).eval()
    names = {
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "fc": "mlp.c_fc",
        "fcproj": "mlp.c_proj",
        "ln1": "ln_1",
        "ln2": "ln_2",
    }
    state = {}
    for row in model.table:
        tensor = row.stored(model.flat)
        if row.name in ("wte", "wpe"):
            state[f"transformer.{row.name}.weight"] = tensor
        elif row.name.startswith("lnf"):
            state[f"transformer.ln_f.{row.name.removeprefix('lnf_')}"] = tensor
        else:
            _, layer, rest = row.name.split(".")
            module, kind = rest.rsplit("_", 1)
            matrix = kind == "weight" and not module.startswith("ln")
            state[f"transformer.h.{layer}.{names[module]}.{kind}"] = tensor.t() if matrix else tensor
    state["lm_head.weight"] = state["transformer.wte.weight"]
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize(
    "shape", [ModelShape(101, 16, 2, 2, 32), ModelShape(257, 33, 3, 5, 40), ModelShape(50257, 64, 2, 4, 64)]
)
def test_logits_and_loss_equal_transformers(shape: ModelShape) -> None:
    model = make_model(shape, 2, shape.sequence_length, torch.float32, noise=0.02)
    compute_losses(model.ops, model.weights, model.act, shape)
    logits = (model.act.lnf @ model.weights.wte.t())[:, : shape.vocab_size]
    theirs = hugging_face(model)
    with torch.no_grad():
        expected = theirs(model.act.tokens).logits.view(-1, shape.vocab_size)
    expected_loss = F.cross_entropy(expected, model.act.targets.view(-1))
    assert (logits - expected).abs().max() <= 1e-5
    assert abs(model.act.losses.mean() - expected_loss) <= 1e-5


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        (ModelShape(50257, 1024, 12, 12, 768), 124.44),
        (ModelShape(50257, 1024, 24, 16, 1024), 354.82),
        (ModelShape(50257, 1024, 36, 20, 1280), 774.03),
        (ModelShape(50257, 1024, 48, 25, 1600), 1557.61),
    ],
)
def test_parameter_counts_are_those_of_gpt2(shape: ModelShape, millions: float) -> None:
    assert round(count_parameters(parameter_table(shape)) / 1e6, 2) == millions


def test_operations_are_counted_as_llm_c_counts_them() -> None:
    """6 N + 6 L C T: 6 * 124,439,808 + 6 * 12 * 768 * 1024 for GPT-2 124M."""
    assert ModelShape(50257, 1024, 12, 12, 768).flops_per_token == 6 * 124_439_808 + 56_623_104


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71.0),
    ],
)
def test_utilisation_is_of_the_data_sheets_peak(name: str, teraflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense bf16 with float32 sums. Half of the peak is 50 %; without a data sheet there is no percentage."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda")
    assert devices.peak_flops(gpu) == teraflops * 1e12
    assert speed(teraflops * 1e12 / 2 / 800e6, 800e6, devices.peak_flops(gpu)) == "50.0% MFU"
    for other in ("NVIDIA A10", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, other=other: other)
        assert devices.peak_flops(gpu) is None and devices.peak_flops(torch.device("cpu")) is None
    assert speed(1000, 2e9, None) == "2000 GFLOP/s"


def test_initial_weights_follow_gpt2() -> None:
    shape = ModelShape(1000, 64, 4, 4, 128)
    model = make_model(shape, 1, 4, torch.float32, noise=0.0)
    for row in model.table:
        stored = row.stored(model.flat)
        if row.name.endswith(("proj_weight",)):
            assert abs(stored.std() - 0.02 / math.sqrt(8)) < 0.001, row.name
        elif len(row.shape) == 2:
            assert abs(stored.std() - 0.02) < 0.001, row.name
        else:
            assert (stored == float("ln" in row.name and "weight" in row.name)).all(), row.name
    assert (model.table[0].view(model.flat)[1000:] == 0).all(), "the padding starts at zero"
    beginnings = {tuple(row.stored(model.flat).flatten()[:4].tolist()) for row in model.table if len(row.shape) == 2}
    assert len(beginnings) == sum(len(row.shape) == 2 for row in model.table), "every tensor has numbers of its own"
    # The loss of an untrained model is that of guessing.
    compute_losses(model.ops, model.weights, model.act, shape)
    assert abs(model.act.losses.mean().item() - math.log(1000)) < 0.3
