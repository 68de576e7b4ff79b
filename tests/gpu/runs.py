"""A run, the same again, and one that goes on from a checkpoint; steps that allocate nothing."""

import gc
import shutil
from pathlib import Path

import torch

from handgrad.ops import cuda as kernels
from handgrad.run.assemble import assemble
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig
from tests.gpu.models import ZipfTokens
from tests.test_runs import elsewhere, same_bits


def leave_the_same_bits(config: RunConfig) -> None:
    """The last one from the checkpoint of step 8 of 12."""
    again = elsewhere(config, "again")
    train(config)
    train(again)
    same_bits(config.out, again.out, config.steps)
    shutil.rmtree(Path(again.out) / "checkpoints" / "step_00000012")
    train(again)
    same_bits(config.out, again.out, config.steps)


def check_allocations(config: RunConfig) -> None:
    """Steps allocate the plan and nothing else, and from the third on nothing at all."""
    gc.collect()  # of earlier tests: what is freed later would be missing below
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training = assemble(resolve(config, 50257, device=torch.device("cuda"), ops=kernels), ZipfTokens())
    for row in training.design.frozen:  # zeros would leave fp8 without a scale, for which every step would look anew
        training.load_frozen_weight(row, 0.02 * torch.randn(row.stored_rows, *row.shape[1:]))
    for step in range(2):  # the second records the graphs
        training.stepper.step(step)
    torch.cuda.synchronize()
    counters = [torch.cuda.memory_stats()[name] for name in ("allocation.all.allocated", "num_device_alloc")]
    for step in range(2, 6):
        training.stepper.step(step)
    assert counters == [torch.cuda.memory_stats()[name] for name in ("allocation.all.allocated", "num_device_alloc")]
    taken = torch.cuda.max_memory_allocated() - before
    planned = training.design.plan.total_bytes
    assert abs(taken - planned) <= 0.03 * planned, (taken, planned)
