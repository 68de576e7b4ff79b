"""The allowed error of an operation's results, with its derivation, for `handgrad doctor` and the kernel tests.

A result may err by twice the reference's error in the same dtype, plus a floor. The floor is needed because the reference's
error may be small by chance on few numbers, or because it takes no GPU shortcut. Errors and floors are norms.
"""

import math

import torch
from torch import Tensor

from handgrad.ops.cases import Arguments

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TANH = 2.0**-11  # relative error of the GPU's tanh instruction, used for 16-bit logits (`ops.cuda.classifier.capped`)

# The GPU's exponential and division err by 2^-22, 4 roundings of float32, and not at random: in s = 1 / (1 + e), where
# the exponential counts at most once, they add up to 8. Its argument, the sum and two products are rounded: 64 + 4.
SIGMOID = 68.0
# A scalar's gradient in float32: 8 roundings in a product, and at most 136 additions in a program's loop and two trees. In
# 16 bits only the rounding of each product to the streams' dtype counts.
MIXTURE_SUM = 144.0
SCALARS = {"dresidual_scalar_acc": "inp", "dinput_scalar_acc": "first"}


def roundings(name: str, arguments: Arguments, dtype: torch.dtype) -> float:
    """The number of roundings in a result. Their signs are random, so together they grow with the root of the number.

    A sum over tokens has one per term; a mean has two (sum, quotient) and 1 / rms four (mean, variance, root, reciprocal),
    squared here; any other result has one, of its dtype. In float32 the steps before it count as well: a norm's output has
    the errors of its 1 / rms and two products, the gradient through a QK norm has eight, of products and sums."""
    dout = next((arguments[key] for key in ("dout", "dqkv_inout", "dqkv") if arguments.get(key) is not None), None)
    if name in ("dgate_weight_acc", "dnorm_inout"):  # from gates' gradients, each a sum over a head's channels
        width = arguments["norm"].shape[1] // arguments["gate"].shape[1]
        return width * (len(arguments["norm"]) if name.endswith("_acc") else 1.0)
    if name.endswith("_acc") and dout is not None:
        return dout.shape[0]
    if name in ("mean", "rstd"):
        return {"mean": 4.0, "rstd": 16.0}[name]
    if dtype != torch.float32:
        return 1.0
    if (name in ("gate", "qkv_inout") and "gate" in arguments) or (name in ("out", "dhidden") and "hidden" in arguments):
        return SIGMOID
    if name in ("out", "qkv_inout") and "rstd" in arguments:
        return 18.0
    return 8.0 if name == "dqkv_inout" and "rstd" in arguments else 1.0


def floor(name: str, arguments: Arguments, exact: Arguments, dtype: torch.dtype) -> float:
    """The error floor of a result in `dtype`. `arguments`: their values before the call; `exact`: results in float64."""
    if name in SCALARS:
        return of_a_scalar(name, arguments, exact)
    least = root_of(roundings(name, arguments, dtype), dtype, exact[name])
    least = max(least, of_a_divergence(name, arguments)) if "teacher_logits" in arguments else least
    return max(least, of_a_cap(name, arguments, exact[name], dtype)) if arguments.get("softcap") else least


def of_a_scalar(name: str, arguments: Arguments, exact: Arguments) -> float:
    """The floor for the gradient of a mixture's scalar, a single number: from the norm of its N C products."""
    scalar, streams = arguments["residual_scalar"], arguments["inp"].dtype
    dmixed = exact["dstream_inout"] / (1 if scalar is None else scalar.double())
    products = dmixed * arguments[SCALARS[name]].double()
    return root_of(MIXTURE_SUM if streams == torch.float32 else 1.0, streams, products)


def of_a_divergence(name: str, arguments: Arguments) -> float:
    """The floor for a divergence and its gradient: differences in float32 of two terms that are as large as the logits of
    both models or, in the gradient p - q, as 1."""
    logits, V = ("logits_to_dlogits_inout", "teacher_logits"), arguments["vocab_size"]
    largest = sum(arguments[key][:, :V].abs().max().item() for key in logits)
    if name != "losses":
        largest = arguments["scale"].abs().max().item() * (largest if arguments.get("reverse") else 1.0)
    return 2 * largest * ROUNDING[torch.float32] * math.sqrt(len(arguments["targets"]))


def of_a_cap(name: str, arguments: Arguments, exact: Tensor, dtype: torch.dtype) -> float:
    """The floor for results of capped logits z = c tanh(x / c). With float32 logits two roundings, of 1 - e and 1 + e, are
    relative to the cap: z and the losses have that absolute error, probabilities that relative error. With 16-bit logits
    the tanh has the relative error `TANH`, and a loss is a difference of two z."""
    cap, logits = arguments["softcap"], next(tensor for key, tensor in arguments.items() if key.startswith("logits"))
    if logits.dtype == torch.float32:
        size = norm(exact) if "dlogits" in name else math.sqrt(exact.isfinite().sum().item())
        return 2 * cap * ROUNDING[dtype] * size
    largest = cap * math.tanh(logits[:, : arguments.get("vocab_size")].abs().max().item() / cap)
    return 2 * largest * TANH * math.sqrt(exact.numel()) if name == "losses" else 0.0


def root_of(roundings: float, dtype: torch.dtype, exact: Tensor) -> float:
    return math.sqrt(roundings) * ROUNDING[dtype] * norm(exact)


def norm(tensor: Tensor) -> float:
    """The norm of the finite elements."""
    return tensor.double()[tensor.isfinite()].norm().item()


def error(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference; infinite if one tensor is finite at an element and the other is not."""
    exact, finite = exact.double(), exact.isfinite()
    if not (torch.equal(result.isfinite(), finite) and torch.equal(result.double()[~finite], exact[~finite])):
        return math.inf  # a NaN here would get lost in the largest of several errors
    return norm((result.double() - exact)[finite])


def allowed(own: Tensor, exact: Tensor, floor: float) -> float:
    """The allowed error of a kernel; `own` is the reference's result in the kernel's dtype."""
    return 2 * error(own, exact) + floor
