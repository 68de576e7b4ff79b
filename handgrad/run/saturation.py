"""The quantised tensors of an fp8 run's steps: recorded, and named where they saturate."""

from typing import Any

from handgrad.config import RunConfig
from handgrad.fp8.monitor import Finding, LeftFp8, findings, saturation_line, summary
from handgrad.run.log import RunLog
from handgrad.training.design import Design
from handgrad.training.step import StepResult


def record_fp8(design: Design, scaling: Any, result: StepResult, completed: int, log: RunLog) -> tuple[Finding, ...]:
    """The quantised tensors of a step, recorded where it counted their numbers. `scaling`: None without fp8."""
    if scaling is None:
        return ()
    counted = design.fp8.counts(completed - 1)
    micro_steps = design.batch.micro_steps(completed - 1) * design.batch.lanes
    found = findings(scaling, result.reports[0], micro_steps, counted=counted)
    if counted:
        log.record("fp8", step=completed, tensors=summary(found))
    return found


def handle_saturation(found: tuple[Finding, ...], config: RunConfig, completed: int, left: LeftFp8, log: RunLog) -> None:
    """Names the tensors that saturate; their GEMMs leave fp8 where that is the policy, one step later: that step may be
    under way already."""
    for finding in found:
        if finding.saturated_steps == config.fp8_saturation_steps:
            log.event(completed, saturation_line(finding, completed, config.fp8_on_saturation))
            if config.fp8_on_saturation == "bf16":
                left.leave(finding.part, completed + 1)
