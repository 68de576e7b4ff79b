"""Less memory on a GPU: recompute level 3, the optimizer's state in host memory, moments of bf16."""

import dataclasses

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.cli import main
from handgrad.ops import cuda as kernels
from handgrad.run.assemble import assemble
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig
from handgrad.training.step import StepResult
from tests.gpu.models import ZipfTokens
from tests.gpu.runs import check_allocations, leave_the_same_bits
from tests.gpu.test_kernels_on_gpu import GPU
from tests.kernels import memory_checks as checks
from tests.test_runs import elsewhere, same_bits

ROUNDED = {"moments": "bf16"}
WITHOUT_MASTERS = {"precision": "bf16", "master_weights": False}
OFFLOAD = {"offload": True}  # 53 million parameters, in 16 pieces or so


def config_of(**settings: object) -> RunConfig:
    sizes = presets.model("d12") | {"num_layers": 2}
    settings = {"micro_batch": 4, "tokens_per_step": 8192, "precision": "bf16", "steps": 50, "warmup_steps": 5, **settings}
    return RunConfig(**sizes, **settings)


def state_after(steps: int, *, graphs: bool = True, **settings: object) -> tuple[list[Tensor], list[StepResult]]:
    """Weights, masters, moments; the results of steps on Zipf-like tokens."""
    training = assemble(resolve(config_of(**settings), 50257, device=GPU, ops=kernels), ZipfTokens(), graphs=graphs)
    results = [training.stepper.step(step) for step in range(steps)]
    training.await_weights()
    state = training.state
    return [flat.cpu() for flat in (state.parameters, state.master, *state.optimizer.values())], results


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("rounded", [{}, ROUNDED, {"master_weights": False}], ids=str)
def test_the_same_bits_wherever_the_state_lies(precision: str, rounded: dict) -> None:
    if "master_weights" in rounded and precision == "fp32":
        pytest.skip("fp32 weights are their own masters")
    kept, results = state_after(5, precision=precision, **rounded)
    for graphs, more in ((False, {}), (True, {"recompute": 3}), (False, {"recompute": 3})):
        moved, found = state_after(5, graphs=graphs, precision=precision, **rounded, **OFFLOAD, **more)
        assert found == results and all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True)), (graphs, more)
    assert results[-1].loss < results[0].loss


def test_many_steps_without_waiting_for_their_results() -> None:
    """A race of a copy with an update would show in some step."""
    kept, results = state_after(30)
    moved, found = state_after(30, **OFFLOAD)
    assert found == results and all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True))


@pytest.mark.parametrize("settings", [OFFLOAD, ROUNDED, {**OFFLOAD, **ROUNDED, "recompute": 3}], ids=str)
def test_two_runs_a_resumed_one_and_their_audit(config: RunConfig, settings: dict, capsys) -> None:
    audited = {"channels": 256, "num_heads": 4, "audit_every": 1, "save_every": 4, "keep_checkpoints": 0}
    config = dataclasses.replace(config, device="cuda", precision="bf16", **audited, **settings)
    leave_the_same_bits(config)
    assert main(["verify", config.out]) == 0
    assert "12 links and 3 checkpoints equal" in capsys.readouterr().out


@pytest.mark.parametrize("state", [{"precision": "bf16"}, {"precision": "fp32"}, WITHOUT_MASTERS], ids=str)
def test_a_run_with_offload_has_the_bits_of_one_without(config: RunConfig, state: dict) -> None:
    """Also where the weights of a checkpoint lie on the GPU and its moments on the host."""
    kept = dataclasses.replace(config, device="cuda", offload=False, **state)
    moved = elsewhere(kept, "moved", offload=True, recompute=3)
    for run in (kept, moved):
        train(run)
    same_bits(kept.out, moved.out, config.steps)


@pytest.mark.parametrize("settings", [{"recompute": 3}, OFFLOAD, {**ROUNDED, "recompute": 2}], ids=str)
def test_steps_allocate_the_plan_alone(settings: dict) -> None:
    check_allocations(config_of(**settings))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw_rounds_as_the_reference_does(moments: torch.dtype) -> None:
    checks.check_stochastic_rounding("cuda", moments=moments)
