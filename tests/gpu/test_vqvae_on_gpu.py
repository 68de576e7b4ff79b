"""The autoencoder of pictures on a CUDA GPU: operations as exact as the reference, a captured step with the same bits every
time, the losses and the codes of a CPU."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from torch import Tensor

from handgrad.errors import UsageError
from handgrad.evaluation.codec import open_codec
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.ops import CONTROLS, PICTURE_OPERATIONS, UPDATE, cases, cpu, cuda as kernels, reference
from handgrad.run.assemble import Assembly, assemble
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.settings.presets import vqvae as preset
from tests.gpu.models import gradients
from tests.gpu.runs import leave_the_same_bits
from tests.kernels.memory_checks import Draw, Tensors, case, check, check_repeats
from tests.pictures import discs, write_pictures

LEVELS = (8, 5, 5, 5)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TEXTS = {"fsq": "size=16x16", "vq": "size=16x16,codebook=64,latent=4"}
SMALL: dict[str, Any] = {"num_layers": 2, "channels": 32, "sequence_length": 3 * 16 * 16, "packing": "whole"}
SMALL |= {"micro_batch": 8, "tokens_per_step": 16 * 3 * 16 * 16, "warmup_steps": 2}

SIZES: list[dict[str, int]] = [
    {"B": 8, "Y": 32, "X": 32, "H": 1, "D": 64, "F": 64, "J": 3, "S": 1, "Q": 8},
    {"B": 8, "Y": 32, "X": 32, "H": 1, "D": 64, "F": 64, "J": 4, "S": 2, "Q": 8},
    {"B": 8, "Y": 32, "X": 32, "H": 1, "D": 3, "F": 64, "J": 3, "S": 1, "Q": 1},
    {"B": 8, "Y": 32, "X": 32, "H": 1, "D": 64, "F": 3, "J": 3, "S": 1, "Q": 16},
    {"B": 2, "Y": 96, "X": 40, "H": 1, "D": 36, "F": 24, "J": 4, "S": 2, "Q": 3},
    {"B": 3, "Y": 5, "X": 7, "H": 1, "D": 5, "F": 9, "J": 3, "S": 1, "Q": 1},
]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    devices.set_arithmetic(CUDA, "fp32")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("operation", [name for name in PICTURE_OPERATIONS if name in cases.CALLS])
def test_an_operation(operation: str, sizes: dict[str, int]) -> None:
    """Parameter gradients are sums over all places; a convolution sums the elements of a patch at once, which the reference
    adds in shorter sums."""
    sums = dict.fromkeys(("dweight_acc", "dbias_acc", "sums_acc"), sizes["B"] * sizes["Y"] * sizes["X"])
    if "conv" in operation:
        sums |= dict.fromkeys(("out", "dinp"), sizes["J"] ** 2 * max(sizes["D"], sizes["F"]))
    inputs, run = case(Draw(torch.float32, CUDA), operation, **sizes, Z=4, E=64, V=256)

    def numbers(ops: ModuleType, arguments: cases.Arguments) -> Tensors:
        return {name: result for name, result in run(ops, arguments).items() if name != "codes"}

    check((inputs, numbers), sums)
    check_repeats((inputs, run))


@pytest.mark.parametrize("name", ["fsq_round", "vq_forward"])
def test_codes_are_those_of_a_cpu(name: str) -> None:
    """But of a few numbers halfway between two of them, perhaps."""
    draw, found = Draw(torch.float32), []
    inp, book = draw(16, 32, 32, 4), draw(512, 5)
    for ops, device in ((reference, CPU), (kernels, CUDA)):
        out, codes = torch.empty_like(inp, device=device), torch.full((16, 1024), -1, device=device)
        if name == "fsq_round":
            ops.fsq_forward(out, inp.to(device), levels=LEVELS)
            ops.fsq_round(out, codes, out, levels=LEVELS)
        else:
            errors = torch.empty(16, 1024, device=device)
            ops.vq_forward(out, codes, errors, inp.to(device), book.to(device))
        found.append(codes.cpu())
    assert (found[0] == found[1]).float().mean() >= 0.999 and len(found[0].unique()) > 300


def test_codes_have_the_values_of_a_cpu() -> None:
    codes = torch.arange(1000).view(1, 1000)
    book = torch.randn(1000, 5, generator=torch.Generator().manual_seed(1))
    for name, more, settings in (("fsq_values", (), {"levels": LEVELS}), ("vq_values", (book,), {})):
        out, on_gpu = torch.empty(1, 40, 25, 4), torch.empty(1, 40, 25, 4, device=CUDA)
        getattr(reference, name)(out, codes, *more, **settings)
        getattr(kernels, name)(on_gpu, codes.cuda(), *(tensor.cuda() for tensor in more), **settings)
        assert torch.equal(on_gpu.cpu(), out)


@pytest.mark.parametrize("E", [9, 1000, 1 << 15])
def test_a_codebook_moves_as_on_a_cpu(E: int) -> None:
    """Over three steps in which many dead codes move; twice with the same bits."""
    draw, found = Draw(torch.float32), []
    before, sums = draw(E, 9), [draw(E, 9, scale=0.01) for _ in range(3)]
    before[:, -1] = before[:, -1].abs() ** 8
    for device in (CPU, CUDA, CUDA):
        codebook = before.to(device, copy=True)
        for step, each in enumerate(sums, start=1):
            controls = torch.tensor([step, 1e-3, *[0.0] * (CONTROLS - 2)], dtype=torch.float64, device=device)
            results = torch.tensor([0.0, 0.0, 0.0, UPDATE, 1.0], dtype=torch.float64, device=device)
            given = torch.cat([each[:, :-1], each[:, -1:].abs()], 1).to(device)
            kernels.vq_update(codebook, codebook, given, controls, results, decay=0.9)
        found.append(codebook.cpu())
    assert torch.equal(found[1], found[2]) and (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()
    assert (found[0][:, :-1] - before[:, :-1]).abs().gt(0.1).any(1).sum() > E // 9


@pytest.mark.parametrize("text", ["size=4x4", "size=4x4,codebook=64,latent=4"], ids=TEXTS)
def test_gradients_are_as_good_as_on_the_cpu(text: str) -> None:
    """The error against float64 is at most twice the CPU's own."""
    shape = ModelShape(256, 48, 2, 1, 64, architecture="vqvae", vqvae=text)
    sources = (reference, CPU, torch.float64), (cpu, CPU, torch.float32), (kernels, CUDA, torch.float32)
    exact, own, found = (gradients(*source, scale=1 / 240, shape=shape) for source in sources)
    assert len(found) > 20
    whole = [torch.cat([t.cpu().double().flatten() for t in each.values()]) for each in (exact, own, found)]
    assert (whole[2] - whole[0]).norm() <= 2 * (whole[1] - whole[0]).norm()


