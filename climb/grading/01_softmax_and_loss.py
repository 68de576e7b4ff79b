"""Step 1: softmax, cross-entropy, and its gradient."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    for N, V, size in ((5, 11, 3.0), (7, 3, 1.0), (4, 13, 1000.0)):
        targets = (torch.arange(N) * 5 + 2) % V
        logits = draw(N, V) * size - size * torch.arange(N)[:, None]
        yield Case({"N": N, "V": V}, logits=logits, targets=targets, scale=1.0 / (N + 3))


def answers(c):
    losses, dlogits = torch.empty(len(c.targets), dtype=torch.float64), c.logits.clone()
    scale = torch.tensor([c.scale], dtype=torch.float64)
    reference.classifier_forward_backward(losses, dlogits, c.targets, scale, vocab_size=c.logits.shape[1])
    c.p = torch.softmax(c.logits, 1)
    c.onehot = torch.zeros_like(c.p).scatter_(1, c.targets[:, None], 1.0)
    c.losses = losses
    return {"loss": losses, "dlogits": dlogits}


def overflowed(c):
    return torch.exp(c.logits) / torch.exp(c.logits).sum(1, keepdim=True)


def at_targets(p, c):
    return p.gather(1, c.targets[:, None]).squeeze(1)


TERMS = {"dlogits": lambda c: {"the softmax p": c.scale * c.p, "the one-hot of the target": -c.scale * c.onehot}}
MISTAKES = (
    ("loss", "overflows: take the largest logit of a row away before the exponential", lambda c: -at_targets(overflowed(c), c).log()),
    ("loss", "takes the largest logit of all rows away: a row far below it underflows",
     lambda c: -at_targets(c.logits - c.logits.max() - (c.logits - c.logits.max()).exp().sum(1, keepdim=True).log(), c)),
    ("loss", "overflows: take the largest logit of a row away inside log(sum(exp(...))) too",
     lambda c: c.logits.exp().sum(1).log() - at_targets(c.logits, c)),
    ("loss", "takes the logarithm of a probability that is 0 in floating point: subtract logs instead of dividing",
     lambda c: -at_targets(torch.softmax(c.logits, 1), c).log()),
    ("loss", "is the logarithm of the softmax's denominator alone: the target's logit is missing", lambda c: c.logits.logsumexp(1)),
    ("loss", "is in bits: nats take the natural logarithm", lambda c: c.losses / torch.log(torch.tensor(2.0))),
    ("loss", "is 1 - p of the target; the loss is -log p", lambda c: 1 - at_targets(c.p, c)),
    ("loss", "is the mean in every place: a loss belongs to each token", lambda c: c.losses.mean().expand_as(c.losses)),
    ("loss", "is multiplied by scale: only the gradient is", lambda c: c.losses * c.scale),
    ("loss", "takes the largest logit away from the sum but does not add it back", lambda c: c.losses - c.logits.amax(1)),
    ("dlogits", "overflows: the softmax needs the largest logit of a row taken away first", lambda c: c.scale * (overflowed(c) - c.onehot)),
    ("dlogits", "is not multiplied by scale", lambda c: c.p - c.onehot),
    ("dlogits", "is divided by N: multiply by scale, which knows all tokens of the step", lambda c: (c.p - c.onehot) / len(c.p)),
    ("dlogits", "multiplies p by scale, but not the one-hot", lambda c: c.scale * c.p - c.onehot),
    ("dlogits", "is the gradient of the mean as well: scale has done that already", lambda c: c.scale * (c.p - c.onehot) / len(c.p)),
    ("dlogits", "is one-hot minus p: the loss falls where the target's logit grows", lambda c: c.scale * (c.onehot - c.p)),
    ("dlogits", "multiplies by the slope of a squared error, p (1 - p); cross-entropy cancels it",
     lambda c: c.scale * (c.p - c.onehot) * c.p * (1 - c.p)),
    ("dlogits", "takes the softmax down the tokens (axis 0) instead of over the words (axis 1)",
     lambda c: c.scale * (torch.softmax(c.logits, 0) - c.onehot)),
    ("dlogits", "uses the logits where the probabilities p belong", lambda c: c.scale * (c.logits - c.onehot)),
    ("dlogits", "is weighted by each token's loss: d log p / dp has been applied twice", lambda c: c.scale * (c.p - c.onehot) * c.losses[:, None]),
)  # fmt: skip


def operations(f):
    def both(losses, logits_to_dlogits_inout, targets, scale, *, vocab_size, **_):
        found, dlogits = f(logits_to_dlogits_inout[:, :vocab_size].clone(), targets, scale.item())
        losses.copy_(found)
        logits_to_dlogits_inout.zero_()[:, :vocab_size] = dlogits

    return {"classifier_forward_backward": both}
