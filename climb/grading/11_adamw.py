"""Step 11: AdamW."""

import torch

from handgrad import ops
from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    """The first step of a matrix, a later one of a vector, one of a matrix, with gradients near epsilon in both matrices."""
    for shape, step, size in (((3, 5), 1, 1e-6), ((7,), 4, 1.0), ((2, 3), 9, 1e-6)):
        m, v = draw(*shape) * size * (step > 1), (draw(*shape) * size) ** 2 * (step > 1)
        yield Case(
            {},
            w=draw(*shape),
            m=m,
            v=v,
            g=draw(*shape) * size,
            step=step,
            lr=0.02,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-7,
            decay=0.3,
        )


def answers(c):
    controls, results = torch.zeros(ops.CONTROLS, dtype=torch.float64), torch.zeros(ops.RESULTS, dtype=torch.float64)
    controls[ops.CONTROL_STEP], controls[ops.CONTROL_LEARNING_RATE], results[ops.RESULT_SCALE] = c.step, c.lr, 1.0
    w, m, v = (t.flatten().clone() for t in (c.w, c.m, c.v))
    settings = {"beta1": c.beta1, "beta2": c.beta2, "epsilon": c.epsilon, "weight_decay": c.decay * (c.w.ndim > 1)}
    reference.adamw_update(w, w, m, v, c.g.flatten().clone(), controls, results, **settings)
    c.new = m.view_as(c.m), v.view_as(c.v)
    return {"m": c.new[0], "v": c.new[1], "w": w.view_as(c.w)}


def call(function, c):
    """The moments come first: w is made of them."""
    found = function(*c.inputs)
    return (*found[1:], found[0]) if isinstance(found, tuple) else found


def update(c, *, m=None, v=None, g=None, step=None, decay=None, kept=None, divisor=None):
    """The new weights, where a mistake may choose otherwise."""
    g = c.g if g is None else g
    m = c.beta1 * c.m + (1 - c.beta1) * g if m is None else m
    v = c.beta2 * c.v + (1 - c.beta2) * g * g if v is None else v
    step = c.step if step is None else step
    mean, square = m / (1 - c.beta1**step), v / (1 - c.beta2**step)
    decay = c.decay * (c.w.ndim > 1) if decay is None else decay
    kept = 1 - c.lr * decay if kept is None else kept
    return kept * c.w - c.lr * mean / (divisor(square) if divisor else square.sqrt() + c.epsilon)


def swapped(c):
    """Moments with each other's beta."""
    return c.beta2 * c.m + (1 - c.beta2) * c.g, c.beta1 * c.v + (1 - c.beta1) * c.g**2