class Discs:
    """Samples from a few pictures: targets are the bytes of one."""

    def __init__(self) -> None:
        self.bytes_of = torch.from_numpy(discs(64, 16, 16).reshape(64, -1)).long()

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None:
        samples = torch.arange(first_sample, first_sample + len(targets)) % len(self.bytes_of)
        targets.copy_(self.bytes_of[samples])
        inputs.zero_()


def training_on(device: torch.device, text: str, **how: Any) -> Assembly:
    config = RunConfig(**{**vars(preset()), **SMALL, "vqvae": text, "precision": "fp32", "steps": 5})
    ops = kernels if device.type == "cuda" else cpu
    return assemble(resolve(config, 257, device=device, ops=ops), Discs(), **how)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_captured_steps_have_the_same_bits_and_the_losses_of_a_cpu(text: str) -> None:
    """Twice, once more without graphs; a replayed step allocates nothing."""
    losses, states = [], []
    for graphs in (True, True, False):
        training = training_on(CUDA, text, graphs=graphs)
        losses.append([training.stepper.step(step).loss for step in range(2)])
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        losses[-1] += [training.stepper.step(step).loss for step in range(2, 5)]
        assert not graphs or allocated == torch.cuda.memory_stats()["allocation.all.allocated"]
        states.append([training.state.master, *training.state.optimizer.values()])
    assert losses[0] == losses[1] == losses[2] and losses[0][-1] < losses[0][0]
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))
    on_cpu = training_on(CPU, text)
    for step, loss in enumerate(losses[0]):
        assert loss == pytest.approx(on_cpu.stepper.step(step).loss, rel=1e-3)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_runs_and_their_codes(text: str, tmp_path: Path) -> None:
    """A run repeats and resumes bit by bit. On a GPU its codec has the codes and the pictures of a CPU's."""
    shards = write_pictures(tmp_path / "discs", discs(272, 16, 16), 16)
    where = {"data": str(shards), "out": str(tmp_path / "run"), "device": "cuda", "vqvae": text}
    settings = {"steps": 12, "save_every": 4, "eval_every": 6, "eval_tokens": 16 * 3 * 16 * 16}
    config = replace(preset(), **SMALL, **settings, **where)
    leave_the_same_bits(config)
    assert 'precision = "fp32"' in (tmp_path / "run" / "config.toml").read_text()
    weights, some = open_weights(config.out), discs(100, 16, 16, seed=9)
    on_cpu, on_gpu = open_codec(weights), open_codec(weights, "cuda")
    codes = on_cpu.encode(some)
    assert (on_gpu.encode(some) == codes).mean() >= 0.99
    apart = np.abs(on_gpu.decode(codes).astype(int) - on_cpu.decode(codes))
    assert apart.max() <= 1 and apart.mean() < 0.01


def test_bf16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vqvae supports precision 'auto' or 'fp32' so far, found 'bf16'"):
        train(replace(preset(), data="none", out=str(tmp_path / "run"), device="cuda", precision="bf16"))
