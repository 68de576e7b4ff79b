"""Policy gradients on a model's own answers: REINFORCE with a group's mean as its baseline, or PPO's clipped objective.

The model gives G answers to a prompt, with rewards r. The advantage of every token of an answer is A = r - mean(r), without
the division by the deviation or by the answer's length, which favours easy prompts and long wrong answers (Dr. GRPO, Liu
et al. 2025, https://arxiv.org/abs/2503.20783). With p the probability of a token now and p' the one when it was sampled,

    L = -sum over tokens of min(rho A, clip(rho, 1 - c, 1 + c) A),   rho = p / p'      (Schulman et al. 2017,
    dL/d(-log p) = rho A, or 0 where the clip holds                                     https://arxiv.org/abs/1707.06347)

So the gradient is the classifier's with a weight for each token. In the first step after sampling rho is 1, exactly:
sampler and trainer compute the same bits, and the program reports their largest difference, which must be 0. Groups whose
answers all earn the same have no gradient, and known losses: a micro-batch of such groups alone has no pass. Further steps
on the same rollouts (`updates` above 1) need the weights after a forward, and pass the head twice.

With a teacher the loss of these tokens is the divergence from it (`joins.distill`), and the rewards are only measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND
from handgrad.models.passes import Stage, head_losses
from handgrad.training.feed import ADVANTAGES, SAMPLED
from handgrad.training.state import TrainingState
from handgrad.training.step import Program, plain_program

WEIGHTS, DIFFERENCE, OWN_LOSSES = "token_weights", "sampler_difference", "own_losses"


@dataclass(frozen=True)
class Policy:
    """The settings of the loss and of its rollouts."""

    group: int  # answers to a prompt
    answer_tokens: int  # of the longest answer
    updates: int  # steps on the same rollouts
    clip_ratio: float
    at_once: int  # answers that are decoded together

    def first_step(self, step: int) -> int:
        """The step that made the rollouts of 0-based `step`."""
        return step - step % self.updates


def buffers(samples: int, length: int, dtype: torch.dtype, *, taught: bool) -> list[Buffer]:
    """The rows that rollouts add to a plan. `taught`: by a teacher."""
    wide, tokens = accumulation_dtype(dtype), samples * length
    names = (SAMPLED, OWN_LOSSES) if taught else (SAMPLED, ADVANTAGES, WEIGHTS)
    return [*(Buffer(name, (tokens,), wide, KIND) for name in names), Buffer(DIFFERENCE, (1,), wide, "gradients")]


def weigh(weights: Tensor, losses: Tensor, advantages: Tensor, sampled: Tensor, scale: Tensor, clip_ratio: float) -> None:
    """weights (N) = dL/d(-log p) * scale from the losses -log p (N) now and at sampling; `scale` (1): of fp16."""
    ratio = torch.exp(sampled - losses)
    clipped = torch.where(advantages > 0, ratio > 1 + clip_ratio, ratio < 1 - clip_ratio)
    weights.copy_((ratio * advantages).masked_fill(clipped, 0) * scale)


def with_weights(program: Program, state: TrainingState, model_ops: Any, weigh: Callable[[], None]) -> Program:
    """The program with `weigh` between forward and backward, for a loss that gives each token a weight."""
    design = state.design
    ahead = len([*design.model.forward(model_ops, state.weights, state.activations, design.shape)])
    weighed = Stage(program.micro_step[ahead].bucket, weigh)  # the first to read the head's weight
    return replace(program, micro_step=[*program.micro_step[:ahead], weighed, *program.micro_step[ahead:]])


def program(state: TrainingState, ops: Any, model_ops: Any, about: Policy, rollouts: Any) -> Program:
    """The plain program, of a loss without a teacher with a weight for each token. `rollouts` has `before_step(step)`,
    called before a step's first micro-batch, and `has_gradient(first_sample)` of a micro-batch."""
    if state.design.teacher is not None:
        return on_rollouts(plain_program(state, ops, model_ops), state, state.views[OWN_LOSSES], rollouts.before_step)
    act, w, shape, scale = state.activations, state.weights, state.design.shape, state.loss_scale[:1]
    weights, advantages, sampled = (state.views[name] for name in (WEIGHTS, ADVANTAGES, SAMPLED))
    plain = plain_program(state, ops, model_ops, (weights, act.losses))

    def weigh_first() -> None:
        torch.mul(advantages, scale, out=weights)

    def weigh_further() -> None:
        head_losses(model_ops, w, act, shape)
        weigh(weights, act.losses, advantages, sampled, scale, about.clip_ratio)

    weighed = with_weights(plain, state, model_ops, weigh_first if about.updates == 1 else weigh_further)
    if about.updates == 1:
        alone: list[Callable[[], object]] = [partial(act.losses.copy_, sampled), plain.micro_step[-1].run]
        weighed = replace(weighed, has_gradient=rollouts.has_gradient, losses_alone=alone)
    return on_rollouts(weighed, state, act.losses, rollouts.before_step)


def on_rollouts(program: Program, state: TrainingState, losses: Tensor, make_rollouts: Callable[[int], None]) -> Program:
    """The program on rows of rollouts, which reports how far its `losses` -log p (N) are from those at sampling."""
    difference, sampled = state.views[DIFFERENCE], state.views[SAMPLED]

    def compare() -> None:
        torch.maximum(difference, (losses - sampled).abs().amax(0, keepdim=True), out=difference)

    def begin(step: int) -> None:
        difference.zero_()
        make_rollouts(step)

    return program.adding(micro_step=[Stage("", compare)], before_step=[begin], reports={DIFFERENCE: difference})
