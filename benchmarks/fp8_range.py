"""The share of each gradient that e4m3 and e5m2 keep, tensor by tensor: the numbers that vanish, the error left in the
products.

Every model trains for some steps in bf16. Then one micro-batch goes through it, and each of the four gradients of a block
that `--precision fp8` quantises is rounded in several ways, from a scale of its own largest number. What the rounding alone
does to the two products that read the gradient is measured in float32, with everything else exact:

    dx error      |dx' - dx| / |dx| in the Frobenius norm, and the median of the same by token
    dW error      the same of the weight gradient, and the mean by row, which AdamW normalises each by itself

    python -m benchmarks.fp8_range --data FOLDER --models d12:64:4:100,d48:16:8:40 --out FILE

A model is PRESET:MICRO_BATCH:MICRO_STEPS:STEPS.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.contenders import HandgradRun, Settings, tokens_of
from handgrad.joins.fp8.formats import E4M3, E5M2, LARGEST_EXPONENT, LARGEST_SCALE_EXPONENT, largest_number
from handgrad.machine import devices

BLOCK = 128  # numbers in a row that share a scale, where blocks have one
LEARNING_RATE = 6e-4


class Rounding(NamedTuple):
    """A way to make fp8 numbers."""

    format: torch.dtype
    scales: str = "tensor"  # what shares one: the tensor, each third of [q k v], a token, an output, 128 outputs of a token
    margin: int = 0  # binades left free above the largest number; negative: numbers above are clipped


ROUNDINGS = {
    "e4m3": Rounding(E4M3),
    "e4m3, 2 binades clipped": Rounding(E4M3, margin=-2),
    "e4m3, 4 binades clipped": Rounding(E4M3, margin=-4),
    "e4m3, a scale for each of q, k, v": Rounding(E4M3, "parts"),
    "e4m3, a scale per token": Rounding(E4M3, "rows"),
    "e4m3, a scale per output": Rounding(E4M3, "columns"),
    "e4m3, a scale per 128 outputs of a token": Rounding(E4M3, "blocks"),
    "e5m2": Rounding(E5M2),
    "e5m2 at e4m3's scale": Rounding(E5M2, margin=LARGEST_EXPONENT[E5M2] - LARGEST_EXPONENT[E4M3]),
}


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """x (N, O) float32 through fp8 and back. Scales are powers of two, as handgrad's."""
    N, width = x.shape
    groups = {
        "tensor": (1, N, 1, width),
        "parts": (1, N, 3, width // 3),
        "rows": (N, 1, 1, width),
        "columns": (1, N, width, 1),
        "blocks": (N, 1, -(-width // BLOCK), BLOCK),
    }[rounding.scales]
    padded = torch.nn.functional.pad(x, (0, groups[2] * groups[3] - width)).view(groups)
    mantissa, exponent = torch.frexp(padded.abs().amax((1, 3), keepdim=True))
    # 1.75 x 2^E is a format's largest number, and the mantissa lies in [1/2, 1).
    exponent = LARGEST_EXPONENT[rounding.format] - (exponent - 1) - (mantissa > 0.875).int() - rounding.margin
    exponent = exponent.clamp(-LARGEST_SCALE_EXPONENT, LARGEST_SCALE_EXPONENT)
    scale, limit = torch.ldexp(torch.ones_like(mantissa), exponent), largest_number(rounding.format)
    found = (padded * scale).clamp(-limit, limit).to(rounding.format).float() / scale
    return found.view(N, -1)[:, :width]


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def row_errors(found: Tensor, exact: Tensor) -> Tensor:
    """By row; rows of zeros are left out."""
    norms = exact.norm(dim=1)
    return ((found - exact).norm(dim=1) / norms)[norms > 0]


def study(dy: Tensor, x: Tensor, weight: Tensor, *, parts: bool) -> dict[str, dict[str, float]]:
    """The errors of every rounding of dy (N, O) in dx = dy W and dW = dy^T x, x (N, I), W (O, I)."""
    dy, x, weight = dy.float(), x.float(), weight.float()
    dx, dw = dy @ weight, dy.t() @ x
    rows = {}
    for name, rounding in ROUNDINGS.items():
        if rounding.scales == "parts" and not parts:
            continue
        q = rounded(dy, rounding)
        qx, qw = q @ weight, q.t() @ x
        rows[name] = {
            "vanished": ((q == 0) & (dy != 0)).float().mean().item(),
            "dx_error": error(qx, dx),
            "dx_error_median_token": row_errors(qx, dx).median().item(),
            "dw_error": error(qw, dw),
            "dw_error_mean_row": row_errors(qw, dw).mean().item(),
        }
        if parts:
            thirds = zip("qkv", qw.chunk(3), dw.chunk(3), strict=True)
            rows[name] |= {f"dw_error_{part}": error(found, exact) for part, found, exact in thirds}
    return rows


class Spy:
    """A backend whose products also study the gradients that they are given."""

    def __init__(self, ops: Any, names: dict[int, tuple[str, int]]):
        """`names`: (tensor, layer) by the address of the weight that a product reads."""
        self.ops, self.names = ops, names
        self.found: dict[str, dict[int, dict[str, dict[str, float]]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def linear_backward(self, dx: Tensor, dw: Tensor, dbias: Any, dy: Tensor, x: Tensor, weight: Tensor, **scratch: Any):
        self.see(dy, x, weight)
        self.ops.linear_backward(dx, dw, dbias, dy, x, weight, **scratch)

    def gelu_linear_backward(self, dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, fc: Tensor, weight: Tensor, **more: Any):
        self.see(dy, x, weight)
        self.ops.gelu_linear_backward(dx, dw, dy, x, fc, weight, **more)

    def see(self, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        if name := self.names.get(weight.data_ptr()):
            tensor, layer = name
            self.found.setdefault(tensor, {})[layer] = study(dy, x, weight, parts=tensor == "dqkv")


def summary(layers: dict[int, dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of every rounding, the median layer and the worst of each figure."""
    first = next(iter(layers.values()))
    return {
        rounding: {
            figure: {
                "median": median(found[rounding][figure] for found in layers.values()),
                "worst": max(found[rounding][figure] for found in layers.values()),
                "worst_layer": max(layers, key=lambda layer: layers[layer][rounding][figure]),
            }
            for figure in figures
        }
        for rounding, figures in first.items()
    }


def train(settings: Settings, steps: int) -> tuple[HandgradRun, list[float]]:
    run = HandgradRun(settings.config(), tokens_of(settings))
    return run, run.turn(lambda launched: launched < steps)


def watch(run: HandgradRun, first_sample: int) -> dict[str, Any]:
    """The gradients of the micro-batch that begins with `first_sample`."""
    state, design = run.state, run.state.design
    weights = {
        "dqkv": "qkv_weight",
        "dresidual_mid": "proj_weight",
        "dhidden": "fc_weight",
        "dresidual_out": "fcproj_weight",
    }
    names = {
        getattr(block, weight).data_ptr(): (tensor, layer)
        for layer, block in enumerate(state.weights.blocks)
        for tensor, weight in weights.items()
    }
    spy, w, act = Spy(design.ops, names), state.weights, state.activations
    run.stepper.feed.fill(first_sample)
    gradients = w, state.weight_gradients, act, state.activation_gradients, state.loss_scale[:1]
    backward: Callable[..., Any] = design.model.backward
    back = backward(spy, *gradients, design.shape, recompute=design.recompute)
    for stage in [*design.model.forward(design.ops, w, act, design.shape), *back]:
        stage.run()
    return {tensor: summary(spy.found[tensor]) for tensor in weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="d12:64:4:100", help="PRESET:MICRO_BATCH:MICRO_STEPS:STEPS, by commas")
    parser.add_argument("--data", default="", help="a folder of prepared shards; made-up tokens say little here")
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    device, rows = devices.resolve_device(asked.device), []
    for text in asked.models.split(","):
        model, *numbers = text.split(":")
        micro_batch, micro_steps, steps = map(int, numbers)
        made = {"model": model, "micro_batch": micro_batch, "micro_steps": micro_steps, "data": asked.data, "steps": steps}
        more = {"learning_rate": LEARNING_RATE, "warmup_steps": max(1, steps // 4), "device": asked.device}
        settings = Settings(**made, **more, sequence_length=asked.sequence_length)
        run, losses = train(settings, steps)
        tensors = watch(run, steps * micro_steps * micro_batch)
        tokens = steps * micro_steps * micro_batch * settings.sequence_length
        rows.append({**made, "tokens": tokens, "first_loss": losses[0], "last_loss": losses[-1], "tensors": tensors})
        print(f"\n{model}, {tokens / 1e6:.1f}M tokens of training, loss {losses[0]:.3f} -> {losses[-1]:.3f}: worst layer")
        for tensor, roundings in tensors.items():
            for rounding, figures in roundings.items():
                shown = "  ".join(f"{name} {value['worst']:.3g}" for name, value in figures.items())
                print(f"{tensor:<14} {rounding:<42} {shown}", flush=True)
        del run
        record.free_memory(device)
    if asked.out:
        method = "each model trained in bf16, then one micro-batch; each gradient rounded alone, products in float32"
        record.write_record(asked.out, device, method=method, learning_rate=LEARNING_RATE, rows=record.rounded(rows, 4))


if __name__ == "__main__":
    main()
