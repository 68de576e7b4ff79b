"""Checks of Muon's kernels, for the interpreter on a CPU and for a GPU alike, as in `memory_checks`."""

import math
from types import ModuleType

import torch

from handgrad import ops as contract
from handgrad.memory.rows import ZEROS, ParameterRow
from handgrad.ops import cuda as kernels, reference
from handgrad.ops.cuda.muon import polar_bytes
from handgrad.optimizers import Owned
from handgrad.optimizers.adamw import AdamW
from handgrad.optimizers.muon import MATRIX, Muon
from tests.kernels.memory_checks import Case, Draw, Tensors, copy, nan

MUON = Muon(AdamW(0.9, 0.95, 1e-8, 0.1, 1), momentum=0.95, beta2=0.9, weight_decay=0.5, rate=2.0)


def numbers(step: float, device: torch.device, *, scale: float = 0.25, verdict: int = contract.UPDATE) -> Tensors:
    controls = torch.tensor([step, 0.01, math.inf, math.inf], dtype=torch.float64, device=device)
    results = torch.tensor([1.0, 1.0, scale, verdict, 1.0], dtype=torch.float64, device=device)
    return {"controls": controls, "results": results}


def poisoned(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8, device=device)


def momentum(draw: Draw, R: int, C: int, step: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        update = nan(t["m"], R, C, dtype=t["m"].dtype if t["m"].dtype == torch.float64 else draw.dtype)
        ops.muon_momentum(update, t["m"], t["gradient"], **numbers(step, update.device), momentum=0.95)
        return {"update": update, "m": t["m"]}

    return {name: draw.normal(R, C, dtype=torch.float32) for name in ("m", "gradient")}, run


def polar(draw: Draw, n: int, R: int, C: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        x = t["x"]
        ops.muon_polar(x, scratch=poisoned(sum(polar_bytes(n, R, C, x.element_size())), x.device))
        return {"polar": x}

    return {"x": draw.normal(n, R, C) * 1e-3}, run


def update(draw: Draw, R: int, C: int) -> Case:
    """A factor some of whose rows are much smaller than the rest."""
    factor = draw.normal(R, C) * C**-0.5 * torch.linspace(0.01, 1, R, device=draw.device, dtype=draw.dtype)[:, None]
    inputs = {"weight": draw.normal(R, C, dtype=torch.float32), "polar": factor}
    inputs["moments"] = draw.normal(R, dtype=torch.float32).square() / C

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        w = t["weight"]
        published = w if draw.dtype == torch.float32 or w.dtype == torch.float64 else nan(w, R, C, dtype=draw.dtype)
        scratch = poisoned(kernels.muon_scratch_bytes(matrices=1, rows=R, columns=C), w.device)
        settings = {"rate": 2.0, "beta2": 0.9, "weight_decay": 0.5, "scratch": scratch}
        ops.muon_update(published, w, t["moments"], t["polar"], **numbers(3, w.device), **settings)
        return {"weight": w, "moments": t["moments"], "published": published}

    return inputs, run


def check_batches(draw: Draw, n: int, R: int, C: int) -> None:
    """A matrix has the same bits alone, first and last in a batch."""
    inputs, run = polar(draw, n, R, C)
    together = run(kernels, copy(inputs))["polar"]
    for place in {0, n // 2, n - 1}:
        alone = polar(draw, 1, R, C)[1](kernels, {"x": inputs["x"][place : place + 1].clone()})["polar"]
        assert torch.equal(alone[0], together[place])
    pair = polar(draw, 2, R, C)[1](kernels, {"x": inputs["x"][[n - 1, 0]]})["polar"]
    assert torch.equal(pair, together[[n - 1, 0]])


def check_no_update(draw: Draw) -> None:
    """A forbidden update changes nothing, whatever the gradient holds."""
    parts = [part_of(draw, 40, 24)]
    parts[0].gradient.fill_(math.nan)
    before = [tensor.clone() for tensor in tensors_of(parts)]
    update_all(kernels, parts, verdict=contract.NORM_NOT_FINITE)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(parts), strict=True))


def part_of(draw: Draw, R: int, C: int) -> Owned:
    weight, gradient, m = (draw.normal(R, C, dtype=torch.float32) for _ in range(3))
    return Owned(MATRIX, weight.to(draw.dtype), weight, gradient, {"m": m, "v": torch.zeros_like(m[:, 0])}, 0)


def tensors_of(parts: list[Owned]) -> list[torch.Tensor]:
    return [t for part in parts for t in (part.published, part.weight, *part.state.values())]


def update_all(ops: ModuleType, parts: list[Owned], verdict: int = contract.UPDATE) -> None:
    """One step of the optimizer over matrices of several shapes, with scratch of the size that it states (twice of that in
    float32, which only the interpreter takes)."""
    device, dtype = parts[0].weight.device, parts[0].weight.dtype
    rows = [tuple(part.weight.shape) for part in parts]
    table = tuple(ParameterRow("a", shape, shape[0], ZEROS, 0.0, "matrix", "all") for shape in rows)
    size = MUON.scratch_bytes(kernels, table, dtype, device) * (1 if device.type == "cuda" else 2)
    MUON.update(ops, parts, **numbers(100, device, verdict=verdict), scratch=poisoned(size, device))


def copy_of(part: Owned, device: str | torch.device, dtype: torch.dtype | None = None) -> Owned:
    """The same numbers, in `dtype` if one is given."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype or tensor.dtype, copy=True)

    state = {name: copied(tensor) for name, tensor in part.state.items()}
    return Owned(MATRIX, copied(part.published), copied(part.weight), copied(part.gradient), state, 0)


def check_optimizer(draw: Draw, shapes: list[tuple[int, int]], floor: float) -> None:
    """The whole update, against float64's: no further off than twice the reference's own, and `floor`."""
    found = [part_of(draw, *shape) for shape in shapes]
    own = [copy_of(part, part.weight.device) for part in found]
    exact = [copy_of(part, "cpu", torch.float64) for part in found]
    before = [part.weight.clone() for part in exact]
    for ops, parts in ((kernels, found), (reference, own), (reference, exact)):
        update_all(ops, parts)
    for a, b, e, w in zip(found, own, exact, before, strict=True):
        assert torch.equal(a.published, a.weight.to(draw.dtype))
        moved = (e.weight - w).norm()
        assert moved > 0
        tensors = [(a.weight, b.weight, e.weight, moved)]
        tensors += [(a.state[n], b.state[n], e.state[n], e.state[n].norm()) for n in ("m", "v")]
        for mine, theirs, right, size in tensors:
            error, allowed = ((tensor.cpu().double() - right).norm() for tensor in (mine, theirs))
            assert error <= 2 * allowed + floor * size, f"{error:.3g}, the reference {allowed:.3g}"
