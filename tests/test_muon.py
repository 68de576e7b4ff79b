"""Muon: its polynomials bring singular values to 1, its update is the formula's, it moves nothing that it should not."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from handgrad.errors import ConfigError, UsageError
from handgrad.machine.gpus import GPUS
from handgrad.memory.arena import ALWAYS
from handgrad.memory.rows import ZEROS, ParameterRow
from handgrad.ops import (
    CONTROL_LEARNING_RATE,
    CONTROL_STEP,
    CONTROLS,
    DIGEST_SUMS,
    LOSS_OUTLIER,
    RESULT_SCALE,
    RESULT_VERDICT,
    RESULTS,
    cpu,
    reference,
)
from handgrad.ops.reference.muon import POLAR_EXPRESS, polar
from handgrad.optimizers import Owned
from handgrad.optimizers.adamw import AdamW
from handgrad.optimizers.muon import MATRIX, Muon
from handgrad.run.checkpointing import checkpoint_rows
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.settings.presets import preset
from handgrad.tools.forecast import resolve_for
from tests.test_training import assembly_of

SHAPES = [(6, 6), (6, 24), (24, 6), (1, 5)]
ADAMW = AdamW(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, seed=1)
MUON = Muon(ADAMW, momentum=0.95, beta2=0.9, weight_decay=0.5, rate=2.0)


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def with_singular_values(values: Tensor, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix of float64 with these singular values, and its polar factor."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64, generator=generator)).Q for n in shape)
    return u * values @ v.T, u @ v.T


@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (256, 64)])
def test_singular_values_come_to_one(shape: tuple[int, int]) -> None:
    """Those that are no smaller than a thousandth of the norm come to within 15 %, their vectors stay; smaller ones are
    lifted by the product of the first coefficients at most."""
    n = min(shape)
    values = torch.logspace(0, -2, n, dtype=torch.float64)
    matrix, factor = with_singular_values(values, shape)
    found = polar(matrix)
    lifted = (found * factor).sum() / n  # the mean singular value, along the right vectors
    assert torch.linalg.svdvals(found).min() > 0.85 and torch.linalg.svdvals(found).max() < 1.15
    assert lifted == pytest.approx(torch.linalg.svdvals(found).mean().item(), rel=1e-9)
    tiny, _ = with_singular_values(torch.cat([torch.ones(n - 1), torch.tensor([1e-9])]).double(), shape)
    assert torch.linalg.svdvals(polar(tiny)).min() < 1e-9 * math.prod(a for a, _, _ in POLAR_EXPRESS)


def test_the_largest_singular_value_stays_below_one() -> None:
    """A matrix of rank 1 has its norm as its singular value: divided by 1.02 times that, it meets the polynomials at
    1 / 1.02."""
    matrix = torch.outer(torch.linspace(1, 2, 5), torch.linspace(-1, 3, 7)).double()
    value = 1 / 1.02
    for a, b, c in POLAR_EXPRESS:
        value = a * value + b * value**3 + c * value**5
    assert torch.linalg.svdvals(polar(matrix)).max().item() == pytest.approx(value, rel=1e-4)


def test_a_matrix_of_zeros_stays() -> None:
    assert not polar(torch.zeros(3, 5)).any()


@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (256, 64), (1, 5)])
def test_in_float32_a_cpu_is_as_exact(shape: tuple[int, int]) -> None:
    """No further from float64 than twice the reference in float32, over many matrices (the error of a single row is one
    number, small by chance), with the same bits in any batch; zeros stay."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(16, *shape, generator=generator)
    found, alone, zeros = matrices.clone(), matrices[1:2].clone(), torch.zeros(1, *shape)
    for batch in (found, alone, zeros):
        cpu.muon_polar(batch)
    exact, reference = (torch.stack(list(map(polar, made))) for made in (matrices.double(), matrices))
    error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (found, reference))
    assert error <= 2 * allowed + 1e-6, f"{error:.3g}, the reference {allowed:.3g}"
    assert torch.equal(found[1], alone[0]) and not zeros.any()


def part_of(shape: tuple[int, int], seed: int = 0) -> Owned:
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, m = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    v = torch.rand(shape[0], dtype=torch.float64, generator=generator)
    return Owned(MATRIX, torch.zeros(shape), weight, gradient, {"m": m, "v": v}, 0)


def numbers(step: int, learning_rate: float, scale: float = 1.0, verdict: int = 0) -> tuple[Tensor, Tensor]:
    controls, results = torch.zeros(CONTROLS, dtype=torch.float64), torch.zeros(RESULTS, dtype=torch.float64)
    controls[CONTROL_STEP], controls[CONTROL_LEARNING_RATE] = step, learning_rate
    results[RESULT_SCALE], results[RESULT_VERDICT] = scale, verdict
    return controls, results


def update(ops: ModuleType, part: Owned, controls: Tensor, results: Tensor) -> None:
    size = MUON.scratch_bytes(ops, (row_of(part.weight.shape),), torch.float64, part.weight.device)
    MUON.update(ops, [part], controls, results, torch.full((size,), 255, dtype=torch.uint8))


