"""The quantised tensors of an fp8 run's steps: recorded, and named where they saturate."""

from typing import Any

from handgrad.config import RunConfig
from handgrad.fp8.monitor import findings, saturation_line, summary
from handgrad.run.log import RunLog
from handgrad.training.design import Design
from handgrad.training.step import StepResult


def record_fp8(design: Design, scaling: Any, config: RunConfig, result: StepResult, completed: int, log: RunLog) -> None:
    """Records the quantised tensors of a step that counted their numbers, and names the saturated ones. `scaling`: None
    without fp8."""
    if scaling is None:
        return
    counted = design.fp8.counts(completed - 1)
    micro_steps = design.batch.micro_steps(completed - 1) * design.batch.lanes
    tensors = findings(scaling, result.reports[0], micro_steps, counted=counted)
    if counted:
        log.record("fp8", step=completed, tensors=summary(tensors))
    for finding in tensors:
        if finding.saturated_steps == config.fp8_saturation_steps:
            log.event(completed, saturation_line(finding, completed, config.fp8_on_saturation))
