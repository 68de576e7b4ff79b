"""The contenders of the GPU benchmarks: the twins are the same model, by any of their options, and make the same steps."""

import dataclasses
import io
import json
import sys

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.contenders import HandgradRun, Settings, TwinRun, ZipfTokens, tokens_of
from benchmarks.turns import contend
from benchmarks.twin_switches import OPTIONS, Switches, switches_of
from handgrad.errors import UsageError

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

CPU = torch.device("cpu")
SMALL = Settings(
    model="tiny", micro_batch=2, sequence_length=16, micro_steps=2, precision="fp32", device="cpu", vocab_size=301
)
EAGER = Switches(attention="flash", compiled=False, autocast=False)


def gradients_of_twin(settings: Settings, switches: Switches, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by handgrad's names) of the first step's micro-batches."""
    config, tokens = dataclasses.replace(settings.config(), clip_norm=0.0), tokens_of(settings)
    run = TwinRun(config, tokens, switches, same_weights=True)
    twin = run.trainer.twin.to(dtype)
    micro_batches = []
    for m in range(config.micro_steps):
        inputs, targets = (torch.zeros(config.micro_batch, config.sequence_length, dtype=torch.int64) for _ in range(2))
        tokens.source.fill(inputs, targets, m * config.micro_batch)
        micro_batches.append((inputs, targets))
    total = run.trainer.step(micro_batches).item()
    return total, {row.name: twin.parameter_of(row).grad.double() for row in run.trainer.table}


@pytest.mark.parametrize("attention", ["plain", "flash"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_twin_is_the_same_model(attention: str, padded: bool) -> None:
    """handgrad's float32 loss and gradients lie at most twice as far from the twin's float64 ones as its float32 ones."""
    switches = dataclasses.replace(EAGER, attention=attention, padded=padded)
    exact_loss, exact = gradients_of_twin(SMALL, switches, torch.float64)
    twin_loss, twin = gradients_of_twin(SMALL, switches, torch.float32)
    run = HandgradRun(SMALL.config(), tokens_of(SMALL))
    run.stepper.begin(0)
    loss_error = abs(run.state.sum_of_losses.item() / SMALL.config().tokens_per_step - exact_loss)
    assert loss_error <= 2 * abs(twin_loss - exact_loss) + 1e-6 * exact_loss
    for row in run.state.design.parameters:
        found, stored = row.stored(run.state.gradients).double(), slice(row.stored_rows)
        norm = exact[row.name].norm()
        assert norm > 0, row.name
        twin_error = (twin[row.name] - exact[row.name]).norm()
        assert (found - exact[row.name][stored]).norm() <= 2 * twin_error + 1e-6 * norm, row.name


def test_the_twin_compiled_by_region_is_the_twin() -> None:
    """Only the order of sums may differ, so float32's rounding."""
    regional = dataclasses.replace(EAGER, compiled=True, regional=True)
    (eager_loss, eager), (loss, gradients) = (
        gradients_of_twin(SMALL, switches, torch.float32) for switches in (EAGER, regional)
    )
    exact_loss, exact = gradients_of_twin(SMALL, EAGER, torch.float64)
    assert abs(loss - exact_loss) <= 2 * abs(eager_loss - exact_loss) + 1e-6 * exact_loss
    for name, right in exact.items():
        limit = 2 * (eager[name] - right).norm() + 1e-6 * right.norm()
        assert (gradients[name] - right).norm() <= limit, name


def test_ligers_head_is_the_twins() -> None:
    """Without padded columns, which Liger's softmax includes."""
    pytest.importorskip("liger_kernel", reason="Liger is optional")
    plain = dataclasses.replace(EAGER, padded=False)
    (loss, gradients), (exact_loss, exact) = (
        gradients_of_twin(SMALL, dataclasses.replace(plain, head=head), torch.float32) for head in ("liger", "whole")
    )
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    for name, right in exact.items():
        assert (gradients[name] - right).norm() <= 1e-5 * right.norm(), name


def test_the_twins_padding_is_never_trained() -> None:
    run = TwinRun(SMALL.config(), tokens_of(SMALL), EAGER)
    assert run.trainer.twin.wte.weight.shape[0] == 384
    run.turn(lambda launched: launched < 3)
    weight = run.trainer.twin.wte.weight.detach()
    assert (weight[301:] == 0).all() and (weight[:301] != 0).any(1).all()


def test_all_contenders_make_the_same_steps() -> None:
    """Eight steps in two turns, one launched ahead of the last result: the losses of plain steps, and of the twin."""
    settings = dataclasses.replace(SMALL, learning_rate=1e-2, schedule="linear", warmup_steps=2, steps=8)
    config, tokens = settings.config(), tokens_of(settings)
    run, plain = HandgradRun(config, tokens), HandgradRun(config, tokens)
    losses = run.turn(lambda launched: launched < 5) + run.turn(lambda launched: launched < 3)
    assert losses == [plain.stepper.step(step).loss for step in range(8)]
    twin = TwinRun(config, tokens, EAGER, same_weights=True)
    theirs = twin.turn(lambda launched: launched < 5) + twin.turn(lambda launched: launched < 3)
    assert theirs == pytest.approx(losses, abs=2e-5)
    assert losses[-1] < losses[0] - 0.05, "they learn that some tokens are frequent"


@pytest.mark.parametrize(("bf16_stream", "model"), [(False, SMALL.model), (True, SMALL.model), (True, "m4")])
def test_the_torchao_twin_is_the_twin_in_fp8(bf16_stream: bool, model: str) -> None:
    """torchao computes its block products, with fp8's error; weights, their names and their decay stay."""
    pytest.importorskip("torchao", reason="torchao is optional")
    from torchao.float8.float8_linear import Float8Linear

    config, tokens = (
        dataclasses.replace(SMALL, learning_rate=1e-3 if model == "m4" else 1e-2, model=model).config(),
        tokens_of(SMALL),
    )
    plain = dataclasses.replace(EAGER, autocast=bf16_stream, bf16_stream=bf16_stream)
    exact = TwinRun(config, tokens, plain, same_weights=True)
    run = TwinRun(config, tokens, dataclasses.replace(plain, float8="all"), same_weights=True)
    converted = {name for name, part in run.trainer.twin.named_modules() if isinstance(part, Float8Linear)}
    layers = range(config.num_layers)
    assert converted == {f"blocks.{i}.{name}" for i in layers for name in ("qkv", "proj", "fc", "fcproj")}
    for row in run.trainer.table:
        parameter = run.trainer.twin.parameter_of(row)
        assert parameter.dtype == torch.float32 and torch.equal(parameter, exact.trainer.twin.parameter_of(row)), row.name
    groups, theirs = ([len(g["params"]) for g in r.trainer.optimizer.param_groups] for r in (run, exact))
    assert groups == theirs
    losses, plain_losses = (r.turn(lambda launched: launched < 8) for r in (run, exact))
    assert losses != plain_losses and losses == pytest.approx(plain_losses, abs=0.03)
    assert losses[-1] < losses[0] - 0.05
    filtered = TwinRun(config, tokens, dataclasses.replace(plain, float8="filtered"))
    assert not any(isinstance(part, Float8Linear) for part in filtered.trainer.twin.modules()), "all are small here"


def test_the_torchao_twins_refuse_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    monkeypatch.setattr(gpu_step, "measure", lambda *_: pytest.fail("nobody may start"))
    with pytest.raises(UsageError, match=r"^the torchao twins need torchao, .*: pip install 'torchao>=0.18'$"):
        gpu_step.compare(SMALL, "handgrad,twin-cudnn+torchao", seconds=1, turn_seconds=1, out="")
    pipe = io.StringIO()
    contend(lambda: gpu_step.make_run("twin-cudnn+stream+torchao", SMALL), CPU, [], pipe)
    assert "pip install" in json.loads(pipe.getvalue())["failed"]
    odd = dataclasses.replace(SMALL, sequence_length=12)
    with pytest.raises(UsageError, match=r"micro_batch x sequence_length to be a multiple of 16, found 24"):
        gpu_step.make_run("twin-cudnn+torchao", odd)


def test_made_up_tokens_are_a_function_of_the_sample() -> None:
    source = ZipfTokens(301, seed=3)
    whole, halves = torch.zeros(2, 4, 8, dtype=torch.int64), torch.zeros(2, 4, 8, dtype=torch.int64)
    source.fill(whole[0], whole[1], 10)
    for first in (2, 0):
        ZipfTokens(301, seed=3).fill(halves[0, first : first + 2], halves[1, first : first + 2], 10 + first)
    assert torch.equal(whole, halves)
    assert torch.equal(whole[0, :, 1:], whole[1, :, :-1]), "a target is the next token"
    assert torch.equal(whole[0, 1:, 0], whole[1, :-1, -1]), "a sample begins where the one before it ends"
    counts = torch.bincount(torch.as_tensor(source.pool)).sort(descending=True).values
    assert len(counts) == 301 and 1.5 < counts[0] / counts[2] < 2.1, "1 / 2.7 against 1 / 4.7 would be 1.74"


def test_a_twins_name_says_its_switches() -> None:
    assert switches_of("twin-flash") == Switches(attention="flash")
    found = switches_of("twin-cudnn+stream+liger+autotuned+torchao-rowwise")
    chosen = {"bf16_stream": True, "head": "liger", "mode": "max-autotune-no-cudagraphs", "float8": "rowwise"}
    assert found == Switches(attention="cudnn", **chosen)
    names = [switches_of(f"twin-cudnn+{option}") for option in OPTIONS]
    assert len({*names, Switches()}) == len(OPTIONS) + 1, "each option changes something, and another thing"
    assert [switches_of(name) for name in ("handgrad", "twin", "twin-x", "twin-flash+none")] == [None] * 4
