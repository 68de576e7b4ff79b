"""Checks of the kernels of the Llama family, for the interpreter on a CPU and for a GPU alike: the rules are those of
`memory_checks`."""

from types import ModuleType

import torch

from handgrad.llama_shape import LlamaShape
from handgrad.ops import reference
from tests.kernels.memory_checks import SENTINEL, Case, Draw, Tensors, accumulator, nan, poisoned, statistics_dtype


def gained_rmsnorm(draw: Draw, N: int, C: int) -> Case:
    """Forward and backward."""
    inputs = {name: draw.normal(N, C) for name in ("dresidual", "dout", "inp")} | {"gain": draw.normal(C)}
    inputs["rstd"] = torch.exp2(torch.tanh(draw.normal(N, dtype=torch.float32)))

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        inp = t["inp"]
        out, rstd, dgain = nan(inp, N, C), nan(inp, N, dtype=statistics_dtype(inp)), accumulator(inp, C)
        ops.gained_rmsnorm_forward(out, rstd, inp, t["gain"], epsilon=1e-3)
        scratch = poisoned(inp, tokens=N, channels=C, widest=C)
        ops.gained_rmsnorm_backward(t["dresidual"], dgain, t["dout"], inp, t["rstd"], t["gain"], scratch=scratch)
        return {"out": out, "rstd": rstd, "dresidual": t["dresidual"], "dweight": dgain - SENTINEL}

    return inputs, run


def swiglu(draw: Draw, N: int, F: int) -> Case:
    inputs = {"hidden": draw.normal(N, 2 * F) * 3, "dout": draw.normal(N, F)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, dhidden = nan(t["hidden"], N, F), nan(t["hidden"], N, 2 * F)
        ops.swiglu_forward(out, t["hidden"])
        ops.swiglu_backward(dhidden, t["dout"], t["hidden"])
        return {"out": out, "dhidden": dhidden}

    return inputs, run


def heads(draw: Draw, N: int, H: int, K: int, D: int, length: int, scale: float) -> Case:
    """Rotation alone, and after a norm with gains; forward and backward."""
    columns = (H + 2 * K) * D
    inputs = {name: draw.normal(N, columns) for name in ("qkv", "dqkv")} | {"q": draw.normal(D), "k": draw.normal(D)}
    inputs |= {"rstd": torch.exp2(torch.tanh(draw.normal(N, H + K, dtype=torch.float32))), "dout": draw.normal(N, 1)}
    turn = {"frequencies": LlamaShape(head_width=D, rotary_base=500000.0).frequencies, "scale": scale, "length": length}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv, gains = t["qkv"], (t["q"], t["k"])
        found = {"rotated": qkv.clone(), "drotated": t["dqkv"].clone(), "normed": nan(qkv, N, columns)}
        ops.rotary_forward(found["rotated"], num_heads=H, **turn)
        ops.rotary_backward(found["drotated"], num_heads=H, **turn)
        rstd = nan(qkv, N, H + K, dtype=statistics_dtype(qkv))
        ops.gained_qk_norm_rotary_forward(found["normed"], rstd, qkv, *gains, **turn, epsilon=1e-3)
        sums, scratch = [accumulator(qkv, D) for _ in gains], poisoned(qkv, tokens=N, channels=columns, widest=columns)
        ops.gained_qk_norm_rotary_backward(t["dqkv"], *sums, qkv, t["rstd"], *gains, **turn, scratch=scratch)
        return found | {"rstd": rstd, "dnormed": t["dqkv"], "dweight": sums[0] - SENTINEL, "dbias": sums[1] - SENTINEL}

    return inputs, run


def attention_decode(draw: Draw, positions: list[int], H: int, K: int, D: int, longest: int) -> Case:
    B = len(positions)
    caches = {name: draw.normal(B, K, longest, D) for name in ("keys", "values")}
    inputs = caches | {"qkv": draw.normal(B, (H + 2 * K) * D)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, places = nan(t["qkv"], B, H * D), torch.tensor(positions, device=t["qkv"].device)
        scratch = (
            {"scratch": None} if ops is reference else {"scratch": poisoned(t["qkv"], tokens=B, channels=H * D, widest=H)}
        )
        ops.decode.attention_decode(out, t["keys"], t["values"], t["qkv"], places, **scratch)
        return {"out": out, "keys": t["keys"], "values": t["values"]}

    return inputs, run


def heads_decode(draw: Draw, positions: list[int], H: int, K: int, D: int) -> Case:
    B, columns = len(positions), (H + 2 * K) * D
    inputs = {"qkv": draw.normal(B, columns), "q": draw.normal(D), "k": draw.normal(D)}
    turn = {"frequencies": LlamaShape(head_width=D).frequencies, "scale": 1.2}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv, places = t["qkv"], torch.tensor(positions, device=t["qkv"].device)
        out, rstd, turned = nan(qkv, B, columns), nan(qkv, B, H + K, dtype=statistics_dtype(qkv)), qkv.clone()
        ops.decode.rotary_forward(turned, num_heads=H, positions=places, **turn)
        norm = out, rstd, qkv, t["q"], t["k"]
        ops.decode.gained_qk_norm_rotary_forward(*norm, positions=places, **turn, epsilon=1e-6)
        return {"turned": turned, "out": out, "rstd": rstd}

    return inputs, run
