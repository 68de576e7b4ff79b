"""Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290): a loss on pairs of answers.

With s the summed log-probability of an answer, r the same under the model that the training started from, and a pair's
margin m = beta ((s_chosen - r_chosen) - (s_rejected - r_rejected)),

    L = -(1 - eps) log sigmoid(m) - eps log sigmoid(-m)        eps: label smoothing (https://ericmitchell.ai/cdpo.pdf)
    w = -dL/dm = (1 - eps) sigmoid(-m) - eps sigmoid(m)
    dL/d(-log p(t)) = beta w for the tokens t of the chosen answer, -beta w for the rejected one's

So the gradient of a pair is the classifier's, with a weight for each token. The weights are known after a forward of both
answers, which go through the head twice.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.policy import with_weights
from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND
from handgrad.models.passes import head_losses
from handgrad.training.feed import REFERENCES
from handgrad.training.state import TrainingState
from handgrad.training.step import Program, plain_program

WEIGHTS, LOSSES = "token_weights", "pair_losses"


@dataclass(frozen=True)
class Preference:
    """The numbers of the loss."""

    beta: float
    smoothing: float


def buffers(samples: int, length: int, dtype: torch.dtype) -> list[Buffer]:
    """The rows that pairs add to a plan."""
    wide = accumulation_dtype(dtype)
    rows = {REFERENCES: (samples, torch.float32), WEIGHTS: (samples * length, wide), LOSSES: (samples // 2, wide)}
    return [Buffer(name, (count,), kind, KIND) for name, (count, kind) in rows.items()]


def margins_of(sums: Tensor, references: Tensor, beta: float) -> Tensor:
    """The margins (pairs) of sums and references (2 pairs), chosen and rejected by turns."""
    gained = sums - references.to(sums.dtype)
    return beta * (gained[0::2] - gained[1::2])


def losses_of(margins: Tensor, smoothing: float) -> Tensor:
    """L of each pair in nats."""
    zero = torch.zeros_like(margins)  # log(1 + exp(x)) = log(exp(0) + exp(x))
    return (1 - smoothing) * torch.logaddexp(zero, -margins) + smoothing * torch.logaddexp(zero, margins)


def weigh(
    weights: Tensor, pair_losses: Tensor, losses: Tensor, references: Tensor, scale: Tensor, about: Preference
) -> None:
    """pair_losses (B / 2) and weights (N) from the tokens' losses (N); `scale` (1) of fp16's gradients."""
    margins = margins_of(-losses.view(len(references), -1).sum(1), references, about.beta)
    pair_losses.copy_(losses_of(margins, about.smoothing))
    slopes = (1 - about.smoothing) * torch.sigmoid(-margins) - about.smoothing * torch.sigmoid(margins)
    both = torch.stack((slopes, -slopes), 1).view(-1, 1) * (about.beta * scale)
    weights.view(len(references), -1).copy_(both.expand(-1, weights.numel() // len(references)))


def program(state: TrainingState, ops: Any, model_ops: Any, about: Preference) -> Program:
    """The plain program, with the pairs' loss and its weights between forward and backward."""
    act, w, shape, scale = state.activations, state.weights, state.design.shape, state.loss_scale[:1]
    weights, losses, references = (state.views[name] for name in (WEIGHTS, LOSSES, REFERENCES))
    plain, batch = plain_program(state, ops, model_ops, (weights, losses)), state.design.batch

    def score() -> None:
        head_losses(model_ops, w, act, shape)
        weigh(weights, losses, act.losses, references, scale, about)

    scored = with_weights(plain, state, model_ops, score)
    return replace(scored, trained_tokens=lambda step: batch.samples(step) // 2)  # the loss is a mean over pairs
