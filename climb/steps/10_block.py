"""Step 10: read 10_block.md, write the function, then `handgrad climb check 10`."""

from types import SimpleNamespace

import torch
from torch import Tensor


def block(
    dout: Tensor, saved: SimpleNamespace, w: SimpleNamespace, ops: SimpleNamespace
) -> tuple[Tensor, dict[str, Tensor]]:
    """The backward of a block of GPT-2. Its forward was, with LN for layer norm:

        ln1 = LN(x, w.ln1_weight, w.ln1_bias)             ln2 = LN(mid, w.ln2_weight, w.ln2_bias)
        qkv = ln1 w.qkv_weight^T + w.qkv_bias             fc = ln2 w.fc_weight^T + w.fc_bias
        y, lse = attention(qkv)                           act = GELU(fc)
        mid = x + y w.proj_weight^T + w.proj_bias         out = mid + act w.fcproj_weight^T + w.fcproj_bias

    dout   (N, C)  the gradient of the loss with respect to out
    saved  x, ln1, y, mid, ln2 (N, C), qkv (N, 3C), fc, act (N, F), lse (B, H, T)
    ops    the backwards, each of which returns new tensors:
           linear(dy, x, weight) -> dx, dweight, dbias           gelu(dy, x) -> dx
           layer_norm(dy, x, weight) -> dx, dweight, dbias       attention(dy, y, lse, qkv) -> dqkv

    Returns dx (N, C), and the gradients by the names of w: qkv_weight, qkv_bias and so on, twelve in all.
    """
    raise NotImplementedError  # yours to write
