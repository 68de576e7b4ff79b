"""A step that is made again on a GPU: while the next one runs, from captured graphs, with the scales of fp8."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from handgrad.run import loop
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere
from tests.test_suspicion import FAULTY, events, flip, outlier, same_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CASES = [("reference", "fp32"), ("kernels", "bf16"), ("kernels", "fp8")]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def on_gpu(request: pytest.FixtureRequest, config: RunConfig) -> RunConfig:
    """Two layers of 128 channels; no step but the last pauses the loop."""
    backend, precision = request.param
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    size = {"channels": 128, "num_heads": 2, "sequence_length": 64, "tokens_per_step": 1024, "micro_batch": 4}
    quiet = {"save_every": 0, "eval_every": 0, "sample_tokens": 0}
    return dataclasses.replace(config, device="cuda", backend=backend, precision=precision, **size, **quiet)


def test_a_transient_fault_leaves_no_trace(on_gpu: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind it has begun, with unchanged weights: it begins again."""
    train(on_gpu)
    assert not events(on_gpu)
    struck = elsewhere(on_gpu, "struck")
    made = flip(monkeypatch, {0: 100})
    train(struck)
    assert (made.count(FAULTY), made.count(FAULTY + 1)) == (3, 2)
    (told,) = events(struck)
    assert told.startswith("step 7: loss ") and "the first was a fault of the hardware in the gradients of rank 0" in told
    same_state(on_gpu, struck)


def test_an_outlier_is_made_again(on_gpu: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is too large, not infinite; the detector's windows end alike."""
    config = dataclasses.replace(on_gpu, skip_norm_z=50.0)
    outlier(config, lambda: None)
    struck = elsewhere(config, "struck")
    outlier(struck, lambda: flip(monkeypatch, {0: 100}, value=1000.0))
    assert "the first was a fault of the hardware" in events(struck)[0]
    same_state(config, struck)


def skips(config: RunConfig, patch_loop: Callable[[pytest.MonkeyPatch], None]) -> None:
    """A run with the same fault in every attempt."""
    with pytest.MonkeyPatch.context() as patch:
        patch_loop(patch)
        flip(patch, dict.fromkeys(range(9), 100))
        train(config)


def take_first_results(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "checked_result", lambda training, ranks, step, result: (result, ""))


def test_a_lasting_fault_is_skipped_as_without_a_second_attempt(on_gpu: RunConfig) -> None:
    skips(on_gpu, take_first_results)
    struck = elsewhere(on_gpu, "struck")
    skips(struck, lambda patch: None)
    (told,) = events(struck)
    assert told.startswith("step 7 made no update: gradient norm is inf") and events(on_gpu) == [told]
    same_state(on_gpu, struck)


def test_good_steps_keep_only_what_they_need(on_gpu: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain step copies nothing; that of fp8 its scales."""
    kept = list[int]()
    original = TrainStep.begin

    def begin(training: TrainStep, step: int) -> None:
        kept.append(sum(tensor.nbytes for tensor in training.program.rolled_back))
        original(training, step)

    monkeypatch.setattr(TrainStep, "begin", begin)
    train(dataclasses.replace(on_gpu, steps=2, warmup_steps=0))
    assert all(0 < size < 1 << 20 if on_gpu.precision == "fp8" else size == 0 for size in kept)
