"""Runs in fp8 evaluated afterwards on a GPU: in fp8 to the bit as they validated."""

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that computes in fp8", allow_module_level=True)

from handgrad.cli import main
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_fp8_evaluation import BASE, KINDS, evaluated, losses_found  # noqa: F401 - a fixture
from tests.test_runs import records


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parts left"])
def test_the_loss_is_the_runs_own(kind: str, config: RunConfig, losses_found: list[float]) -> None:  # noqa: F811
    run = dataclasses.replace(config, **BASE | KINDS[kind], device="cuda", backend="kernels")
    train(run)
    assert main(evaluated(run, "--precision", "fp8", "--device", "cuda")) == 0
    assert losses_found == [records(run.out, ("validation",))[-1]["loss"]]
