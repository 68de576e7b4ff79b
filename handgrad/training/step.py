"""One optimizer step: micro-batches, their gradients, the norm, the verdict on it, AdamW."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from handgrad.config import RunConfig
from handgrad.data.batches import Batches, host_buffers
from handgrad.model import transformer
from handgrad.model.parameters import decay_runs
from handgrad.training.outliers import Outliers
from handgrad.training.schedule import learning_rate
from handgrad.training.state import TrainingState


@dataclass(frozen=True)
class StepResult:
    """What one step was. `skipped` says why no update was made, or is None."""

    loss: float  # mean over the step's tokens, nats
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    loss_z: float | None
    norm_z: float | None
    skipped: str | None


class BatchFeed:
    """Micro-batches into the model's buffers; through pinned host memory where the model lives on a GPU."""

    def __init__(self, batches: Batches, tokens: Tensor, targets: Tensor):
        self.batches = batches
        self.device_buffers = (tokens, targets)
        self.host_buffers = host_buffers(tokens, targets)

    def fill(self, first_sample: int) -> None:
        """Samples `first_sample`... as the next micro-batch."""
        self.batches.fill(self.host_buffers[0], self.host_buffers[1], first_sample)
        if self.host_buffers[0] is not self.device_buffers[0]:
            for device_buffer, host_buffer in zip(self.device_buffers, self.host_buffers, strict=True):
                device_buffer.copy_(host_buffer)


def train_step(
    config: RunConfig, state: TrainingState, feed: BatchFeed, losses: Outliers, norms: Outliers, step: int
) -> StepResult:
    """Runs 0-based `step`. Its samples are `step * samples_per_step` onwards, whatever happened in earlier steps."""
    loss_sum = accumulate_gradients(config, state, feed, step)
    loss = loss_sum / config.tokens_per_step
    norm = gradient_norm(state)
    loss_z, norm_z = losses.z_score(loss), norms.z_score(norm)
    skipped = verdict(config, loss, norm, loss_z, norm_z)
    rate = learning_rate(config, step)
    if skipped is None:
        losses.add(loss)
        norms.add(norm)
        update(config, state, step, rate, norm)
    return StepResult(loss, norm, rate, loss_z, norm_z, skipped)


def accumulate_gradients(config: RunConfig, state: TrainingState, feed: BatchFeed, step: int) -> float:
    """Fills `state.gradients` with the gradient of the step's mean loss; returns the sum of its tokens' losses."""
    state.gradients.zero_()
    first = 0 if config.overfit_one_batch else step * config.samples_per_step
    loss_sum = 0.0
    for micro_step in range(config.micro_steps):
        feed.fill(first + micro_step * config.micro_batch)
        transformer.loss_and_gradients(
            state.ops,
            state.weights,
            state.weight_gradients,
            state.activations,
            vocab_size=state.shape.vocab_size,
            scale=1.0 / config.tokens_per_step,
            recompute=config.recompute,
        )
        loss_sum += state.activations.losses.cpu().double().sum().item()
    return loss_sum


def gradient_norm(state: TrainingState) -> float:
    """The norm over all gradients: squares by blocks of fixed size in float32, the blocks' sums in float64."""
    state.ops.squared_norms(state.norm_partials, state.gradients)
    return math.sqrt(state.norm_partials.cpu().double().sum().item())


def verdict(config: RunConfig, loss: float, norm: float, loss_z: float | None, norm_z: float | None) -> str | None:
    """Why this step's update must not be made, or None."""
    if not math.isfinite(loss):
        return f"loss is {loss}"
    if not math.isfinite(norm):
        return f"gradient norm is {norm}"
    for name, z, limit in (("loss", loss_z, config.skip_loss_z), ("norm", norm_z, config.skip_norm_z)):
        if limit and z is not None and z > limit:
            return f"{name} z-score {z:.1f} > {limit:g}"
    return None


def update(config: RunConfig, state: TrainingState, step: int, rate: float, norm: float) -> None:
    """AdamW on the flat buffers, one call per run of equal decay, then the weights that the model reads."""
    clip = config.clip_norm
    gradient_scale = clip / norm if clip and norm > clip else 1.0
    for run, decays in decay_runs(state.table):
        state.ops.adamw_update(
            state.master[run],
            state.first_moments[run],
            state.second_moments[run],
            state.gradients[run],
            step=step + 1,
            learning_rate=rate,
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay if decays else 0.0,
            gradient_scale=gradient_scale,
        )
    state.publish_master()


def non_finite_tensors(state: TrainingState) -> list[str]:
    """Names of the parameters whose gradient holds a NaN or an infinity, for the message about a skipped step."""
    return [row.name for row in state.table if not torch.isfinite(row.view(state.gradients)).all()]
