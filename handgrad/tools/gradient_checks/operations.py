"""Every backward of the reference beside central differences of its forward, in float64, element by element."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from handgrad.models.modern_tensors import GATE_CHANNELS
from handgrad.ops import reference
from handgrad.tools.gradient_checks.differences import Compared, compare, differences

B, T, H, K, D, V, Vp = 2, 3, 4, 2, 4, 7, 9
N, C, F = B * T, H * D, 10
EPSILON, CAP = 1e-6, 3.0


class Draw:
    """Tensors in float64: inputs at random, outputs full of NaN, accumulators of zeros."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def words(self, *shape: int) -> Tensor:
        return torch.randint(V, shape, generator=self.generator)


def empty(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=torch.float64)


def zeros(*like: Tensor) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in like]


class Case(NamedTuple):
    """An operation on some inputs."""

    forward: Callable[[], Tensor]  # its output
    backward: Callable[[Tensor], tuple[Tensor, ...]]  # dL/d output -> dL/d input, of each of `inputs`, after `forward`
    inputs: dict[str, Tensor]


def embedding(d: Draw) -> Case:
    tokens, wte, wpe, out = d.words(B, T), d(Vp, C), d(T + 1, C), empty(N, C)
    order = torch.argsort(tokens.view(-1), stable=True).int()

    def forward() -> Tensor:
        reference.embedding_forward(out, tokens, wte, wpe)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dwte, dwpe = zeros(wte, wpe)
        reference.embedding_backward(dwte, dwpe, dout, tokens, order)
        return dwte, dwpe

    return Case(forward, backward, {"wte": wte, "wpe": wpe})


def token_embedding(d: Draw) -> Case:
    tokens, wte, out = d.words(B, T), d(Vp, C), empty(N, C)
    order = torch.argsort(tokens.view(-1), stable=True).int()

    def forward() -> Tensor:
        reference.token_embedding_forward(out, tokens, wte)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        (dwte,) = zeros(wte)
        reference.token_embedding_backward(dwte, dout, tokens, order)
        return (dwte,)

    return Case(forward, backward, {"wte": wte})


def layernorm(d: Draw) -> Case:
    inp, weight, bias = d(N, C), d(C), d(C)
    out, mean, rstd = empty(N, C), empty(N), empty(N)

    def forward() -> Tensor:
        reference.layernorm_forward(out, mean, rstd, inp, weight, bias)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dinp, dweight, dbias = zeros(inp, weight, bias)
        reference.layernorm_backward(dinp, dweight, dbias, dout, inp, mean, rstd, weight, None)
        return dinp, dweight, dbias

    return Case(forward, backward, {"inp": inp, "weight": weight, "bias": bias})


def rmsnorm(d: Draw) -> Case:
    inp, out, rstd = d(N, C), empty(N, C), empty(N)

    def forward() -> Tensor:
        reference.rmsnorm_forward(out, rstd, inp)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        (dinp,) = zeros(inp)
        reference.rmsnorm_backward(dinp, dout, inp, rstd)
        return (dinp,)

    return Case(forward, backward, {"inp": inp})


def gained_rmsnorm(d: Draw) -> Case:
    inp, gain, out, rstd = d(N, C), d(C), empty(N, C), empty(N)

    def forward() -> Tensor:
        reference.gained_rmsnorm_forward(out, rstd, inp, gain, epsilon=EPSILON)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dinp, dgain = zeros(inp, gain)
        reference.gained_rmsnorm_backward(dinp, dgain, dout, inp, rstd, gain)
        return dinp, dgain

    return Case(forward, backward, {"inp": inp, "gain": gain})


