"""Distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531): a frozen model, the teacher, reads every micro-batch
before the student does, whose loss is the divergence of the two. The rows may be the student's own answers (on-policy
distillation: GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649).

The teacher's forward ends where the student's begins. So its activations share memory with the student's, all but the
output of its last norm. From that the loss head makes the teacher's logits, chunk by chunk, beside the student's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from handgrad.joins import documents
from handgrad.joins.policy import OWN_LOSSES
from handgrad.memory.activations import ActivationRow
from handgrad.memory.arena import ALWAYS, Buffer
from handgrad.memory.rows import KIND, Table, flat_elements
from handgrad.models import architecture, forward_rows, named_activations, named_weights, parameter_table
from handgrad.models.passes import Stage, head_logits
from handgrad.networks import ModelShape
from handgrad.ops.compose import Overlay
from handgrad.training.feed import READ, SORTED
from handgrad.training.state import TrainingState
from handgrad.training.step import Program

PREFIX = "teacher."
WEIGHTS = PREFIX + "parameters"
SHARED = {"losses", *READ, *SORTED}  # with the student


@dataclass(frozen=True)
class Teacher:
    """The teacher of a design."""

    shape: ModelShape  # with the student's context
    reverse: bool  # the loss is KL(student || teacher), not KL(teacher || student)

    @property
    def parameters(self) -> Table:
        return parameter_table(self.shape)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a forward."""
        return self.shape.flops_per_token / 3


def buffers(teacher: Teacher, rows: Iterable[ActivationRow], dtype: torch.dtype, ops: Any) -> list[Buffer]:
    """The rows that a teacher adds to a plan, but for inputs of documents. `rows`: the student's activations."""
    student = {row.name: row for row in rows}
    (batch, length), chunk, at_head = student["tokens"].shape, student["logits"].shape[0], student["logits"].ticks
    own = {row.name: row for row in forward_rows(teacher.shape, batch, length, dtype, ops, chunk=chunk)}
    after = own["logits"].ticks[-1][-1] + 1  # the tick after the teacher's last: 0, the student's first
    head = {"lnf": ((-1, at_head[0][0]),), "logits": at_head, "scratch": ((ALWAYS[0][0], -1), *at_head)}
    planned = [Buffer(WEIGHTS, (flat_elements(teacher.parameters),), dtype, "teacher")]
    for row in own.values():
        if row.name not in SHARED:
            lives = tuple((first - after, min(last - after, -1)) for first, last in row.ticks)
            planned.append(Buffer(PREFIX + row.name, row.shape, row.dtype, KIND, head.get(row.name, lives)))
    return planned


class WithTeacher(Overlay):
    """A student's operations `ops` with the divergence from its teacher instead of the cross-entropy."""

    def __init__(self, ops: Any, state: TrainingState):
        super().__init__(ops)
        views, design = state.views, state.design
        self.teacher, self.plain_ops = design.teacher, design.plain_ops
        own = {name.removeprefix(PREFIX): view for name, view in views.items() if name.startswith(PREFIX)}
        inputs = {name: views[name] for name in SHARED if name in views}
        self.weights = named_weights(self.teacher.shape, views[WEIGHTS], self.teacher.parameters)
        self.act = named_activations(self.teacher.shape, inputs | own)
        self.chunks: Iterator[tuple[slice, Tensor]] = iter(())  # the teacher's logits, as the loss head asks for them
        self.own_losses, self.scale = views.get(OWN_LOSSES), state.loss_scale[:1]
        plain = documents.operations(self.plain_ops, self.act)
        forward = architecture(self.teacher.shape).forward(plain, self.weights, self.act, self.teacher.shape)
        self.forward = [*(stage.run for stage in forward), self.begin_chunks]

    def launches(self, program: Program) -> Program:
        """The student's program after the teacher's forward."""
        return replace(program, micro_step=[*(Stage("", run) for run in self.forward), *program.micro_step])

    def begin_chunks(self) -> None:
        self.chunks = head_logits(self.plain_ops, self.weights, self.act)

    def classifier_forward_backward(
        self, losses: Tensor, logits: Tensor, targets: Tensor, scale: Tensor, **options: Any
    ) -> None:
        """Both models have chunks of equal length. On rollouts, also computes the student's own losses -log p."""
        rows, teacher_logits = next(self.chunks)
        if self.own_losses is not None:
            self.ops.classifier_forward(self.own_losses[rows], logits, targets, **options)
        options |= {"teacher_softcap": self.teacher.shape.softcap, "reverse": self.teacher.reverse}
        self.ops.distill_forward_backward(losses, logits, teacher_logits, targets, scale, **options)

    def classifier_forward(self, losses: Tensor, logits: Tensor, targets: Tensor, **options: Any) -> None:
        """The divergence alone; the logits are lost."""
        self.classifier_forward_backward(losses, logits, targets, self.scale, **options)
