"""The loss, cross-entropy over the real vocabulary, and its gradient in place."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype

CLASSIFIER_BLOCK_ELEMENTS = 1 << 19  # elements of the softmax's float32 temporary: 2 MiB

# Classifier: loss = logsumexp(z) - z[target], over the V real words; padded columns do not count. z are the logits, or with
# a cap c the soft-capped logits z = c tanh(logits / c) (Bello et al. 2016, https://arxiv.org/abs/1611.09940).
# Backward: dlogits = (softmax(z) - onehot(target)) * scale, times 1 - (z / c)^2 with a cap; 0 in the padded columns.
# A target below 0 marks a token without a loss: its loss is 0, its row of dlogits is 0.
#
# Distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531): the loss is KL(q || p) = sum q log(q / p), with q the
# softmax of a teacher's logits, and its gradient p - q. In reverse (Gu et al. 2023, https://arxiv.org/abs/2306.08543):
# KL(p || q), and p (log(p / q) - KL(p || q)).

Block = tuple[slice, Tensor, Tensor, Tensor | None]
Blocks = Callable[[torch.dtype, Tensor, Tensor, int, float], Iterator[Block]]


def classifiers(capped_blocks: Blocks) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Returns (classifier_forward, classifier_forward_backward, distill_forward_backward), as in `ops.compose`. Capped
    logits come from `capped_blocks`, uncapped ones from `log_softmax_blocks`."""

    def classifier_forward(
        losses: Tensor,
        logits_inout: Tensor,
        targets: Tensor,
        *,
        vocab_size: int,
        softcap: float = 0.0,
        untrained: bool = False,
    ) -> None:
        """losses (N) from logits (N, Vp) and targets (N). Masks the padded columns of the logits with minus infinity.
        softcap: c, or 0 for none. untrained: targets may be below 0; without it none may be, and no kernel checks."""
        check_trained(targets, untrained)
        blocks_of = capped_blocks if softcap else log_softmax_blocks
        for rows, target, log_p, _ in blocks_of(losses.dtype, logits_inout, targets, vocab_size, softcap):
            losses[rows] = log_p.gather(1, target).squeeze(1).neg_()
        if untrained:
            clear_untrained(targets, losses)

    def classifier_forward_backward(
        losses: Tensor,
        logits_to_dlogits_inout: Tensor,
        targets: Tensor,
        scale: Tensor,
        *,
        vocab_size: int,
        softcap: float = 0.0,
        untrained: bool = False,
    ) -> None:
        """losses (N) from logits (N, Vp) and targets (N); overwrites the logits with scale * dlosses/dlogits, no element of
        which exceeds scale. scale (1), or (N) with a weight for each token, has the losses' dtype. untrained: as above."""
        check_trained(targets, untrained)
        blocks_of, scales = capped_blocks if softcap else log_softmax_blocks, scale.view(-1, 1).expand(len(targets), 1)
        for rows, target, log_p, slope in blocks_of(losses.dtype, logits_to_dlogits_inout, targets, vocab_size, softcap):
            losses[rows] = log_p.gather(1, target).squeeze(1).neg_()
            p = log_p.exp_()  # exactly 0 in the padded columns
            p.scatter_add_(1, target, torch.full_like(target, -1, dtype=p.dtype))
            torch.mul(p if slope is None else p.mul_(slope), scales[rows], out=logits_to_dlogits_inout[rows])
        if untrained:
            clear_untrained(targets, losses, logits_to_dlogits_inout)

    def distill_forward_backward(
        losses: Tensor,
        logits_to_dlogits_inout: Tensor,
        teacher_logits: Tensor,
        targets: Tensor,
        scale: Tensor,
        *,
        vocab_size: int,
        softcap: float = 0.0,
        teacher_softcap: float = 0.0,
        untrained: bool = False,
        reverse: bool = False,
    ) -> None:
        """`classifier_forward_backward` with losses KL(q || p) or, in `reverse`, KL(p || q) to q = softmax(teacher_logits
        (N, Vp)), which `teacher_softcap` caps. Of targets (N) only the signs count."""
        check_trained(targets, untrained)
        blocks_of, scales = capped_blocks if softcap else log_softmax_blocks, scale.view(-1, 1).expand(len(targets), 1)
        for rows, _, log_p, slope in blocks_of(losses.dtype, logits_to_dlogits_inout, targets, vocab_size, softcap):
            y = teacher_logits[rows, :vocab_size].to(losses.dtype)
            log_q = torch.log_softmax(torch.tanh(y / teacher_softcap) * teacher_softcap if teacher_softcap else y, 1)
            ratio = log_p[:, :vocab_size] - log_q
            p = log_p.exp_()  # exactly 0 in the padded columns
            words = p[:, :vocab_size]
            if reverse:
                losses[rows] = (words * ratio).sum(1)
                words.mul_(ratio.sub_(losses[rows].unsqueeze(1)))
            else:
                q = log_q.exp_()
                losses[rows] = (q * ratio).sum(1).neg_()
                words.sub_(q)
            torch.mul(p if slope is None else p.mul_(slope), scales[rows], out=logits_to_dlogits_inout[rows])
        if untrained:
            clear_untrained(targets, losses, logits_to_dlogits_inout)

    return classifier_forward, classifier_forward_backward, distill_forward_backward


def check_trained(targets: Tensor, untrained: bool) -> None:
    assert untrained or not (targets < 0).any(), "a target is below 0, where every token was said to be trained"


def clear_untrained(targets: Tensor, *tensors: Tensor) -> None:
    """Zeroes the rows whose target is below 0."""
    untrained = (targets < 0).nonzero().squeeze(1)
    for tensor in tensors:
        tensor.index_fill_(0, untrained, 0)


def log_softmax_blocks(
    dtype: torch.dtype, logits_inout: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Iterator[Block]:
    """(rows, targets (R, 1) clamped to 0 from below, log softmax (R, Vp), dz/dlogits (R, Vp) or None for 1) by blocks of
    rows, whose temporaries stay in cache: 9 ms instead of 21 for 256 rows of GPT-2's vocabulary on two cores. Masking
    instead of slicing keeps the rows contiguous."""
    N, Vp = logits_inout.shape
    logits_inout[:, vocab_size:] = -math.inf
    rows_per_block = max(1, CLASSIFIER_BLOCK_ELEMENTS // Vp)
    for row in range(0, N, rows_per_block):
        rows = slice(row, min(row + rows_per_block, N))
        z, slope = logits_inout[rows], None
        if softcap:
            tanh = torch.tanh(z[:, :vocab_size].to(dtype) / softcap)
            z, slope = (torch.full(z.shape, padded, dtype=dtype, device=z.device) for padded in (-math.inf, 0.0))
            torch.mul(tanh, softcap, out=z[:, :vocab_size])
            torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1, out=slope[:, :vocab_size])
        yield rows, targets[rows].clamp(min=0).unsqueeze(1), torch.log_softmax(z, 1, dtype=dtype), slope


classifier_forward, classifier_forward_backward, distill_forward_backward = classifiers(log_softmax_blocks)


def softcap_forward(logits_inout: Tensor, *, softcap: float) -> None:
    """logits_inout (N, Vp) = c tanh(logits / c), in place, for generation."""
    wide = logits_inout.to(accumulation_dtype(logits_inout.dtype))
    logits_inout.copy_(torch.tanh(wide / softcap) * softcap)
