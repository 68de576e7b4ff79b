"""cuDNN's attention over documents end to end, its deterministic backward included: a contender of
`benchmarks.attention_context`, which decides whether rows of documents should go to it.

A document is an entry of the batch that begins at an offset (a ragged tensor), under a padding mask by its length.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handgrad.ops.cuda.attention import Graph


class RaggedGraph(Graph):
    """A graph over documents of at most T tokens; q, k, v and their gradients lie in packed rows."""

    def __init__(self, documents: int, H: int, K: int, T: int, D: int, dtype: torch.dtype):
        import cudnn

        super().__init__(documents, H, K, T, D, dtype)
        kind = cudnn.data_type.INT32
        self.offsets = {
            name: self.graph.tensor(name=name, dim=[documents + 1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)
            for name in ("packed", "rows")
        }
        sizes: dict[str, Any] = {"dim": [documents, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": kind}
        self.tensors |= {"lengths": self.graph.tensor(name="lengths", **sizes), **self.offsets}
        lengths = self.tensors["lengths"]
        self.padded = {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}

    def ragged(self, name: str, tensor: Any) -> Any:
        return tensor if name == "lse" else tensor.set_ragged_offset(self.offsets["rows" if "out" in name else "packed"])

    def input(self, name: str) -> Any:
        return self.ragged(name, super().input(name))

    def output(self, name: str, tensor: Any) -> None:
        super().output(name, tensor)
        self.ragged(name, tensor)


class RaggedAttention:
    """Forward and backward over packed qkv (N, (H + 2K) D) of documents with these lengths."""

    def __init__(self, lengths: list[int], H: int, K: int, D: int, qkv: Tensor):
        longest, count, row = max(lengths), len(lengths), (H + 2 * K) * D
        sizes = count, H, K, longest, D, qkv.dtype
        scale = {"attn_scale": 1.0 / math.sqrt(D), "use_causal_mask": True}
        self.ahead = RaggedGraph(*sizes)
        out, lse = self.ahead.graph.sdpa(
            name="forward", generate_stats=True, **{n: self.ahead.input(n) for n in "qkv"}, **scale, **self.ahead.padded
        )
        self.ahead.output("out", out)
        self.ahead.output("lse", lse)
        self.back = RaggedGraph(*sizes)
        named = {"q": "q", "k": "k", "v": "v", "o": "out", "dO": "dout", "stats": "lse"}
        given = {theirs: self.back.input(ours) for theirs, ours in named.items()}
        options = {**scale, **self.back.padded, "use_deterministic_algorithm": True}
        gradients = self.back.graph.sdpa_backward(name="backward", **given, **options)
        for name, tensor in zip(("dq", "dk", "dv"), gradients, strict=True):
            self.back.output(name, tensor)
        self.ahead.build()
        self.back.build()
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=qkv.device)
        self.common = {
            "lengths": torch.tensor(lengths, dtype=torch.int32, device=qkv.device),
            "packed": starts * row,
            "rows": starts * (H * D),
        }
        self.lse = torch.empty(count, H, longest, 1, device=qkv.device)
        size = max(self.ahead.workspace_bytes, self.back.workspace_bytes, 1)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=qkv.device)
        self.columns = [heads * D for heads in (H, K, K)]

    def forward(self, out: Tensor, qkv: Tensor) -> None:
        q, k, v = qkv.split(self.columns, 1)
        self.ahead.execute(self.scratch, q=q, k=k, v=v, out=out, lse=self.lse, **self.common)

    def backward(self, dqkv: Tensor, dout: Tensor, out: Tensor, qkv: Tensor) -> None:
        (q, k, v), (dq, dk, dv) = qkv.split(self.columns, 1), dqkv.split(self.columns, 1)
        inputs = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": self.lse}
        self.back.execute(self.scratch, **inputs, dq=dq, dk=dk, dv=dv, **self.common)
