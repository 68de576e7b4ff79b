"""Checks of the kernels of the Llama family, for the interpreter on a CPU and for a GPU alike: the rules are those of
`memory_checks`."""

from types import ModuleType

import torch

from handgrad.networks.llama import LlamaShape
from handgrad.ops import reference
from tests.kernels.memory_checks import Case, Draw, Tensors, both, nan, poisoned, statistics_dtype


def heads(draw: Draw, N: int, H: int, K: int, D: int, length: int, scale: float, *, plus: int = 0) -> list[Case]:
    """Rotation alone, and after a norm with gains, from which `plus` is missing; forward and backward."""
    turn = {"frequencies": LlamaShape(head_width=D, rotary_base=500000.0).frequencies, "scale": scale}
    sizes = {"N": N, "T": length, "H": H, "K": K, "D": D}
    stored = {"rotary": {}, "gained_qk_norm_rotary": {"plus": int(plus)}}
    return [each for name, more in stored.items() for each in both(draw, name, **sizes, **turn, **more)]


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
        ops.decode.gained_qk_norm_rotary_forward(*norm, positions=places, **turn, epsilon=1e-6, plus=int(K == 1))
        return {"turned": turned, "out": out, "rstd": rstd}

    return inputs, run