def mix_rmsnorm(d: Draw) -> Case:
    inp, first, residual_scalar, input_scalar = d(N, C), d(N, C), d(1), d(1)
    mixed, out, rstd = empty(N, C), empty(N, C), empty(N)

    def forward() -> Tensor:
        reference.mix_rmsnorm_forward(mixed, out, rstd, inp, first, residual_scalar, input_scalar)
        return torch.cat([mixed, out])

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dinp, dfirst, dresidual, dinput = dout[:N].clone(), *zeros(first, residual_scalar, input_scalar)
        sums = dresidual, dinput
        reference.mix_rmsnorm_backward(dinp, dfirst, *sums, dout[N:], inp, first, rstd, residual_scalar, input_scalar)
        return dinp, dfirst, dresidual, dinput

    inputs = {"inp": inp, "first": first, "residual_scalar": residual_scalar, "input_scalar": input_scalar}
    return Case(forward, backward, inputs)


def linear(d: Draw) -> Case:
    inp, weight, bias, out = d(N, C), d(F, C), d(F), empty(N, F)

    def forward() -> Tensor:
        reference.linear_forward(out, inp, weight, bias)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dinp, dweight, dbias = empty(N, C), *zeros(weight, bias)
        reference.linear_backward(dinp, dweight, dbias, dout, inp, weight)
        return dinp, dweight, dbias

    return Case(forward, backward, {"inp": inp, "weight": weight, "bias": bias})


def attention(d: Draw) -> Case:
    qkv, out, lse = d(N, (H + 2 * K) * D), empty(N, C), empty(B, H, T)

    def forward() -> Tensor:
        reference.attention_forward(out, lse, qkv)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dqkv = torch.full_like(qkv, math.nan)
        reference.attention_backward(dqkv, dout, out, lse, qkv)
        return (dqkv,)

    return Case(forward, backward, {"qkv": qkv})


def rotary(d: Draw) -> Case:
    qkv = d(N, 3 * C)

    def forward() -> Tensor:
        reference.rotary_forward(out := qkv.clone(), num_heads=H, length=T)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        reference.rotary_backward(dqkv := dout.clone(), num_heads=H, length=T)
        return (dqkv,)

    return Case(forward, backward, {"qkv": qkv})


def qk_norm(d: Draw) -> Case:
    qkv, out, rstd = d(N, 3 * C), empty(N, 3 * C), empty(N, 2 * H)

    def forward() -> Tensor:
        reference.qk_norm_forward(out.copy_(qkv), rstd)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        reference.qk_norm_backward(dqkv := dout.clone(), out, rstd)
        return (dqkv,)

    return Case(forward, backward, {"qkv": qkv})


def gained_qk_norm_rotary(d: Draw) -> Case:
    qkv, q_gain, k_gain = d(N, (H + 2 * K) * D), d(D), d(D)
    out, rstd, turn = torch.full_like(qkv, math.nan), empty(N, H + K), (1.0, 0.3)

    def forward() -> Tensor:
        given = {"length": T, "frequencies": turn, "scale": 1.2, "epsilon": EPSILON}
        reference.gained_qk_norm_rotary_forward(out, rstd, qkv, q_gain, k_gain, **given)  # type: ignore[arg-type]
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dqkv, (dq, dk), gains = dout.clone(), zeros(q_gain, k_gain), (q_gain, k_gain)
        reference.gained_qk_norm_rotary_backward(dqkv, dq, dk, qkv, rstd, *gains, length=T, frequencies=turn, scale=1.2)
        return dqkv, dq, dk

    return Case(forward, backward, {"qkv": qkv, "q_gain": q_gain, "k_gain": k_gain})


def value_embedding(d: Draw) -> Case:
    channels = max(C, GATE_CHANNELS)
    qkv, norm, gate_weight = d(N, 3 * C), d(N, channels), d(H, GATE_CHANNELS)
    tokens, table = d.words(B, T), d(Vp, C)
    out, gate = torch.full_like(qkv, math.nan), empty(N, H)
    order = torch.argsort(tokens.view(-1), stable=True).int()

    def forward() -> Tensor:
        reference.value_embedding_forward(out.copy_(qkv), gate, norm, gate_weight, tokens, table)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dvalues, (dnorm, dgate_weight, dtable) = empty(N, C), zeros(norm, gate_weight, table)
        reference.value_embedding_backward(dvalues, dnorm, dgate_weight, dout, gate, norm, gate_weight, tokens, table)
        reference.token_embedding_backward(dtable, dvalues, tokens, order)
        return dout, dnorm, dgate_weight, dtable

    return Case(forward, backward, {"qkv": qkv, "norm": norm, "gate_weight": gate_weight, "table": table})