def row_of(shape: tuple[int, ...]) -> ParameterRow:
    return ParameterRow("a", shape, shape[0], ZEROS, 0.0, "matrix", "all")


@pytest.mark.parametrize(("shape", "step", "b"), [*((shape, 150, 0.9) for shape in SHAPES), ((6, 24), 900, 0.95)])
def test_the_update_is_the_formulas(ops: ModuleType, shape: tuple[int, int], step: int, b: float) -> None:
    """Number by number, in loops over rows and columns, with the clip factor, and momentum on its way from 0.85 to 0.95."""
    part, (rows, columns) = part_of(shape), shape
    before = {
        "w": part.weight.clone(),
        "g": 0.25 * part.gradient,
        "m": part.state["m"].clone(),
        "v": part.state["v"].clone(),
    }
    update(ops, part, *numbers(step=step, learning_rate=0.01, scale=0.25))
    momentum = b * before["m"] + (1 - b) * before["g"]
    o = polar((1 - b) * before["g"] + b * momentum)
    n = torch.empty(shape, dtype=torch.float64)
    for r in range(rows):
        v = 0.9 * before["v"][r] + 0.1 * sum(float(x) ** 2 for x in o[r]) / columns
        assert part.state["v"][r] == pytest.approx(float(v), rel=1e-12)
        n[r] = o[r] / math.sqrt(v)
    n *= 0.2 * math.sqrt(rows * columns / float((n * n).sum()))
    torch.testing.assert_close(part.state["m"], momentum)
    for r in range(rows):
        for c in range(columns):
            w = before["w"][r, c]
            decay = 0.5 * w if n[r, c] * w > 0 else 0.0
            assert part.weight[r, c] == pytest.approx(float(w - 0.02 * (n[r, c] + decay)), rel=1e-6, abs=1e-9)
    assert torch.equal(part.published, part.weight.float())


def test_a_step_that_is_skipped_moves_nothing(ops: ModuleType) -> None:
    part = part_of((4, 8))
    part.gradient.fill_(math.nan)
    before = part.weight.clone(), part.state["m"].clone(), part.state["v"].clone()
    update(ops, part, *numbers(step=3, learning_rate=0.01, verdict=LOSS_OUTLIER))
    assert all(torch.equal(a, b) for a, b in zip(before, (part.weight, *part.state.values()), strict=True))


def test_the_launch_that_compiles_moves_nothing(ops: ModuleType) -> None:
    part = part_of((4, 8))
    zeros = torch.zeros(4, 8).double()
    part = replace(part, gradient=zeros, state={"m": zeros.clone(), "v": zeros[:, 0].clone()})
    before = part.weight.clone()
    update(ops, part, *numbers(step=0, learning_rate=0.0, scale=0.0))
    assert torch.equal(part.weight, before) and not part.state["m"].any() and not part.state["v"].any()


def test_who_gets_which() -> None:
    """Muon the blocks' matrices, whole; AdamW embeddings, positions and vectors."""
    config = check(
        RunConfig(num_layers=1, num_heads=1, channels=16, optimizer="muon", device="cpu", matrix_learning_rate=6e-3)
    )
    design = resolve(config, 257)
    assert isinstance(design.optimizer, Muon) and design.optimizer.rate == pytest.approx(10)
    whole = [row.name for row in design.parameters if row.whole]
    assert whole == [f"blocks.0.{name}_weight" for name in ("qkv", "proj", "fc", "fcproj")]
    kinds = {row.name: design.optimizer.kind(row) for row in design.parameters if not row.whole}
    assert kinds["wte"] == kinds["wpe"] == (True, 1.0) and kinds["lnf_weight"] == (False, 1.0)
    plain = resolve(replace(config, optimizer="adamw"), 257).plan.size_bytes
    spared = 4 * sum(row.elements - 128 for row in design.parameters if row.whole)  # up to 128 rows, aligned
    assert design.plan.size_bytes == plain | {"moments": plain["moments"] - spared}


def test_a_matrix_has_a_second_moment_for_each_row() -> None:
    """In memory and in checkpoints, where a full-sized one took 0.3 GiB more for the preset m12."""
    config = replace(preset("m12"), precision="bf16")
    muon, adamw = (resolve_for(GPUS["h200"], replace(config, optimizer=name), 50257) for name in ("muon", "adamw"))
    rows, full = ({row.name: row for row in checkpoint_rows(design)} for design in (muon, adamw))
    matrices = [row for row in muon.parameters if muon.optimizer.whole(row)]
    assert rows.keys() == full.keys() and len(matrices) == 4 * 12
    smaller = {f"v.{row.name}": row.shape[:1] for row in matrices}
    assert {name: row.shape for name, row in rows.items()} == {name: row.shape for name, row in full.items()} | smaller
    spared = 4 * sum(row.elements - row.shape[0] for row in matrices)
    assert sum(row.size_bytes for row in full.values()) - sum(row.size_bytes for row in rows.values()) == spared
    assert adamw.plan.size_bytes["moments"] - muon.plan.size_bytes["moments"] == spared > 0.3 * 2**30


