"""The settings that make a run fit into less memory with the same bits: recompute levels, and offload of the optimizer's
state, by the time that they cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from handgrad.format import human_bytes
from handgrad.run.checks import can_offload
from handgrad.run.resolve import memory_bytes
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design

RECOMPUTE_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Candidate:
    """The run with a recompute level, with or without offload."""

    config: RunConfig
    memory_bytes: int  # of the device
    host_bytes: int
    moments_bytes: int  # wherever they lie
    seconds: float | None  # of a step; None: unknown

    @property
    def flags(self) -> str:
        return f"--recompute {self.config.recompute}" + " --offload true" * self.config.offload


def candidates(
    config: RunConfig,
    device: torch.device,
    ranks: int,
    design_of: Callable[[RunConfig], Design],
    seconds_of: Callable[[RunConfig, Design], float] | None,
) -> list[Candidate]:
    """All settings that the run can have, fastest first; where no time is known, in the order of the levels, then the same
    with offload."""
    found = []
    for offload in (False, True) if can_offload(config, device, ranks) else (False,):
        for level in RECOMPUTE_LEVELS:
            changed = replace(config, recompute=level, offload=offload)
            design = design_of(changed)
            moments = sum(buffer.size_bytes for buffer in design.buffers if buffer.kind == "moments")
            memory = sum(memory_bytes(design).values()), design.host_plan.total_bytes, moments
            found.append(Candidate(changed, *memory, seconds_of(changed, design) if seconds_of else None))
    return sorted(found, key=lambda candidate: candidate.seconds or 0.0)


def chosen_of(found: list[Candidate], config: RunConfig, available: int) -> Candidate | None:
    """The run as it was asked for, if it fits, or else the first that does."""
    asked = (c for c in found if (c.config.recompute, c.config.offload) == (config.recompute, config.offload))
    return first_fitting([*asked, *found], available)


def first_fitting(found: list[Candidate], available: int) -> Candidate | None:
    return next((candidate for candidate in found if candidate.memory_bytes <= available), None)


def fitting_lines(found: list[Candidate], available: int) -> Iterator[str]:
    """A line for each candidate, the flags of the first that fits, and what else would help."""
    config = found[0].config
    order = "fastest first" if found[0].seconds else "the cheapest first"
    yield f"same bits  within {human_bytes(available)} at micro-batch {config.micro_batch}, {order}"
    for candidate in found:
        fits = "fits" if candidate.memory_bytes <= available else "-"
        time = f"{candidate.seconds / found[0].seconds - 1:+8.1%}" if candidate.seconds and found[0].seconds else ""
        host = f", {human_bytes(candidate.host_bytes)} of the host" if candidate.host_bytes else ""
        yield f"  {candidate.flags:<30}{human_bytes(candidate.memory_bytes):>11}  {fits:<4} {time}{host}".rstrip()
    chosen = first_fitting(found, available)
    yield (
        f"take       {chosen.flags}"
        if chosen
        else "take       none of these; a smaller --micro-batch (other bits) or model"
    )
    if config.moments == "fp32" and config.optimizer == "adamw":
        half = found[0].moments_bytes // 2
        yield f"or         --moments bf16 takes {human_bytes(half)} less, where the moments lie, with other bits"
