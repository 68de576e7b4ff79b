"""Step 10: a block's backward, by the backwards of its operations."""

from types import SimpleNamespace

import torch

from handgrad.errors import UsageError
from handgrad.models import gpt2
from handgrad.ops import reference
from handgrad.tools.climb import Case

SAVED = {
    "ln1": "ln1",
    "ln2": "ln2",
    "qkv": "qkv",
    "y": "atty",
    "mid": "residual_mid",
    "fc": "fc",
    "act": "gelu",
    "lse": "lse",
}


def cases(draw):
    for B, T, H, D in ((2, 5, 2, 3), (1, 3, 1, 4)):
        N, C = B * T, H * D
        w = SimpleNamespace()
        for name, rows, columns in (("qkv", 3 * C, C), ("proj", C, C), ("fc", 4 * C, C), ("fcproj", C, 4 * C)):
            setattr(w, f"{name}_weight", draw(rows, columns) / 2)
            setattr(w, f"{name}_bias", draw(rows))
        for name in ("ln1", "ln2"):
            setattr(w, f"{name}_weight", draw(C))
            setattr(w, f"{name}_bias", draw(C))
        x, dout = draw(N, C), draw(N, C)
        act = SimpleNamespace(
            ln1=x * 0, ln2=x * 0, qkv=draw(N, 3 * C), atty=x * 0, residual_mid=x * 0, fc=draw(N, 4 * C), gelu=draw(N, 4 * C)
        )
        act.lse, act.residual_out = draw(B, H, T), x * 0
        act.ln1_mean, act.ln1_rstd, act.ln2_mean, act.ln2_rstd = draw(4, N)
        gpt2.block_forward(reference, w, act, x, None)
        saved = SimpleNamespace(x=x, **{name: getattr(act, theirs) for name, theirs in SAVED.items()})
        yield Case({"N": N, "C": C}, dout=dout, saved=saved, w=w, ops=SimpleNamespace(**backwards(reference)), act=act)


def backwards(ops):
    """The operations' backwards, as functions that return new tensors."""
    like, zeros = torch.empty_like, torch.zeros_like

    def linear(dy, x, weight):
        dx, dweight, dbias = like(x), zeros(weight), zeros(weight[:, 0])
        ops.linear_backward(dx, dweight, dbias, dy, x, weight)
        return dx, dweight, dbias

    def layer_norm(dy, x, weight):
        dx, dweight, dbias, statistics = zeros(x), zeros(weight), zeros(weight), x.new_empty(2, len(x))
        reference.layernorm_forward(like(x), *statistics, x, weight, weight)
        ops.layernorm_backward(dx, dweight, dbias, dy, x, *statistics, weight, None)
        return dx, dweight, dbias

    def gelu(dy, x):
        dx = dy.clone()
        ops.gelu_backward(dx, x)
        return dx

    def attention(dy, y, lse, qkv):
        dqkv = like(qkv)
        ops.attention_backward(dqkv, dy, y, lse, qkv)
        return dqkv

    return {"linear": linear, "layer_norm": layer_norm, "gelu": gelu, "attention": attention}


def answers(c):
    """By the model's own backward, in its buffers; from the block's end to its beginning, so that the first wrong is the cause."""
    act = c.act
    g = SimpleNamespace(**{name: torch.zeros_like(value) for name, value in vars(c.w).items()})
    stream = c.dout.clone()
    d = SimpleNamespace(
        dresidual_out=stream, dresidual_mid=stream, dhidden=torch.empty_like(act.fc), dqkv=torch.empty_like(act.qkv)
    )
    shared = SimpleNamespace(dln=torch.empty_like(c.dout), datty=torch.empty_like(c.dout), attention_scratch=None)
    gpt2.block_backward(reference, c.w, g, act, d, shared, c.saved.x, stream, None, SimpleNamespace(scratch=None), 0)
    g.fcproj_bias = c.dout.sum(0)  # which the model leaves to the norm above
    return {name: getattr(g, name) for name in NAMES} | {"dx": stream}


def call(function, c):
    found = function(c.dout.clone(), c.saved, c.w, c.ops)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise UsageError("expected dx and a dict of gradients; is a return missing?")
    missing = [name for name in NAMES if name not in found[1]]
    if missing:
        raise UsageError(f"expected a gradient for every name of w, found none for {', '.join(missing)}")
    return [*(found[1][name] for name in NAMES), found[0]]