def test_the_digest_of_its_state_is_the_one_of_a_full_sized_state(config: RunConfig) -> None:
    """So that a chain which an earlier version began, whose state had each parameter's size, still holds."""
    training = assembly_of(replace(config, optimizer="muon", num_layers=3, lanes=4, micro_batch=1, audit_every=1))
    training.stepper.step(0)
    state, design = training.state, training.design
    full, sums = torch.zeros_like(state.master), torch.zeros(DIGEST_SUMS, dtype=torch.int64)
    for row, parameter in zip(design.optimizer_state["v"].rows, design.parameters, strict=True):
        parameter.view(full).view(-1)[: row.elements] = row.view(state.optimizer["v"]).view(-1)
    assert training.digest is not None and full.any() and full.numel() > state.optimizer["v"].numel()
    digest = training.digest.current(1)["v"]
    design.ops.digest(sums, full, state.controls, first=0)
    assert digest == "".join(f"{int(total) % 2**64:016x}" for total in sums)


def test_its_scratch_lies_among_dead_activations() -> None:
    """GPT-2 124M on an H200: twelve matrices of a shape at a time, their other half, and products of the shorter sides. At
    one sample of a few tokens there is not enough room, and the plan grows."""
    config = replace(preset("d12"), precision="bf16")
    with_muon = resolve_for(GPUS["h200"], replace(config, optimizer="muon"), 50257).plan
    scratch = next(buffer for buffer in with_muon.buffers if buffer.name == "optimizer_scratch")
    assert scratch.size_bytes == 2 * 12 * (2 * 768 * 3072 + 2 * 768**2) + 2048  # and partial sums, aligned
    plain = resolve_for(GPUS["h200"], config, 50257).plan.size_bytes
    assert with_muon.size_bytes == plain | {"moments": with_muon.size_bytes["moments"]}
    others = [buffer for buffer in with_muon.buffers if buffer.kind == scratch.kind and buffer.lifetimes != ALWAYS]
    assert all(not buffer.overlaps(scratch) for buffer in others if buffer is not scratch)
    short = replace(config, sequence_length=64, tokens_per_step=64, micro_batch=1)
    small, grown = (
        resolve_for(GPUS["h200"], replace(short, optimizer=name), 50257).plan.size_bytes["activations"]
        for name in ("adamw", "muon")
    )
    assert small < scratch.size_bytes < grown


def test_a_matrix_has_the_same_bits_in_any_batch(ops: ModuleType) -> None:
    """Beside two others of its shape as alone."""
    alone, together = ([part_of((6, 24), seed) for seed in range(3)] for _ in range(2))
    controls, results = numbers(step=7, learning_rate=0.01)
    for part in alone:
        update(ops, part, controls, results)
    MUON.update(ops, together, controls, results, torch.zeros(4096, dtype=torch.uint8))
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.weight, b.weight) and torch.equal(a.state["v"], b.state["v"])


def test_what_it_does_not_do_is_refused() -> None:
    with pytest.raises(UsageError, match="muon needs float32 master weights"):
        check(RunConfig(optimizer="muon", precision="bf16", master_weights=False))
    with pytest.raises(UsageError, match="muon needs float32 moments, found moments bf16"):
        check(RunConfig(optimizer="muon", moments="bf16"))
    with pytest.raises(UsageError, match=r"kept relative to learning_rate, expected one above 0, found 0; try .*0\.0006"):
        check(RunConfig(optimizer="muon", learning_rate=0.0, matrix_learning_rate=0.02))
    with pytest.raises(UsageError, match="matrix_learning_rate is muon's"):
        check(RunConfig(matrix_learning_rate=0.02))


def test_at_a_learning_rate_of_0_the_state_moves_alone(config: RunConfig) -> None:
    training = assembly_of(check(replace(config, optimizer="muon", learning_rate=0.0)))
    before = training.state.master.clone()
    training.stepper.step(0)
    assert torch.equal(training.state.master, before)
    assert all(flat.any() for flat in training.state.optimizer.values())


def test_its_state_is_nobody_elses(config: RunConfig, tmp_path: Path) -> None:
    """A run keeps its optimizer and its sizes, whatever may change, and a refusal leaves its configuration as it was."""
    begun = replace(config, optimizer="muon", steps=2, save_every=0, eval_every=0)
    train(begun)
    written = (Path(config.out) / "config.toml").read_text()
    for changes, words in (
        ({"optimizer": "adamw"}, "optimizer muon, found adamw; start a new run from its weights"),
        ({"channels": 64}, "channels 32, found 64; choose another --out"),
    ):
        with pytest.raises(ConfigError, match=f"holds the state of {words}"):
            train(replace(begun, **changes), allow_changes=True)
    assert (Path(config.out) / "config.toml").read_text() == written
    train(begun)  # as it was
