"""Step 12: the mean over a step's tokens, and the clip of its norm."""

import torch

from handgrad import ops
from handgrad.errors import UsageError
from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    """The first is clipped, the second is not, in the third one parameter alone has a long gradient."""
    for tokens, sizes, most in (((30, 2, 7), (1.0, 1.0), 0.5), ((4, 12), (0.01, 0.01), 0.5), ((9, 9, 1), (0.01, 5.0), 0.7)):
        gradients = [[draw(3, 4) * sizes[0], draw(5) * sizes[1]] for _ in tokens]
        yield Case({"M": len(tokens), "tokens": sum(tokens)}, gradients=gradients, tokens=list(tokens), most=most)


def flat(c):
    return [torch.cat([g.flatten() for g in each]) for each in c.gradients]


def answers(c):
    """By the reference's norm and verdict, from the gradients of sums."""
    each, total, double = flat(c), sum(c.tokens), torch.float64
    c.each, c.total = torch.stack(each), total
    c.n = torch.tensor(c.tokens, dtype=double)[:, None]
    mean = (c.each * c.n).sum(0) / total
    partials, controls, results = (
        torch.empty(3, dtype=double),
        torch.zeros(ops.CONTROLS, dtype=double),
        torch.zeros(ops.RESULTS, dtype=double),
    )
    reference.squared_norms(partials, mean, block_elements=7)
    controls[ops.CONTROL_LOSS_LIMIT], controls[ops.CONTROL_NORM_LIMIT], controls[ops.CONTROL_TOKENS] = (
        torch.inf,
        torch.inf,
        1,
    )
    scale, losses = torch.ones(3, dtype=double), torch.zeros(1, dtype=double)
    reference.verdict(
        results, scale, losses, partials, controls, gradient_tokens=1, clip_norm=c.most, dynamic_loss_scale=False
    )
    c.mean, c.norm = mean, results[ops.RESULT_NORM].clone()
    return {"norm": c.norm, "gradient": mean * results[ops.RESULT_SCALE]}


def call(function, c):
    found = function([[g.clone() for g in each] for each in c.gradients], list(c.tokens), c.most)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple)):
        raise UsageError("expected a list of gradients and their norm; is a return missing?")
    shapes = [tuple(g.shape) for g in found[0]]
    if shapes != [(3, 4), (5,)]:
        raise UsageError(f"expected gradients of the parameters' shapes, [(3, 4), (5,)], found {shapes}")
    norm = found[1] if isinstance(found[1], torch.Tensor) else torch.tensor(found[1], dtype=torch.float64)
    return [norm.double(), torch.cat([g.flatten() for g in found[0]])]


def clipped(g, most, norm=None):
    norm = g.norm() if norm is None else norm
    return g * most / norm if norm > most else g


def parts(g):
    return g[:12], g[12:]


def both(words, wrong):
    """A wrong mean, seen in the norm and in the gradient."""
    return (("norm", words, lambda c: wrong(c).norm()), ("gradient", words, lambda c: clipped(wrong(c), c.most)))


MISTAKES = (
    *both("belongs to a mean of means: a micro-batch counts by its tokens", lambda c: c.each.mean(0)),
    *both("belongs to a sum of the micro-batches' means: it is divided by nothing", lambda c: c.each.sum(0)),
    *both("belongs to the sum over all tokens: divide by their number", lambda c: (c.each * c.n).sum(0)),
    *both("belongs to the sum divided by the number of micro-batches, where the tokens belong", lambda c: (c.each * c.n).mean(0)),
    *both("belongs to the last micro-batch alone", lambda c: c.each[-1]),
    *both("belongs to the first micro-batch alone", lambda c: c.each[0]),
    *both("belongs to means divided by the tokens: multiply by them first", lambda c: (c.each / c.n).mean(0)),
    *both("belongs to each micro-batch clipped before the sum: clip once, at the end",
          lambda c: sum(clipped(g, c.most) * n for g, n in zip(c.each, c.n, strict=True)) / c.total),
    *both("is weighted by the tokens' shares twice", lambda c: (c.each * c.n**2).sum(0) / c.total**2),
    ("norm", "is squared: the root is missing", lambda c: c.norm**2),
    ("norm", "is the sum of the parameters' norms: their squares add", lambda c: sum(p.norm() for p in parts(c.mean))),
    ("norm", "is the largest of the parameters' norms: their squares add", lambda c: torch.stack([p.norm() for p in parts(c.mean)]).amax()),
    ("norm", "is the norm after the clip: report it before", lambda c: c.norm.clamp(max=c.most)),
    ("norm", "is the largest number, not the length", lambda c: c.mean.abs().amax()),
    ("norm", "is the sum of the sizes, not the length", lambda c: c.mean.abs().sum()),
    ("norm", "is a root mean square: the length takes the sum", lambda c: c.mean.square().mean().sqrt()),
    ("gradient", "is clipped for each parameter alone: all are shortened by one factor", lambda c: torch.cat([clipped(p, c.most) for p in parts(c.mean)])),
    ("gradient", "is clipped number by number: all are shortened by one factor", lambda c: c.mean.clamp(-c.most, c.most)),
    ("gradient", "is not clipped", lambda c: c.mean),
    ("gradient", "is stretched where it was short: the factor is at most 1", lambda c: c.mean * c.most / c.norm),
    ("gradient", "is divided by its norm, but not multiplied by `most`", lambda c: c.mean / c.norm if c.norm > c.most else c.mean),
    ("gradient", "is divided by the squared norm", lambda c: c.mean * c.most / c.norm**2 if c.norm > c.most else c.mean),
    ("gradient", "is clipped where it is short, and not where it is long", lambda c: c.mean * c.most / c.norm if c.norm < c.most else c.mean),
    ("gradient", "is clipped by the sum of the parameters' norms", lambda c: clipped(c.mean, c.most, sum(p.norm() for p in parts(c.mean)))),
)  # fmt: skip


def operations(f):
    def verdict(results, loss_scale_inout, sum_of_losses, norm_partials, controls, *, clip_norm, **settings):
        """The reference's, but with the reader's norm and clip: the norm of the blocks' norms is the gradient's."""
        tensors = results, loss_scale_inout, sum_of_losses, norm_partials, controls
        reference.verdict(*tensors, clip_norm=0.0, **settings)
        norms = norm_partials.double().sqrt() * results[ops.RESULT_SCALE].item()
        clipped, norm = f([[norms]], [1], clip_norm or torch.inf)
        results[ops.RESULT_NORM] = norm
        results[ops.RESULT_SCALE] *= (clipped[0].max() / norms.max()).item()

    return {"verdict": verdict}
