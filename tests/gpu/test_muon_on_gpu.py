"""Muon on a CUDA GPU: kernels as exact as the reference, the same bits every time, nothing allocated."""

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.ops.reference.muon import polar
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig
from tests.gpu.models import ZipfTokens
from tests.gpu.runs import check_allocations, leave_the_same_bits
from tests.kernels import muon_checks as checks
from tests.kernels.memory_checks import Draw, check, check_repeats, kernels

SHAPES = [(768, 768), (3072, 768), (768, 3072), (2304, 768), (1600, 6400), (136, 40), (24, 8)]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


def check_all(case: checks.Case) -> None:
    check(case)
    check_repeats(case)


@pytest.mark.parametrize("shape", SHAPES)
def test_momentum(draw: Draw, shape: tuple[int, int]) -> None:
    check_all(checks.momentum(draw, *shape, 150))


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_polar(draw: Draw, shape: tuple[int, int]) -> None:
    check_all(checks.polar(draw, 3, *shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_update(draw: Draw, shape: tuple[int, int]) -> None:
    check_all(checks.update(draw, *shape))


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072), (136, 40)])
def test_a_matrix_has_the_same_bits_in_any_batch(shape: tuple[int, int]) -> None:
    checks.check_batches(Draw(torch.bfloat16, "cuda"), 12, *shape)


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072)])
def test_polar_is_as_good_as_on_the_cpu(shape: tuple[int, int]) -> None:
    """In bf16: its distance from the result in float64 is at most twice the CPU's."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, found = polar(matrix.double()), matrix.cuda()[None]
    kernels.muon_polar(found, scratch=checks.poisoned(sum(checks.polar_bytes(1, *shape, 2)), found.device))
    assert (found[0].cpu().double() - exact).norm() <= 2 * (polar(matrix).double() - exact).norm()


def test_a_step_that_is_skipped_moves_nothing() -> None:
    checks.check_no_update(Draw(torch.bfloat16, "cuda"))


def test_the_whole_update() -> None:
    """The directions of both are rounded to bf16 at every step. A random square matrix has singular values near 0, whose
    directions rounding moves far."""
    checks.check_optimizer(Draw(torch.bfloat16, "cuda"), [(768, 3072), (3072, 768), (768, 768), (768, 3072)], floor=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_and_a_resumed_one(config: RunConfig, precision: str) -> None:
    """The same bits; the third stops after 8 of 12 steps and goes on from its checkpoint."""
    config = dataclasses.replace(config, device="cuda", backend="kernels", precision=precision, optimizer="muon")
    leave_the_same_bits(config)


def small_model() -> RunConfig:
    sizes = presets.model("d12") | {"num_layers": 2}
    return RunConfig(**sizes, micro_batch=4, tokens_per_step=8192, precision="bf16", optimizer="muon", warmup_steps=5)


def test_nothing_is_allocated_after_the_first_steps() -> None:
    check_allocations(small_model())


def test_the_same_bits_with_and_without_graphs() -> None:
    states = []
    for graphs in (True, False):
        design = resolve(small_model(), 50257, device=torch.device("cuda"), ops=kernels)
        training = assemble(design, ZipfTokens(), graphs=graphs)
        results = [training.stepper.step(step) for step in range(6)]
        assert results[-1].loss < results[0].loss - 0.5
        states.append([training.state.master, *training.state.optimizer.values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
