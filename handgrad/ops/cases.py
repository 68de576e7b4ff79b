"""One test case per operation: its arguments by name, and how to draw each at any size, dtype and device. Gradient checks,
kernel checks and backend tests draw their calls from this table; `ops.rounding` gives the allowed errors.

Capital names are sizes, in the alphabet of `ops`. Also: P = (H + 2K) D, the columns of packed queries, keys, values;
R = H + K, the heads that norm and rotation change; G, the channels that a gate reads; M, the rows of the position table;
Yo and Xo, the rows and columns that a convolution of stride S writes; E, the vectors of a codebook.
"""

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import CONTROLS, RESULTS, UPDATE, reference

Arguments = dict[str, Any]
Sizes = dict[str, int]

SENTINEL = 3.25  # accumulators start from it, so a kernel that overwrites instead of adding shows
B, T, V, Vp = 2, 96, 300, 384
N, C, H, F = B * T, 128, 2, 512
SIZES = {"B": B, "T": T, "C": C, "H": H, "F": F, "V": V, "Vp": Vp, "G": 32}
SIZES |= {"Y": 6, "X": 8, "J": 3, "S": 1, "Q": 4, "Z": 4, "E": 10}

# Outputs <- inputs, in argument order | settings. Each tensor is name[dimensions], then optionally how to change the draw:
#   *4   scaled by that factor      +   doubled and shifted     ^2   squared; negative numbers become 0 first
CALLS = {
    "embedding_forward": "out[N C] <- tokens[B T] wte[Vp C] wpe[M C]",
    "embedding_backward": "dwte_acc[Vp C] dwpe_acc[M C] <- dout[N C] tokens[B T] sorted_positions[N]",
    "token_embedding_forward": "out[N C] <- tokens[B T] wte[Vp C]",
    "token_embedding_backward": "dwte_acc[Vp C] <- dout[N C] tokens[B T] sorted_positions[N]",
    "layernorm_forward": "out[N C] mean[N] rstd[N] <- inp[N C]+ weight[C] bias[C]",
    "layernorm_backward": "dresidual_inout[N C] dweight_acc[C] dbias_acc[C]"
    " <- dout[N C] inp[N C] mean[N] rstd[N] weight[C] dbias_below_acc[C]",
    "rmsnorm_forward": "out[N C] rstd[N] <- inp[N C]+ gain[C] | epsilon",
    "rmsnorm_backward": "dresidual_inout[N C] dgain_acc[C] <- dout[N C] inp[N C] rstd[N] gain[C]",
    "mix_rmsnorm_forward": "mixed[N C] out[N C] rstd[N] <- inp[N C] first[N C] residual_scalar[1] input_scalar[1]",
    "mix_rmsnorm_backward": "dstream_inout[N C] dfirst_inout[N C] dresidual_scalar_acc[1] dinput_scalar_acc[1]"
    " <- dout[N C] inp[N C] first[N C] rstd[N] residual_scalar[1] input_scalar[1]",
    "value_embedding_forward": "qkv_inout[N 3C] gate[N H] <- norm[N C] gate_weight[H G] tokens[B T] table[Vp C]",
    "value_embedding_backward": "dvalues[N C] dnorm_inout[N C] dgate_weight_acc[H G]"
    " <- dqkv[N 3C] gate[N H] norm[N C] gate_weight[H G] tokens[B T] table[Vp C]",
    "rotary_forward": "qkv_inout[N P] <- | num_heads length",
    "rotary_backward": "dqkv_inout[N P] <- | num_heads length",
    "qk_norm_forward": "qkv_inout[N 3C] rstd[N 2H] <-",
    "qk_norm_backward": "dqkv_inout[N 3C] <- qkv[N 3C] rstd[N 2H]",
    "qk_norm_rotary_forward": "qkv_inout[N 3C] rstd[N 2H] <- | length",
    "qk_norm_rotary_backward": "dqkv_inout[N 3C] <- qkv[N 3C] rstd[N 2H] | length",
    "gained_qk_norm_rotary_forward": "out[N P] rstd[N R]"
    " <- qkv[N P] q_gain[D] k_gain[D] | length frequencies scale epsilon",
    "gained_qk_norm_rotary_backward": "dqkv_inout[N P] dq_gain_acc[D] dk_gain_acc[D]"
    " <- qkv[N P] rstd[N R] q_gain[D] k_gain[D] | length frequencies scale",
    "attention_forward": "out[N C] lse[B H T] <- qkv[N P]",
    "attention_backward": "dqkv[N P] <- dout[N C] out[N C] lse[B H T] qkv[N P]",
    "linear_forward": "out[N F] <- inp[N C] weight[F C] bias[F]",
    "linear_backward": "dinp[N C] dweight_acc[F C] dbias_acc[F] <- dout[N F] inp[N C] weight[F C]",
    "linear_residual_forward": "out[N C] <- residual[N C] inp[N F] weight[C F] bias[C]",
    "bias_backward": "dbias_acc[F] <- dout[N F]",
    "residual_forward": "out[N C] <- a[N C] b[N C]",
    "gelu_forward": "out[N F] <- inp[N F]*3",
    "gelu_backward": "dhidden_inout[N F] <- inp[N F]*3",
    "linear_gelu_forward": "out[N F] hidden[N F] <- inp[N C] weight[F C] bias[F]",
    "gelu_linear_backward": "dhidden[N F] dweight_acc[C F] <- dout[N C] inp[N F] hidden[N F] weight[C F]",
    "relu2_forward": "hidden_inout[N F]*3 <-",
    "relu2_backward": "dhidden_inout[N F] <- out[N F]^2",
    "linear_relu2_forward": "out[N F] <- inp[N C] weight[F C]",
    "relu2_linear_backward": "dhidden[N F] dweight_acc[C F] <- dout[N C] inp[N F]^2 weight[C F]",
    "swiglu_forward": "out[N F] <- hidden[N 2F]*3",
    "swiglu_backward": "dhidden[N 2F] <- dout[N F] hidden[N 2F]*3",
    "linear_swiglu_forward": "out[N F] hidden[N 2F] <- inp[N C] weight[2F C]",
    "swiglu_linear_backward": "dhidden[N 2F] dinp[N F] dweight_acc[C F] <- dout[N C] inp[N F] hidden[N 2F] weight[C F]",
    "geglu_forward": "out[N F] <- hidden[N 2F]*3",
    "geglu_backward": "dhidden[N 2F] <- dout[N F] hidden[N 2F]*3",
    "classifier_forward": "losses[N] logits_inout[N Vp]*4 <- targets[N] | vocab_size",
    "classifier_forward_backward": "losses[N] logits_to_dlogits_inout[N Vp]*4 <- targets[N] scale[1] | vocab_size",
    "distill_forward_backward": "losses[N] logits_to_dlogits_inout[N Vp]*4"
    " <- teacher_logits[N Vp]*4 targets[N] scale[1] | vocab_size",
    "softcap_forward": "logits_inout[N V]*4 <- | softcap",
    "pixels_forward": "out[B Y X 3] <- tokens[B 3YX]",
    "squared_error_forward": "losses[B 3YX] <- prediction[B Y X 3] targets[B 3YX]",
    "squared_error_forward_backward": "losses[B 3YX] prediction_to_dprediction_inout[B Y X 3] <- targets[B 3YX] scale[1]",
    "conv_forward": "out[B Yo Xo F] <- inp[B Y X C] weight[F JJC] bias[F] | stride",
    "conv_backward": "dinp[B Y X C] dweight_acc[F JJC] dbias_acc[F] <- dout[B Yo Xo F] inp[B Y X C] weight[F JJC] | stride",
    "transposed_conv_forward": "out[B Y X C] <- inp[B Yo Xo F] weight[F JJC] bias[C] | stride",
    "transposed_conv_backward": "dinp[B Yo Xo F] dweight_acc[F JJC] dbias_acc[C]"
    " <- dout[B Y X C] inp[B Yo Xo F] weight[F JJC] | stride",
    "groupnorm_forward": "out[B Y X C] mean[B Q] rstd[B Q] <- inp[B Y X C]+ weight[C] bias[C]",
    "groupnorm_backward": "dresidual_inout[B Y X C] dweight_acc[C] dbias_acc[C]"
    " <- dout[B Y X C] inp[B Y X C] mean[B Q] rstd[B Q] weight[C]",
    "silu_forward": "out[N F] <- inp[N F]*3",
    "silu_backward": "dhidden_inout[N F] <- inp[N F]*3",
    "fsq_forward": "out[B Y X Z] <- inp[B Y X Z] | levels",
    "fsq_backward": "dhidden_inout[B Y X Z] <- inp[B Y X Z] | levels",
    "vq_forward": "out[B Y X Z] codes[B YX] errors[B YX] <- inp[B Y X Z] codebook[E Z1]",
    "vq_backward": "dinp_inout[B Y X Z] sums_acc[E Z1] <- inp[B Y X Z] codes[B YX] codebook[E Z1] scale[1] | commitment",
}
TENSOR = re.compile(r"(\w+)\[([^]]+)\](\*\d+|\+|\^2)?")
WIDE = {"mean", "rstd", "lse", "losses", "errors", "gate", "scale"}  # tensors in the accumulator dtype
SETTINGS = {
    "num_heads": lambda sizes: sizes["H"],
    "length": lambda sizes: sizes["T"],
    "vocab_size": lambda sizes: sizes["V"],
    "epsilon": lambda sizes: 1e-3,  # large enough to show
    "frequencies": lambda sizes: tuple(500000.0 ** (-2 * pair / sizes["D"]) for pair in range(sizes["D"] // 2)),
    "scale": lambda sizes: 1.2,
    "softcap": lambda sizes: 15.0,
    "stride": lambda sizes: sizes["S"],
    "levels": lambda sizes: (8, 5, 5, 5),
    "commitment": lambda sizes: 1.0,  # with any other, the sum is no function's gradient
}


def complete(stated: Sizes) -> Sizes:
    """Completes the stated sizes. N without T means one row of N positions; a stated D sets C = H D."""
    s = SIZES | ({"B": 1, "T": stated["N"]} if "N" in stated and "T" not in stated else {}) | stated
    s["D"] = s.get("D", s["C"] // s["H"])
    s["C"] = s["H"] * s["D"] if "D" in stated else s["C"]
    s = {"N": s["B"] * s["T"], "K": s["H"], "M": s["T"]} | s
    convolved = {f"{side}o": (s[side] + 2 * ((s["J"] - 1) // 2) - s["J"]) // s["S"] + 1 for side in "YX"}
    pictures = {"YX": s["Y"] * s["X"], "JJC": s["J"] * s["J"] * s["C"], "Z1": s["Z"] + 1, **convolved}
    return s | pictures | {"P": (s["H"] + 2 * s["K"]) * s["D"], "R": s["H"] + s["K"], "": 1}


def length(dimension: str, sizes: Sizes) -> int:
    """The size of a dimension such as C, or of a multiple such as 3C."""
    size = dimension.lstrip("0123456789")
    return int(dimension.removesuffix(size) or 1) * sizes[size]


class Draw:
    """Draws random arguments, the same on every device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.dtype, self.device, self.generator = dtype, torch.device(device), torch.Generator().manual_seed(0)
        self.wide = accumulation_dtype(dtype)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=self.wide) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def float32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, scale=scale, dtype=torch.float32)

    def float64(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype or self.dtype, device=self.device)

    def arguments(self, operation: str, **changes: Any) -> Arguments:
        """The arguments of a call, without scratch. Outputs start as NaN, accumulators as a sentinel. `changes` sets sizes
        (capital names) and replaces drawn arguments."""
        sizes = complete({name: value for name, value in changes.items() if name[0].isupper()})
        changes = {name: value for name, value in changes.items() if not name[0].isupper()}
        if operation not in CALLS:
            return OPTIMIZING[operation](self, sizes) | changes
        arguments: Arguments = {}
        tensors, _, settings = CALLS[operation].partition("|")
        for written, part in zip((True, False), tensors.split("<-"), strict=True):
            for name, dimensions, change in TENSOR.findall(part):
                shape = [length(dimension, sizes) for dimension in dimensions.split()]
                arguments[name] = (
                    changes[name] if name in changes else self.tensor(name, shape, change, sizes, written=written)
                )
        if arguments.get("sorted_positions") is not None and "sorted_positions" not in changes:
            arguments["sorted_positions"] = torch.sort(arguments["tokens"].view(-1), stable=True).indices.int()
        if operation == "attention_backward":  # it needs the output and log-sums of these queries, keys and values
            forward = {name: value for name, value in (arguments | changes).items() if name not in ("dqkv", "dout")}
            reference.attention_forward(**forward)
        if changes.get("untrained"):
            arguments["targets"][::5] = -1
        arguments |= {name: SETTINGS[name](sizes) for name in settings.split()}
        return arguments | changes

    def tensor(self, name: str, shape: list[int], change: str, sizes: Sizes, *, written: bool) -> Tensor:
        dtype = self.wide if name in WIDE else self.dtype
        if name.endswith("_acc"):
            return torch.full(shape, SENTINEL, dtype=self.wide, device=self.device)
        if written and not name.endswith("_inout"):
            return self.empty(*shape, dtype=dtype) if name != "codes" else torch.full(shape, -1, device=self.device)
        if name == "codes":
            return self.integers(sizes["E"], *shape)
        if name in ("tokens", "targets", "sorted_positions"):
            words = self.integers(sizes["V"], *shape)
            words.view(-1)[0], words.view(-1)[-1] = sizes["V"] - 1, 0
            return words
        x = self(*shape, dtype=dtype)
        if name in ("rstd", "gate"):  # from 1/2 to 2: sums over many rows still fit float16
            return torch.exp2(torch.tanh(x))
        if name == "scale":
            return x.fill_(0.37)
        if name.endswith("_scalar"):
            return x * 0.1 + (1.0 if name == "residual_scalar" else 0.3)
        if name.endswith("weight") and len(shape) == 2:  # keeps a GEMM's output as large as its input
            x *= shape[1] ** -0.5
        if change == "+":
            x = x * 2 + 0.5
        elif change == "^2":
            x = x.clamp(min=0).square()
        elif change:
            x *= float(change[1:])
        if "logits" in name:
            x[:, sizes["V"] :] = math.nan if written else 6e4  # no operation may read the padded vocabulary
        return x


# Operations of the optimizer and sums, each with its own draw.

CLIPPED = (1.0, 1.0, 0.25, float(UPDATE), 1.0)  # results of a step
MOMENTUM_GROWS = 150.0, 0.02  # step and learning rate


def controls(d: Draw, step: float, learning_rate: float, tokens: float = math.inf) -> Tensor:
    return d.float64(step, learning_rate, *[math.inf] * (CONTROLS - 3), tokens)


def verdict(d: Draw, s: Sizes) -> Arguments:
    sums = {"sum_of_losses": d.float64(2.5 * s["N"], 0.5 * s["N"]), "norm_partials": d.float32(64).square()}
    scale = {"loss_scale_inout": torch.tensor([1 / s["N"], 1.0, 0.0], device=d.device)}
    settings = {"gradient_tokens": s["N"], "clip_norm": 1.0, "dynamic_loss_scale": False}
    results = d.empty(RESULTS, dtype=torch.float64)
    return {"results": results, **sums, **scale, "controls": controls(d, 1.0, 1e-3, s["N"]), **settings}


def adamw_update(d: Draw, s: Sizes) -> Arguments:
    size = 3 * 4096
    state = {name: d.float32(size) for name in ("weight_inout", "m_inout", "gradient_inout")}
    buffers = {"controls": controls(d, 3.0, 0.5), "results": d.float64(1.0, 1.0, 1.0, float(UPDATE), 1.0)}
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    return {"published": d.empty(size), "v_inout": d.float32(size).square(), **state, **buffers, **settings}


def muon_momentum(d: Draw, s: Sizes) -> Arguments:
    tensors = {"update": d.empty(s["F"], s["C"]), "m_inout": d.float32(s["F"], s["C"])}
    buffers = {"controls": controls(d, *MOMENTUM_GROWS), "results": d.float64(*CLIPPED)}
    return {**tensors, "gradient": d.float32(s["F"], s["C"]), **buffers, "momentum": 0.95}


def muon_update(d: Draw, s: Sizes) -> Arguments:
    """A polar factor whose rows differ in size."""
    rows, columns = s["C"], s["F"]
    factor = d(rows, columns, scale=columns**-0.5) * torch.linspace(0.1, 1, rows, device=d.device, dtype=d.dtype)[:, None]
    state = {"weight_inout": d.float32(rows, columns), "moments_inout": d.float32(rows).square()}
    buffers = {"controls": controls(d, *MOMENTUM_GROWS), "results": d.float64(*CLIPPED)}
    settings = {"rate": 2.0, "beta2": 0.95, "weight_decay": 0.1}
    return {"published": d.empty(rows, columns), **state, "polar": factor, **buffers, **settings}


def digest(d: Draw, s: Sizes) -> Arguments:
    sums = torch.zeros(2, dtype=torch.int64, device=d.device)
    return {"out_acc": sums, "flat": d(3 * 4096 + 5), "controls": d.float64(*[7.0] * CONTROLS), "first": 8 * 4096 - 16}


OPTIMIZING = {
    "loss_sum": lambda d, s: {"sum_acc": d.float64(2.0), "losses": d.float32(s["N"]).square()},
    "squared_norms": lambda d, s: {
        "out": d.empty(16, dtype=torch.float32),
        "flat": d.float32(15 * 4096 + 640),
        "block_elements": 4096,
    },
    "tree_sum": lambda d, s: {
        "out": d.empty(2 * 4096, dtype=torch.float32),
        "pieces": d.float32(4, 2 * 4096),
        "rounded": False,
    },
    "checksum": lambda d, s: {"out": torch.zeros(1, dtype=torch.int64, device=d.device), "flat": d(3 * 4096 + 5)},
    "digest": digest,
    "verdict": verdict,
    "adamw_update": adamw_update,
    "muon_momentum": muon_momentum,
    "muon_polar": lambda d, s: {"update_to_polar_inout": d(3, s["C"], s["F"])},
    "muon_update": muon_update,
}

# Gradients.


class Pair(NamedTuple):
    """The forward of a backward, and which backward arguments are the gradients of its outputs and inputs."""

    forward: str
    outputs: dict[str, str]  # forward output: the backward argument that is its gradient
    inputs: dict[str, str]  # forward input: the backward argument that receives its gradient


# forward output:backward argument that is its gradient <- forward input:backward argument that receives its gradient
GRADIENTS = {
    "embedding_backward": "out:dout <- wte:dwte_acc wpe:dwpe_acc",
    "token_embedding_backward": "out:dout <- wte:dwte_acc",
    "layernorm_backward": "out:dout <- inp:dresidual_inout weight:dweight_acc bias:dbias_acc",
    "linear_backward": "out:dout <- inp:dinp weight:dweight_acc bias:dbias_acc",
    "attention_backward": "out:dout <- qkv:dqkv",
    "gelu_backward": "out:dhidden_inout <- inp:dhidden_inout",
    # The training loss, which may have terms that the validation loss lacks.
    "classifier_forward_backward": "losses:scale <- logits_to_dlogits_inout:logits_to_dlogits_inout",
    "distill_forward_backward": "losses:scale <- logits_to_dlogits_inout:logits_to_dlogits_inout",
    "rmsnorm_backward": "out:dout <- inp:dresidual_inout gain:dgain_acc",
    "mix_rmsnorm_backward": "mixed:dstream_inout out:dout <- inp:dstream_inout first:dfirst_inout"
    " residual_scalar:dresidual_scalar_acc input_scalar:dinput_scalar_acc",
    "rotary_backward": "qkv_inout:dqkv_inout <- qkv_inout:dqkv_inout",
    "qk_norm_backward": "qkv_inout:dqkv_inout <- qkv_inout:dqkv_inout",
    "qk_norm_rotary_backward": "qkv_inout:dqkv_inout <- qkv_inout:dqkv_inout",
    "gained_qk_norm_rotary_backward": "out:dqkv_inout <- qkv:dqkv_inout q_gain:dq_gain_acc k_gain:dk_gain_acc",
    "value_embedding_backward": "qkv_inout:dqkv"
    " <- qkv_inout:dqkv norm:dnorm_inout gate_weight:dgate_weight_acc table:dvalues",
    "relu2_backward": "hidden_inout:dhidden_inout <- hidden_inout:dhidden_inout",
    "swiglu_backward": "out:dout <- hidden:dhidden",
    "geglu_backward": "out:dout <- hidden:dhidden",
    "squared_error_forward_backward": "losses:scale <- prediction_to_dprediction_inout:prediction_to_dprediction_inout",
    "conv_backward": "out:dout <- inp:dinp weight:dweight_acc bias:dbias_acc",
    "transposed_conv_backward": "out:dout <- inp:dinp weight:dweight_acc bias:dbias_acc",
    "groupnorm_backward": "out:dout <- inp:dresidual_inout weight:dweight_acc bias:dbias_acc",
    "silu_backward": "out:dhidden_inout <- inp:dhidden_inout",
    "fsq_backward": "out:dhidden_inout <- inp:dhidden_inout",
    "vq_backward": "errors:scale <- inp:dinp_inout",
}


def pair_of(backward: str, gradients: str) -> Pair:
    forward = backward if "forward" in backward else backward.replace("_backward", "_forward")
    outputs, inputs = (dict(one.split(":") for one in part.split()) for part in gradients.split("<-"))
    return Pair(forward, outputs, inputs)


PAIRS = {backward: pair_of(backward, gradients) for backward, gradients in GRADIENTS.items()}


class BothWays(NamedTuple):
    """The arguments and gradients of a forward and its backward on the same numbers."""

    before: Arguments  # forward arguments before the call
    after: Arguments
    backward_before: Arguments
    backward_after: Arguments
    of_outputs: dict[str, Tensor]  # the gradient of each output that has one
    of_inputs: dict[str, Tensor]  # the gradient of each input, less what its accumulator or stream held before


def both_ways(ops: ModuleType, backward: str, d: Draw, **changes: Any) -> BothWays:
    """Runs a forward, then its backward. `changes` as in `Draw.arguments`; each operation gets only arguments it has."""
    pair = PAIRS[backward]
    own, other = (
        set(re.findall(r"\w+(?=\[)|epsilon|commitment", CALLS[operation])) for operation in (pair.forward, backward)
    )
    before = d.arguments(pair.forward, **{name: value for name, value in changes.items() if name not in other - own})
    after = copies(before)
    call(getattr(ops, pair.forward), pair.forward, after)
    arguments = d.arguments(backward, **{name: value for name, value in changes.items() if name not in own - other})
    for name, _, _ in TENSOR.findall(CALLS[backward].split("<-")[1]):
        if name not in pair.outputs.values():
            output = next(iter(pair.outputs)) if name == "out" and name not in after else name
            arguments[name] = after.get(output, after.get(f"{name}_inout", arguments[name]))
    if backward == pair.forward:
        arguments |= {name: before[name].clone() for name in pair.inputs}
    start = copies(arguments)
    call(getattr(ops, backward), backward, arguments)
    gradients = {}
    for of, name in pair.inputs.items():
        gradient = arguments[name]
        if gradient is not None and name not in pair.outputs.values() and name.startswith("d"):
            gradient = gradient - start[name] if name.endswith(("_acc", "_inout")) else gradient
        if name == "dvalues":  # gradients of looked-up rows
            gradient = torch.zeros_like(before[of]).index_add_(0, before["tokens"].view(-1), gradient)
        gradients[of] = gradient
    of_outputs = {output: start[name] for output, name in pair.outputs.items()}
    return BothWays(before, after, start, arguments, of_outputs, gradients)


def call(function: Callable[..., None], operation: str, arguments: Arguments) -> None:
    tensors = [name for name, _, _ in TENSOR.findall(CALLS[operation])]
    settings = {name: value for name, value in arguments.items() if name not in tensors}
    function(*(arguments[name] for name in tensors), **settings)


def copies(arguments: Arguments, dtype: torch.dtype | None = None) -> Arguments:
    """Copies of the tensors; `dtype` converts floating-point ones. Other values stay."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(dtype or value.dtype if value.is_floating_point() else value.dtype, copy=True)

    return {name: copied(value) for name, value in arguments.items()}
