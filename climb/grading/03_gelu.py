"""Step 3: GELU, tanh form."""

import math

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


def cases(draw):
    for N, F, size in ((5, 7, 1.0), (3, 9, 3.0), (1, 3, 0.1)):
        yield Case({"N": N, "F": F}, x=draw(N, F) * size, dy=draw(N, F))


def answers(c):
    y, dx = torch.empty_like(c.x), c.dy.clone()
    reference.gelu_forward(y, c.x)
    reference.gelu_backward(dx, c.x)
    c.t = torch.tanh(ROOT * (c.x + CUBIC * c.x**3))
    c.du = ROOT * (1 + 3 * CUBIC * c.x**2)
    c.erf = (1 + torch.erf(c.x / math.sqrt(2))) / 2
    c.y = y
    return {"y": y, "dx": dx}


def by_tanh(x, root=ROOT, cubic=CUBIC, power=3):
    return x / 2 * (1 + torch.tanh(root * (x + cubic * x**power)))


def slope(c, t=None, du=None):
    t, du = c.t if t is None else t, c.du if du is None else du
    return (1 + t) / 2 + c.x / 2 * (1 - t**2) * du


TERMS = {
    "dx": lambda c: {
        "the gate's term, (1 + tanh u) / 2": c.dy * (1 + c.t) / 2,
        "the term through the gate": c.dy * c.x / 2 * (1 - c.t**2) * c.du,
    }
}
MISTAKES = (
    ("y", "is the exact GELU, by erf: GPT-2 was trained with the tanh form", lambda c: c.x * c.erf),
    ("y", "lacks the cubic term in u", lambda c: by_tanh(c.x, cubic=0.0)),
    ("y", "takes the square where u has the cube of x", lambda c: by_tanh(c.x, power=2)),
    ("y", "multiplies u by sqrt(pi / 2): it is sqrt(2 / pi)", lambda c: by_tanh(c.x, root=1 / ROOT)),
    ("y", "multiplies u by 2 / pi: its root is missing", lambda c: by_tanh(c.x, root=2 / math.pi)),
    ("y", "does not multiply u by sqrt(2 / pi)", lambda c: by_tanh(c.x, root=1.0)),
    ("y", "multiplies the cubic term alone by sqrt(2 / pi)", lambda c: c.x / 2 * (1 + torch.tanh(c.x + ROOT * CUBIC * c.x**3))),
    ("y", "is the gate alone: it multiplies x", lambda c: (1 + c.t) / 2),
    ("y", "is the sigmoid form, x sigmoid(1.702 x)", lambda c: c.x * torch.sigmoid(1.702 * c.x)),
    ("y", "is SiLU, x sigmoid(x)", lambda c: c.x * torch.sigmoid(c.x)),
    ("dx", "is the slope of the exact GELU: the tanh form has its own", lambda c: c.dy * (c.erf + c.x * torch.exp(-c.x**2 / 2) / math.sqrt(2 * math.pi))),
    ("dx", "lacks the inner derivative du/dx", lambda c: c.dy * slope(c, du=torch.ones_like(c.x))),
    ("dx", "lacks the cubic term's part of du/dx", lambda c: c.dy * slope(c, du=torch.full_like(c.x, ROOT))),
    ("dx", "lacks the 3 of the cube's derivative", lambda c: c.dy * slope(c, du=ROOT * (1 + CUBIC * c.x**2))),
    ("dx", "has 2 where the cube's derivative has 3", lambda c: c.dy * slope(c, du=ROOT * (1 + 2 * CUBIC * c.x**2))),
    ("dx", "lacks sqrt(2 / pi) in du/dx", lambda c: c.dy * slope(c, du=c.du / ROOT)),
    ("dx", "has 1 - tanh u where the derivative of tanh is 1 - tanh^2 u", lambda c: c.dy * ((1 + c.t) / 2 + c.x / 2 * (1 - c.t) * c.du)),
    ("dx", "has 1 + tanh^2 u where the derivative of tanh is 1 - tanh^2 u", lambda c: c.dy * ((1 + c.t) / 2 + c.x / 2 * (1 + c.t**2) * c.du)),
    ("dx", "is the slope at y, where x belongs", lambda c: c.dy * slope(Case({}, x=c.y), torch.tanh(ROOT * (c.y + CUBIC * c.y**3)), ROOT * (1 + 3 * CUBIC * c.y**2))),
    ("dx", "is the slope alone: it multiplies dy", lambda c: slope(c)),
    ("dx", "multiplies dy by y, where the slope belongs", lambda c: c.dy * c.y),
    ("dx", "lacks x in the term through the gate: the product rule keeps it", lambda c: c.dy * ((1 + c.t) / 2 + (1 - c.t**2) * c.du / 2)),
)  # fmt: skip


def operations(f):
    def forward(out, x):
        out.copy_(f(x, torch.zeros_like(x))[0])

    def backward(dhidden_inout, x):
        dhidden_inout.copy_(f(x, dhidden_inout.clone())[1])

    return {"gelu_forward": forward, "gelu_backward": backward}
