"""A divergence from a teacher on a CUDA GPU, real sizes and odd ones: as exact as the reference, the same bits every time.
Runs with graphs leave the same bits and allocate nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.machine import devices
from handgrad.run.open import train
from tests.conftest import small_run
from tests.gpu.runs import check_allocations, leave_the_same_bits
from tests.kernels.document_checks import check_taught_rows
from tests.kernels.memory_checks import Draw, case, check_all
from tests.test_runs import records

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=DTYPES, ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    devices.set_arithmetic(torch.device("cuda"), "fp32")  # of the reference
    return Draw(request.param, "cuda")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize(
    ("N", "V", "Vp"), [(5, 2, 128), (33, 57, 128), (64, 4096, 4096), (1024, 50257, 50304), (257, 151936, 151936)]
)
def test_divergences(draw: Draw, N: int, V: int, Vp: int, softcap: float, reverse: bool) -> None:
    more = {"softcap": softcap, "teacher_softcap": 2 * softcap, "reverse": reverse}
    check_all(case(draw, "distill_forward_backward", N=N, V=V, Vp=Vp, **more))


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_without_a_target_and_rows_of_their_own_scale(draw: Draw, reverse: bool) -> None:
    check_taught_rows(draw, 12, 50257, 50304, reverse=reverse)


SIZES = {"channels": 128, "num_heads": 2, "device": "cuda", "sample_tokens": 0, "eval_every": 0}


@pytest.fixture(scope="module")
def teacher(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = replace(small_run(shards, tmp_path_factory.mktemp("teacher") / "run"), **SIZES, architecture="modern")
    train(replace(config, steps=40, learning_rate=1e-2, precision="bf16"))
    return config.out


@pytest.mark.parametrize("more", [{}, {"teacher_divergence": "reverse"}, {"lora": "rank=8,alpha=16"}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("architecture", ["gpt2", "modern", "llama"])
def test_runs(architecture: str, precision: str, more: dict[str, Any], teacher: str, shards: Path, tmp_path: Path) -> None:
    config = replace(small_run(shards, tmp_path / "run"), **SIZES, architecture=architecture, precision=precision)
    if "lora" in more and architecture == "modern":
        pytest.skip("the modern network has no adapters")
    if "lora" in more:
        train(replace(config, out=str(tmp_path / "base"), steps=2))
        more = more | {"init_from": str(tmp_path / "base")}
    config = replace(config, objective="distill", teacher=teacher, learning_rate=1e-2, warmup_steps=0, **more)
    leave_the_same_bits(config)
    losses = [step["loss"] for step in records(config.out, ("step",))]
    assert losses[-1] < losses[0] and min(losses) >= 0


def test_steps_allocate_the_plan_alone(teacher: str, shards: Path, tmp_path: Path) -> None:
    config = replace(small_run(shards, tmp_path / "run"), **SIZES, precision="bf16")
    check_allocations(replace(config, teacher=teacher, objective="distill", sequence_length=32))
