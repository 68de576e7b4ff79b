"""Mean loss over held-out samples."""

from types import ModuleType

from torch import Tensor

from handgrad.data.batches import Batches
from handgrad.model import transformer
from handgrad.model.activations import Activations
from handgrad.model.parameters import ModelTensors


def mean_loss(
    ops: ModuleType,
    weights: ModelTensors,
    act: Activations,
    batches: Batches,
    *,
    samples: int,
    vocab_size: int,
    host_buffers: tuple[Tensor, Tensor],
) -> float:
    """Mean cross-entropy in nats over the tokens of the first `samples` samples (at most one epoch).

    The model's micro-batch is used as it is; the last one may be padded with samples that are not counted. `host_buffers`
    are the CPU tensors (B, T) that samples are read into: the model's own on a CPU.
    """
    samples = min(samples, batches.samples_per_epoch)
    batch = act.tokens.shape[0]
    total = 0.0
    for first in range(0, samples, batch):
        batches.fill(*host_buffers, first)
        if host_buffers[0] is not act.tokens:
            act.tokens.copy_(host_buffers[0])
            act.targets.copy_(host_buffers[1])
        transformer.loss(ops, weights, act, vocab_size=vocab_size)
        counted = min(batch, samples - first)
        total += act.losses.view(act.tokens.shape)[:counted].cpu().double().sum().item()
    return total / (samples * act.tokens.shape[1])