NAMES = [f"{part}_{kind}" for part in ("fcproj", "fc", "ln2", "proj", "qkv", "ln1") for kind in ("weight", "bias")]


def walk(c, skip2=1, skip1=1, into_attention="mid", **read):
    """Every output, where a mistake may choose another input of a backward (`read`) or leave a path out."""
    s, w, o, g = c.saved, c.w, c.ops, {}

    def at(name, usual):
        return getattr(s, read.get(name, usual))

    def linear(name, dy, usual):
        dx, g[f"{name}_weight"], g[f"{name}_bias"] = o.linear(dy, at(name, usual), getattr(w, f"{name}_weight"))
        return dx

    def norm(name, dy, usual):
        dx, g[f"{name}_weight"], g[f"{name}_bias"] = o.layer_norm(dy, at(name, usual), getattr(w, f"{name}_weight"))
        return dy if read.get(name) is None and f"no_{name}" in read else dx

    dact = linear("fcproj", c.dout, "act")
    dfc = dact if "no_gelu" in read else o.gelu(dact, at("gelu", "fc"))
    dln2 = linear("fc", dfc, "ln2")
    branch2 = norm("ln2", dln2, "mid")
    dmid = branch2 + skip2 * c.dout
    dy = linear("proj", {"mid": dmid, "out": c.dout, "branch": branch2}[into_attention], "y")
    branch1 = norm("ln1", linear("qkv", o.attention(dy, s.y, s.lse, s.qkv), "ln1"), "x")
    path = {"no": 0 * dmid, "mid": dmid, "out": c.dout, "both": dmid + c.dout}[{0: "no", 1: "mid"}.get(skip1, skip1)]
    return g | {"dx": path + branch1}


VARIANTS = (
    ("lacks the path past the feed-forward half: dout itself", {"skip2": 0}),
    ("lacks the path past the attention half: mid's own gradient", {"skip1": 0}),
    ("lacks the paths past both halves", {"skip1": 0, "skip2": 0}),
    ("adds dout, where the gradient of mid belongs", {"skip1": "out"}),
    ("adds the path past both halves once more", {"skip1": "both"}),
    ("takes GELU's slope at its output act, where its input fc belongs", {"gelu": "act"}),
    ("lacks GELU's slope", {"no_gelu": 1}),
    ("gives the second norm's backward its output ln2, where its input mid belongs", {"ln2": "ln2"}),
    ("gives the second norm's backward x, where its input mid belongs", {"ln2": "x"}),
    ("gives the first norm's backward its output ln1, where its input x belongs", {"ln1": "ln1"}),
    ("gives the first norm's backward mid, where its input x belongs", {"ln1": "mid"}),
    ("skips the second norm's backward", {"no_ln2": 1}),
    ("skips the first norm's backward", {"no_ln1": 1}),
    ("feeds dout to the attention half, which reads the gradient of mid", {"into_attention": "out"}),
    ("feeds the attention half the norm's gradient alone: the gradient of mid has dout in it as well", {"into_attention": "branch"}),
    ("multiplies by fc, where GELU's output act was the input", {"fcproj": "fc"}),
    ("multiplies by mid, where the norm's output ln2 was the input", {"fc": "mid"}),
    ("multiplies by x, where the norm's output ln1 was the input", {"qkv": "x"}),
    ("multiplies by ln1, where attention's output y was the input", {"proj": "ln1"}),
    ("multiplies by ln1, where ln2 was the input", {"fc": "ln1"}),
)  # fmt: skip
MISTAKES = [
    (name, words, lambda c, name=name, changed=changed: walk(c, **changed)[name])
    for words, changed in VARIANTS
    for name in (*NAMES, "dx")
]
MISTAKES.append(("fcproj_bias", "sums the gradient of mid, where dout belongs", lambda c: walk(c)["proj_bias"]))


def operations(f):
    def block_backward(ops, w, g, act, d, shared, x, dx, dbias_below_acc, whole, recompute):
        """The bias of fcproj belongs to the norm above, as in the model's own."""
        saved = SimpleNamespace(x=x, **{name: getattr(act, theirs) for name, theirs in SAVED.items()})
        found, gradients = f(d.dresidual_out.clone(), saved, w, SimpleNamespace(**backwards(ops)))
        for name in gradients.keys() - {"fcproj_bias"}:
            getattr(g, name).add_(gradients[name])
        dx.copy_(found)
        if dbias_below_acc is not None:
            dbias_below_acc.add_(dx.sum(0))

    return {"block_backward": block_backward}
