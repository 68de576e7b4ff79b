"""Causal attention by the faster of two: cuDNN's flash attention, with its deterministic backward, for heads of more than
64 channels; Triton kernels otherwise, and for rows that hold documents, because cuDNN's graphs have windows but not that
mask.

This module builds a cuDNN graph once per shape; the graph reads the packed buffers through strides. The cuDNN backward
that torch binds is not deterministic; this one, with `use_deterministic_algorithm`, is.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from handgrad.ops import sizes
from handgrad.ops.cuda import attention_triton
from handgrad.ops.reference.attention import CAUSAL, Mask, split_heads
from handgrad.ops.sizes import CUDNN_HEADS

HOPPER = (9, 0)  # the GPUs where cuDNN was measured against the Triton kernels
HALVES = (torch.bfloat16, torch.float16)


@functools.cache
def installed() -> bool:
    """True if cuDNN's frontend package is installed."""
    return importlib.util.find_spec("cudnn") is not None


def cudnn_runs(dtype: torch.dtype, head_width: int) -> bool:
    """True if attention goes to cuDNN for these heads on this GPU."""
    return dtype in HALVES and head_width in CUDNN_HEADS and installed() and torch.cuda.get_device_capability() == HOPPER


def describe() -> str:
    """Names the kernels that attention uses on this GPU in 16-bit precisions."""
    if torch.cuda.get_device_capability() != HOPPER:
        return "Triton"
    if not installed():
        return f"Triton (from {CUDNN_HEADS.start} channels per head cuDNN is faster: pip install nvidia-cudnn-frontend)"
    import cudnn

    return f"Triton, cuDNN {cudnn.backend_version()} from {CUDNN_HEADS.start} channels per head"


@functools.cache
def handle() -> Any:
    import cudnn

    return cudnn.create_handle()


class Graph:
    """A cuDNN graph over B samples with H query heads and K heads of keys and values, its tensors by name, and the size of
    its workspace."""

    def __init__(self, B: int, H: int, K: int, T: int, D: int, dtype: torch.dtype):
        import cudnn

        kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
        single = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle()
        )
        # (shape, strides in elements, type) of packed queries or keys, of an output, and of lse.
        C, row = H * D, (H + 2 * K) * D
        queries, keys = (([B, heads, T, D], [row * T, D, row, 1], kind) for heads in (H, K))
        out, lse = ([B, H, T, D], [C * T, D, C, 1], kind), ([B, H, T, 1], [H * T, T, 1, 1], single)
        self.layouts = {"q": queries, "dq": queries, "out": out, "dout": out, "lse": lse}
        self.layouts |= dict.fromkeys(("k", "v", "dk", "dv"), keys)
        self.tensors: dict[str, Any] = {}
        self.workspace_bytes = 0

    def input(self, name: str) -> Any:
        dims, strides, kind = self.layouts[name]
        self.tensors[name] = self.graph.tensor(name=name, dim=dims, stride=strides, data_type=kind)
        return self.tensors[name]

    def output(self, name: str, tensor: Any) -> None:
        dims, strides, kind = self.layouts[name]
        tensor.set_output(True).set_dim(dims).set_stride(strides).set_data_type(kind)
        self.tensors[name] = tensor

    def build(self) -> "Graph":
        import cudnn

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace_bytes = self.graph.get_workspace_size()
        return self

    def execute(self, scratch: Tensor, **values: Tensor) -> None:
        import cudnn

        cudnn.set_stream(handle=handle(), stream=torch.cuda.current_stream().cuda_stream)
        assert scratch.numel() >= self.workspace_bytes, f"{self.workspace_bytes} bytes wanted, {scratch.numel()} there"
        self.graph.execute({self.tensors[name]: value for name, value in values.items()}, scratch, handle=handle())


@functools.cache
def forward_graph(B: int, H: int, K: int, T: int, D: int, dtype: torch.dtype, window: int = 0) -> Graph:
    g = Graph(B, H, K, T, D, dtype)
    q, k, v = (g.input(name) for name in "qkv")
    scale = 1.0 / math.sqrt(D)
    within = {"diagonal_band_left_bound": window} if window else {}
    options = {"attn_scale": scale, "use_causal_mask": True, **within}
    out, lse = g.graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **options)
    g.output("out", out)
    g.output("lse", lse)
    return g.build()


@functools.cache
def backward_graph(B: int, H: int, K: int, T: int, D: int, dtype: torch.dtype) -> Graph:
    g = Graph(B, H, K, T, D, dtype)
    q, k, v, out, dout, lse = (g.input(name) for name in ("q", "k", "v", "out", "dout", "lse"))
    options = {"attn_scale": 1.0 / math.sqrt(D), "use_causal_mask": True, "use_deterministic_algorithm": True}
    gradients = g.graph.sdpa_backward(name="backward", q=q, k=k, v=v, o=out, dO=dout, stats=lse, **options)
    for name, tensor in zip(("dq", "dk", "dv"), gradients, strict=True):
        g.output(name, tensor)
    return g.build()


def cudnn_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, window: int = 0) -> None:
    """Runs cuDNN's graph. Its workspace was 256 bytes wherever observed, so it fits the operations' common scratch."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv, B, H, out.shape[1] // H)
    graph = forward_graph(B, H, k.shape[1], T, q.shape[-1], qkv.dtype, window)
    y = out.view(B, T, H, -1).transpose(1, 2)
    graph.execute(scratch, q=q, k=k, v=v, out=y, lse=lse.unsqueeze(-1))


def cudnn_backward(dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv, B, H, out.shape[1] // H)
    dq, dk, dv = split_heads(dqkv, B, H, out.shape[1] // H)
    y, dy = (t.view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    graph = backward_graph(B, H, k.shape[1], T, q.shape[-1], qkv.dtype)
    graph.execute(scratch, q=q, k=k, v=v, out=y, dout=dy, lse=lse.unsqueeze(-1), dq=dq, dk=dk, dv=dv)


def attention_scratch_bytes(
    *,
    batch: int,
    length: int,
    num_heads: int,
    head_width: int,
    dtype: torch.dtype,
    kv_heads: int = 0,
    documents: bool = False,
    window: int = 0,
) -> int:
    if cudnn_runs(dtype, head_width) and not documents and not 0 < window < length:
        heads = num_heads, kv_heads or num_heads
        return backward_graph(batch, *heads, length, head_width, dtype).workspace_bytes
    return sizes.attention_scratch_bytes(batch=batch, length=length, num_heads=num_heads)


def forward_in_cudnn(out: Tensor, lse: Tensor, mask: Mask) -> bool:
    return cudnn_runs(out.dtype, out.shape[1] // lse.shape[1]) and (mask.document_starts is None or not mask.has_documents)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL) -> None:
    if forward_in_cudnn(out, lse, mask):
        cudnn_forward(out, lse, qkv, scratch=scratch, window=mask.window)
    else:
        attention_triton.attention_forward(out, lse, qkv, mask=mask)


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL
) -> None:
    """A window goes to Triton: cuDNN's backward computes what it hides as well."""
    inputs = dout, out, lse, qkv
    if cudnn_runs(qkv.dtype, dout.shape[1] // lse.shape[1]) and mask.document_starts is None:
        cudnn_backward(dqkv, *inputs, scratch=scratch)
    else:
        attention_triton.attention_backward(dqkv, *inputs, scratch=scratch, mask=mask)