def gelu(d: Draw) -> Case:
    inp, out = d(N, F), empty(N, F)

    def forward() -> Tensor:
        reference.gelu_forward(out, inp)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        reference.gelu_backward(dinp := dout.clone(), inp)
        return (dinp,)

    return Case(forward, backward, {"inp": inp})


def relu2(d: Draw) -> Case:
    inp, out = d(N, F), empty(N, F)

    def forward() -> Tensor:
        reference.relu2_forward(out.copy_(inp))
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        reference.relu2_backward(dinp := dout.clone(), out)
        return (dinp,)

    return Case(forward, backward, {"inp": inp})


def swiglu(d: Draw) -> Case:
    hidden, out = d(N, 2 * F), empty(N, F)

    def forward() -> Tensor:
        reference.swiglu_forward(out, hidden)
        return out

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        dhidden = torch.full_like(hidden, math.nan)
        reference.swiglu_backward(dhidden, dout, hidden)
        return (dhidden,)

    return Case(forward, backward, {"hidden": hidden})


def classifier(d: Draw, softcap: float = 0.0) -> Case:
    """The sum of the losses, as training computes them."""
    logits, targets = d(N, V), d.words(N)

    def run(scale: Tensor) -> tuple[Tensor, Tensor]:
        losses, changed = empty(N), empty(N, Vp)
        changed[:, :V] = logits
        reference.classifier_forward_backward(losses, changed, targets, scale, vocab_size=V, softcap=softcap)
        return losses.sum().view(1), changed[:, :V]

    return Case(lambda: run(torch.ones(1, dtype=torch.float64))[0], lambda dout: (run(dout)[1],), {"logits": logits})


# The backward that a case calls: the case. Fused operations are compositions of these; the models below run them.
CASES: dict[str, Callable[[Draw], Case]] = {
    "embedding_backward": embedding,
    "token_embedding_backward": token_embedding,
    "layernorm_backward": layernorm,
    "linear_backward": linear,
    "attention_backward": attention,
    "gelu_backward": gelu,
    "classifier_forward_backward": classifier,
    "rmsnorm_backward": rmsnorm,
    "gained_rmsnorm_backward": gained_rmsnorm,
    "mix_rmsnorm_backward": mix_rmsnorm,
    "rotary_backward": rotary,
    "qk_norm_backward": qk_norm,
    "gained_qk_norm_rotary_backward": gained_qk_norm_rotary,
    "value_embedding_backward": value_embedding,
    "relu2_backward": relu2,
    "swiglu_backward": swiglu,
    "classifier_forward_backward, with a cap": lambda d: classifier(d, CAP),
}


@dataclass(frozen=True)
class Checked:
    """An operation, or a network, and its gradients."""

    name: str
    place: str  # of its code
    gradients: list[Compared]

    @property
    def wrong(self) -> list[Compared]:
        return [compared for compared in self.gradients if not compared.right]


def check_operations() -> Iterator[Checked]:
    """Each backward with a random gradient of its output."""
    for name, make in CASES.items():
        draw = Draw()
        forward, backward, inputs = make(draw)
        dout = draw(*forward().shape)
        number = lambda forward=forward, dout=dout: (forward() * dout).sum().item()  # noqa: E731
        by_hand = [gradient.clone() for gradient in backward(dout)]
        pairs = zip(inputs.items(), by_hand, strict=True)
        gradients = [compare(of, gradient, differences(number, tensor)) for (of, tensor), gradient in pairs]
        yield Checked(name, place_of(name.partition(",")[0]), gradients)


def place_of(name: str) -> str:
    """The file and the line of an operation of the reference."""
    function = getattr(reference, name)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(reference.__file__).resolve().parents[3]
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{inspect.getsourcelines(function)[1]}"