MISTAKES = (
    ("w", "decays vectors as well: biases and the weights of norms keep their size", lambda c: update(c, decay=c.decay)),
    ("w", "does not decay", lambda c: update(c, decay=0.0)),
    ("w", "decays by `decay` alone: it is multiplied by lr", lambda c: update(c, kept=1 - c.decay * (c.w.ndim > 1))),
    ("w", "adds the decay to the gradient, as Adam with L2 has it: AdamW keeps it apart", lambda c: update(c, g=c.g + c.decay * (c.w.ndim > 1) * c.w, decay=0.0)),
    ("w", "decays vectors, and not matrices: it is the other way round", lambda c: update(c, decay=c.decay * (c.w.ndim == 1))),
    ("w", "grows by the decay: weights shrink", lambda c: update(c, decay=-c.decay * (c.w.ndim > 1))),
    ("w", "lacks both bias corrections: the first steps are too small or too large", lambda c: update(c, step=10**9)),
    ("w", "lacks the bias correction of m", lambda c: update(c, m=c.new[0] * (1 - c.beta1**c.step))),
    ("w", "lacks the bias correction of v", lambda c: update(c, v=c.new[1] * (1 - c.beta2**c.step))),
    ("w", "counts steps from 0 in the bias corrections: the first is 1", lambda c: update(c, step=c.step - 1)),
    ("w", "counts one step too many in the bias corrections", lambda c: update(c, step=c.step + 1)),
    ("w", "adds epsilon under the root", lambda c: update(c, divisor=lambda square: (square + c.epsilon).sqrt())),
    ("w", "adds epsilon squared under the root", lambda c: update(c, divisor=lambda square: (square + c.epsilon**2).sqrt())),
    ("w", "lacks epsilon", lambda c: update(c, divisor=torch.sqrt)),
    ("w", "divides by v: its root is missing", lambda c: update(c, divisor=lambda square: square + c.epsilon)),
    ("w", "moves along the gradient, uphill: the update is subtracted", lambda c: 2 * (1 - c.lr * c.decay * (c.w.ndim > 1)) * c.w - update(c)),
    ("w", "reads the m of the step before", lambda c: update(c, m=c.m)),
    ("w", "reads the v of the step before", lambda c: update(c, v=c.v)),
    ("w", "reads g, where m belongs", lambda c: update(c, m=c.g * (1 - c.beta1**c.step))),
    ("w", "decays after the update: the update itself shrinks too", lambda c: update(c, kept=1.0) * (1 - c.lr * c.decay * (c.w.ndim > 1))),
    ("w", "exchanges beta1 and beta2 in the moments", lambda c: update(c, m=swapped(c)[0], v=swapped(c)[1])),
    ("w", "corrects m by beta2 and v by beta1", lambda c: update(c, m=c.new[0] * (1 - c.beta1**c.step) / (1 - c.beta2**c.step), v=c.new[1] * (1 - c.beta2**c.step) / (1 - c.beta1**c.step))),
    ("m", "exchanges beta1 and 1 - beta1", lambda c: (1 - c.beta1) * c.m + c.beta1 * c.g),
    ("m", "takes beta2, where beta1 belongs", lambda c: swapped(c)[0]),
    ("m", "adds the whole gradient: it counts 1 - beta1", lambda c: c.beta1 * c.m + c.g),
    ("m", "is bias-corrected: correct a copy, the running mean itself goes on", lambda c: c.new[0] / (1 - c.beta1**c.step)),
    ("m", "has the decay in it: AdamW keeps it apart from the gradient", lambda c: c.beta1 * c.m + (1 - c.beta1) * (c.g + c.decay * (c.w.ndim > 1) * c.w)),
    ("m", "has the decay in it: AdamW keeps it apart from the gradient", lambda c: c.beta1 * c.m + (1 - c.beta1) * (c.g + c.decay * c.w)),
    ("m", "is the old m", lambda c: c.m),
    ("v", "exchanges beta2 and 1 - beta2", lambda c: (1 - c.beta2) * c.v + c.beta2 * c.g**2),
    ("v", "takes beta1, where beta2 belongs", lambda c: swapped(c)[1]),
    ("v", "lacks the square of the gradient", lambda c: c.beta2 * c.v + (1 - c.beta2) * c.g),
    ("v", "takes the size of the gradient, where its square belongs", lambda c: c.beta2 * c.v + (1 - c.beta2) * c.g.abs()),
    ("v", "adds the whole square: it counts 1 - beta2", lambda c: c.beta2 * c.v + c.g**2),
    ("v", "squares m, where g belongs", lambda c: c.beta2 * c.v + (1 - c.beta2) * c.new[0] ** 2),
    ("v", "squares 1 - beta2 as well", lambda c: c.beta2 * c.v + ((1 - c.beta2) * c.g) ** 2),
    ("v", "is bias-corrected: correct a copy, the running mean itself goes on", lambda c: c.new[1] / (1 - c.beta2**c.step)),
    ("v", "is the old v", lambda c: c.v),
)  # fmt: skip


def operations(f):
    def update_by_reader(
        published, weight_inout, m_inout, v_inout, gradient_inout, controls, results, *, weight_decay, beta1, beta2, epsilon, rate=1.0, **_
    ):  # fmt: skip
        """A range of the flat buffers that decays goes in as a matrix, another as a vector."""
        if results[ops.RESULT_VERDICT] != ops.UPDATE:
            return
        shape, flat = (1, -1) if weight_decay else (-1,), (weight_inout, m_inout, v_inout)
        g = gradient_inout * results[ops.RESULT_SCALE].to(gradient_inout.dtype)
        numbers = int(controls[ops.CONTROL_STEP]), rate * controls[ops.CONTROL_LEARNING_RATE].item(), beta1, beta2, epsilon
        found = f(*(t.view(shape).clone() for t in (*flat, g)), *numbers, weight_decay or 0.1)
        for tensor, new in zip(flat, found, strict=True):
            tensor.copy_(new.view(-1))
        published.copy_(weight_inout)

    return {"adamw_update": update_by_reader}
