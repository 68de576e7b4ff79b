"""The autoencoder of pictures: its gradients equal autograd's, it learns, resumes bit by bit, is the same on any number of
ranks; codes go to pictures and back; what it does not do is refused in a line."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.cli import main
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.codec import open_codec
from handgrad.interop.sources import open_weights
from handgrad.memory.arena import ALWAYS, make_plan
from handgrad.memory.rows import named
from handgrad.models import compute_losses, forward_buffers, named_activations, vqvae
from handgrad.ops import cpu, reference
from handgrad.run.assemble import assemble, bind
from handgrad.run.open import train
from handgrad.run.resolve import resolve, with_precision
from handgrad.settings.config import ModelShape, RunConfig, check
from handgrad.settings.presets import vqvae as preset
from handgrad.training.state import make_state
from tests.conftest import Model, make_model
from tests.distributed.runs import Launcher, arguments, same_run
from tests.model_checks import check_gradients
from tests.pictures import discs, write_pictures
from tests.test_picture_operations import kernel, pixels, planes
from tests.test_runs import records, same_bits

TEXTS = {"fsq": "size=8x12,levels=4.3.5,groups=2", "vq": "size=8x12,codebook=9,latent=3,groups=2"}
SMALL = {"num_layers": 2, "channels": 16, "sequence_length": 192, "tokens_per_step": 3072, "micro_batch": 8}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "discs", discs(272, 8, 8), 16)


@pytest.fixture
def small(pictures: Path, tmp_path: Path) -> RunConfig:
    settings: dict[str, Any] = {"steps": 30, "warmup_steps": 3, "eval_every": 15, "save_every": 10, "device": "cpu"}
    where = {"data": str(pictures), "out": str(tmp_path / "run"), "vqvae": "size=8x8"}
    return replace(preset(), **SMALL, **settings, **where, eval_tokens=3072)


def model_of(text: str) -> Model:
    shape = ModelShape(257, 3 * 8 * 12, 2, 1, 8, architecture="vqvae", vqvae=text)
    model = make_model(shape, 3, 3 * 8 * 12)
    model.act.targets.clamp_(max=255)
    return model


def loss_of(model: Model, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum of squared errors, what a codebook adds), of the same weights in plain PyTorch."""
    shape, family = model.shape, vqvae.family_of(model.shape)
    bytes_of = planes(model.act.targets.view(3, 8, 12, 3).double() / 127.5 - 1)

    def conv(x: Tensor, name: str, side: int = 3, stride: int = 1) -> Tensor:
        return F.conv2d(x, kernel(w[f"{name}_weight"], side), w[f"{name}_bias"], stride, padding=1)

    def normed(x: Tensor, at: str) -> Tensor:
        return F.silu(F.group_norm(x, family.groups, w[f"{at}norm_weight"], w[f"{at}norm_bias"], eps=1e-6))

    x = conv(bytes_of, "stem")
    for level in range(shape.num_layers):
        at = f"encoder.{level}."
        x = conv(x + conv(normed(x, at), f"{at}conv"), f"{at}resize", 4, 2)
    z = pixels(conv(x, "code"))
    more = torch.zeros((), dtype=z.dtype)
    if family.codebook:
        vectors = w["codebook"][:, :-1].detach()
        e = vectors[torch.cdist(z.reshape(-1, 3), vectors).argmin(1)].view(z.shape)
        more = family.commitment * model.act.targets.numel() / z.numel() * (z - e).square().sum()
        q = z + (e - z).detach()
    else:
        levels = torch.tensor(family.fsq_levels, dtype=z.dtype)
        half, offset = (levels - 1) * (1 + 1e-3) / 2, 0.5 * (levels % 2 == 0)
        bounded = torch.tanh(z + (offset / half).atanh()) * half - offset
        q = (bounded + (bounded.round() - bounded).detach()) / (levels // 2)
    x = conv(planes(q), "decode")
    for level in range(shape.num_layers):
        at = f"decoder.{level}."
        doubled = kernel(w[f"{at}resize_weight"], 4), w[f"{at}resize_bias"]
        x = F.conv_transpose2d(x, *doubled, stride=2, padding=1)
        x = x + conv(normed(x, at), f"{at}conv")
    return (conv(normed(x, ""), "head") - bytes_of).square().sum(), more


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_gradient_is_autograds(text: str) -> None:
    model = model_of(text)
    model.run(scale=0.5)
    w = {row.name: row.view(model.flat).clone().requires_grad_() for row in model.table}
    loss, more = loss_of(model, w)
    assert abs(model.act.losses.sum() - loss) <= 1e-12 * loss
    rows = [row for row in model.table if row.name != "codebook"]  # whose sums tests/test_picture_operations.py checks
    found = torch.autograd.grad(0.5 * (loss + more), [w[row.name] for row in rows])
    pairs = zip(rows, found, strict=True)
    check_gradients((row.name, row.view(model.flat_gradients), gradient) for row, gradient in pairs)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_forward_alone_has_the_losses_of_training(text: str) -> None:
    """In its own plan, where what no backward reads gives its memory away; and so has a plan in which nothing is shared."""
    model = model_of(text)
    model.run()
    plan = make_plan(forward_buffers(model.shape, 3, model.shape.sequence_length, torch.float64, reference))
    assert plan.total_bytes < model.plan.total_bytes / 2
    act = named_activations(model.shape, plan.allocate(torch.device("cpu")))
    act.targets.copy_(model.act.targets)
    compute_losses(reference, model.weights, act, model.shape)
    assert torch.equal(act.losses, model.act.losses)
    alone = make_model(model.shape, 3, model.shape.sequence_length, private=True)
    alone.act.targets.copy_(model.act.targets)
    alone.run()
    assert torch.equal(alone.flat_gradients, model.flat_gradients)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_tensor_lives_long_enough(text: str, training: bool) -> None:
    """Before each tick, what is not alive in it becomes NaN: the gradients and losses stay the same."""
    model = model_of(text)
    model.run()
    losses, expected, L = model.act.losses.clone(), model.flat_gradients.clone(), model.shape.num_layers
    sizes = model.shape, 3, model.shape.sequence_length, torch.float64, reference
    rows = tuple(vqvae.activations(*sizes, chunk=0, training=training))
    views = make_plan(replace(row.buffer(0), lifetimes=ALWAYS) for row in rows).allocate(torch.device("cpu"))
    act = named(vqvae.Activations, views, L)
    act.targets.copy_(model.act.targets)
    model.flat_gradients.zero_()
    codes, head = L + 1, 2 * L + 2
    levels = {f"encoder.{level}": 1 + level for level in range(L)} | {
        f"decoder.{level}": codes + 1 + level for level in range(L)
    }
    ticks = {"stem": 0, "codes": codes, "decoding": codes, "head": head} | levels
    stages = vqvae.forward(reference, model.weights, act, model.shape)
    if training:
        d, scale = named(vqvae.Gradients, views, L), torch.ones(1, dtype=torch.float64)
        about = model.weights, model.gradients, act, d, scale, model.shape
        stages += vqvae.backward(reference, *about, recompute=0)
    for stage in stages:
        tick = 2 * head - ticks[stage.bucket] if stage.done else ticks[stage.bucket]
        for row in rows:
            if views[row.name].is_floating_point() and not any(a <= tick <= b for a, b in row.lifetimes(0)):
                views[row.name].fill_(math.nan)
        stage.run()
    if training:
        assert torch.equal(model.flat_gradients, expected) and torch.equal(act.losses, losses)
    else:
        vqvae.squared_errors(reference, model.weights, act, model.shape)
        assert torch.equal(act.losses, losses)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_codes_go_to_pictures_and_back(text: str) -> None:
    """The picture of a picture's codes is the training's prediction; a batch may be smaller than its buffers."""
    model = model_of(text)
    model.forward()
    predicted = ((model.act.prediction + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    inputs = model.act.targets.view(3, 8, 12, 3).to(torch.uint8)
    plan = make_plan(forward_buffers(model.shape, 4, model.shape.sequence_length, torch.float64, reference))
    act = named_activations(model.shape, plan.allocate(torch.device("cpu")))
    codec = reference, model.weights, act, model.shape
    codes = vqvae.encode(*codec, inputs)
    assert codes.shape == (3, 2, 3) and codes.max() < vqvae.family_of(model.shape).codes and len(codes.unique()) > 2
    act.codes.fill_(1 << 40)  # what another tensor may leave in this memory
    assert torch.equal(vqvae.decode(*codec, codes), predicted)


RUNS = {"fsq": "size=8x8", "vq": "size=8x8,codebook=64,latent=4"}


@pytest.mark.nightly(but=["vq"])
@pytest.mark.parametrize("text", RUNS.values(), ids=RUNS)
def test_it_learns_and_resumes_bit_by_bit(small: RunConfig, text: str, tmp_path: Path) -> None:
    whole = replace(small, vqvae=text, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < 0.6 * losses[0]
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000030")
    train(again)  # goes on from step 20
    same_bits(whole.out, again.out, 30)


def test_a_run_is_a_codec(small: RunConfig, config: RunConfig) -> None:
    """It codes any number of pictures at once, each independently of the others."""
    train(small)
    codec = open_codec(open_weights(small.out))
    assert (codec.size, codec.grid, codec.codes) == ((8, 8), (2, 2), 1000)
    some = discs(37, 8, 8, seed=9)
    codes = codec.encode(some)
    assert codes.shape == (37, 2, 2) and np.array_equal(codec.encode(some[20:21]), codes[20:21])
    error = np.square(codec.decode(codes) / 127.5 - some / 127.5).mean()
    (loss,) = [record["loss"] for record in records(small.out, ("validation",)) if record["step"] == 30]
    assert error == pytest.approx(loss, rel=0.5)
    text = replace(config, steps=1, eval_every=0, out=f"{small.out}-of-text")
    train(text)
    with pytest.raises(UsageError, match="codes need a run with --architecture vqvae, found gpt2"):
        open_codec(open_weights(text.out))


def test_a_codebooks_codes_are_in_use(small: RunConfig) -> None:
    """Nearly all 64; where the gradient of equation 3 moved the vectors, 26."""
    train(replace(small, vqvae=RUNS["vq"], steps=60, eval_every=0))
    codes = open_codec(open_weights(small.out)).encode(discs(272, 8, 8, seed=9))
    assert len(np.unique(codes)) >= 58


def test_compiling_ahead_changes_no_weights(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it runs what is not Triton's: torch moves the codebook. Neither for a fresh run nor for a second program."""
    data = open_dataset(small.data)
    batches = Batches(data.splits["train"], small.sequence_length, small.seed)
    design = resolve(replace(small, vqvae=RUNS["vq"]), data.tokenizer.vocab_size)
    fresh, ran = assemble(design, batches).state, list[Any]()

    def run(*launches: Any) -> None:
        for launch in (each for each in launches if getattr(each, "func", None) is not cpu.verdict):
            launch()
            ran.append(launch)

    monkeypatch.setattr(cpu, "compile_ahead", run)
    training = assemble(design, batches)
    assert ran and torch.equal(training.state.master, fresh.master)
    assert training.state.named_gradients["codebook"].any()
    assert training.stepper.step(0).skipped is None
    before = training.state.master.clone()
    bind(training.state, training.scaling, batches, graphs=False)
    assert torch.equal(training.state.master, before)


@pytest.mark.nightly(but=["vq"])
@pytest.mark.parametrize("text", RUNS.values(), ids=RUNS)
def test_ranks_do_not_matter(text: str, launcher: Launcher, pictures: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "architecture": "vqvae", "vqvae": text, "num_heads": 1, "steps": 4, "micro_batch": 4}
    launcher.run(1, arguments(pictures, tmp_path / "alone", **settings))
    for ranks, zero in ((2, 1), (4, 2)):
        launcher.run(ranks, arguments(pictures, tmp_path / f"run{ranks}", zero=zero, **settings))
        same_run(tmp_path / "alone", tmp_path / f"run{ranks}", 4)


@pytest.mark.parametrize("text", RUNS.values(), ids=RUNS)
def test_an_audited_run_is_verified_and_evaluated(small: RunConfig, text: str, capsys: pytest.CaptureFixture) -> None:
    train(replace(small, vqvae=text, steps=4, eval_every=2, save_every=2, audit_every=2))
    assert main(["verify", small.out]) == 0
    validated = [record["loss"] for record in records(small.out, ("validation",))]
    capsys.readouterr()
    assert main(["evaluate", small.out]) == 0
    (told,) = re.findall(r"squared error +(\d\S+)", capsys.readouterr().out)
    assert float(told) == pytest.approx(validated[-1], abs=1e-6)
    assert main(["evaluate", small.out, "--context", "100"]) == 64
    assert capsys.readouterr().err == "handgrad: --context is for models of tokens; vqvae reads whole pictures\n"


@pytest.mark.parametrize("text", RUNS.values(), ids=RUNS)
def test_the_plan_is_all_the_memory(small: RunConfig, text: str) -> None:
    design = resolve(replace(small, vqvae=text), 257, device=torch.device("cpu"))
    views = design.plan.allocate(design.device)
    allocated = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views.values()}
    assert sum(allocated.values()) == design.plan.total_bytes
    weights = {row.name: row.view(views["parameters"]) for row in design.parameters}
    state = make_state(design, views, weights, {}, {})
    tensors = [*vars(state.activations).values(), *vars(state.activation_gradients).values()]
    for block in (one for tensor in tensors if isinstance(tensor, list) for one in tensor):
        tensors += vars(block).values()
    assert {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor)} <= allocated.keys()
    assert design.ops is cpu


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"vqvae": "size=8"}, "vqvae must have a size of ROWSxCOLUMNS, found 'size=8'"),
        ({"vqvae": "size=10x8"}, "a size in multiples of 4 for 2 num_layers, found 'size=10x8'"),
        ({"vqvae": "size=8x8,levels=8.1"}, "levels of 2 or more, like 8.5.5.5, found"),
        ({"vqvae": "size=8x8,levels=8.x"}, "levels of 2 or more"),
        ({"vqvae": "size=8x8,codebook=40000"}, "1 to 32768 codes"),
        ({"vqvae": "size=8x8,groups=5"}, "groups that divide channels 16"),
        ({"vqvae": "size=16x8"}, "the 3 * 16 * 8 = 384 bytes of a picture, found 192; try --sequence-length 384"),
        ({"vqvae": "size=8x8,width=3"}, "a number of vqvae must be one of size, levels"),
        ({"num_heads": 4}, "vqvae supports num_heads 1 so far, found 4"),
        ({"recompute": 1}, "vqvae supports recompute 0 so far, found 1"),
        ({"optimizer": "muon"}, "vqvae supports optimizer 'adamw' so far, found 'muon'"),
        ({"precision": "bf16"}, "vqvae supports precision 'auto' or 'fp32' so far, found 'bf16'"),
        ({"dropout": 0.1}, "architecture vqvae has no dropout"),
        ({"lora": "rank=4", "init_from": "weights"}, "lora is for architecture"),
    ],
)
def test_what_it_has_not_is_refused(small: RunConfig, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(replace(small, **settings))
    assert told in str(refused.value)


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_are_refused_before_anything_is_allocated(small: RunConfig, device: str) -> None:
    """So is a plan for a GPU that is not in this machine, the device "meta"."""
    with pytest.raises(UsageError, match="vqvae runs on this machine's CPU or NVIDIA GPU so far; try --device cpu"):
        resolve(small, 257, device=torch.device(device), ops=reference)


def test_auto_is_float32_on_a_gpu_too(small: RunConfig) -> None:
    assert with_precision(small, torch.device("cuda")).precision == "fp32"


def test_other_data_are_refused(small: RunConfig, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"vqvae takes pictures in bytes, .* was prepared from text; prepare them with --codes rgb"
    ):
        train(replace(small, data=str(shards)))
    narrower = write_pictures(tmp_path / "narrower", discs(40, 8, 4), 8)
    with pytest.raises(
        DataError, match=r"expected pictures of 8 x 8 in .*, found 8 x 4; try --sequence-length 96 --vqvae size=8x4"
    ):
        train(replace(small, data=str(narrower)))
    wider = write_pictures(tmp_path / "wider", discs(40, 8, 12), 8)
    with pytest.raises(DataError, match="found 8 x 12; try --sequence-length 288"):
        train(replace(small, data=str(wider)))


def test_it_writes_no_text(small: RunConfig, capsys: pytest.CaptureFixture) -> None:
    train(replace(small, steps=2, eval_every=0))
    for command, told in (
        (["sample", small.out], "vqvae writes no text; `handgrad prepare --images FOLDER --codes RUN` takes its codes"),
        (["export", small.out, "--out", f"{small.out}-hf"], "vqvae writes no text"),
        (["export", small.out, "--out", f"{small.out}.gguf", "--to", "gguf"], "vqvae has no form elsewhere"),
        (["export", small.out, "--out", f"{small.out}.bin", "--to", "llmc"], "vqvae has no form elsewhere"),
    ):
        assert main(command) == 64
        error = capsys.readouterr().err
        assert told in error and len(error.splitlines()) == 1


def test_the_next_command_takes_its_codes(small: RunConfig, pictures: Path, capsys: pytest.CaptureFixture) -> None:
    settings = ["--data", str(pictures), "--out", small.out, "--steps", "20", "--channels", "16", "--device", "cpu"]
    settings += ["--tokens-per-step", "3072", "--micro-batch", "8"]
    assert main(["train", *settings]) == 0
    assert f"next       handgrad prepare --images FOLDER --codes {small.out}" in capsys.readouterr().out.replace(
        "\n           ", " "
    )
