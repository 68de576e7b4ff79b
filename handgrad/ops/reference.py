"""Every operation of GPT-2 in plain torch, on any device: the specification that other backends are tested against.

On a CPU it is also the fast path: products, layer norm, GELU and attention call the library's own kernels with our
buffers. No autograd anywhere: the forward and the backward of an operation stand next to each other.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten

LAYERNORM_EPSILON = 1e-5

# Rows of a weight gradient that are multiplied before they are added to the accumulator, where the product itself cannot
# accumulate: the temporary of 1024 rows stays in the last-level cache, and the product runs as fast as in one piece.
ACCUMULATE_ROWS = 1024

CLASSIFIER_BLOCK_ELEMENTS = 1 << 19  # of the softmax's float32 temporary: 2 MiB


def uses_cpu_kernels(tensor: Tensor) -> bool:
    """Whether the library's CPU-only kernels apply; elsewhere the same mathematics runs in plain products."""
    return tensor.device.type == "cpu"


# Embedding: x[n] = wte[token[n]] + wpe[position[n]].


def embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T) + wpe (maxT, C) at 0..T-1."""
    B, T = tokens.shape
    torch.index_select(wte, 0, tokens.view(-1), out=out)
    out.view(B, T, -1).add_(wpe[:T])


def embedding_backward(dwte_acc: Tensor, dwpe_acc: Tensor, dout: Tensor, tokens: Tensor) -> None:
    """dwte_acc[token[n]] += dout[n]; dwpe_acc[t] += sum over the batch of dout[b, t]. dout is (N, C).

    Equal tokens are added in a fixed order: on a CPU one row after another, elsewhere sorted first (`index_put_`).
    """
    B, T = tokens.shape
    dout = dout.to(dwte_acc.dtype)
    if uses_cpu_kernels(dwte_acc):
        dwte_acc.index_add_(0, tokens.view(-1), dout)  # one row after another: 14 times faster than index_put_
    else:
        dwte_acc.index_put_((tokens.view(-1),), dout, accumulate=True)
    dwpe_acc[:T].add_(dout.view(B, T, -1).sum(0))


# Layer norm (Ba et al. 2016): x^ = (x - mean) rstd, y = x^ w + b, over the last axis, statistics in float32.
# Backward: with g = dy w,  dx = rstd (g - mean(g) - x^ mean(g x^)),  dw = sum dy x^,  db = sum dy.


def layernorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    """out, inp (N, C); mean, rstd (N); weight, bias (C)."""
    # Weights of the statistics' dtype make the library keep the statistics in that dtype for bf16 inputs, too.
    weight, bias = weight.to(mean.dtype), bias.to(mean.dtype)
    N, C = inp.shape
    if uses_cpu_kernels(inp):
        results = {"out0": out, "out1": mean.view(N, 1), "out2": rstd.view(N, 1)}
        aten.native_layer_norm.out(inp, (C,), weight, bias, LAYERNORM_EPSILON, **results)
        return
    # A GPU's kernel wants one dtype for all.
    results = aten.native_layer_norm(inp.to(mean.dtype), (C,), weight, bias, LAYERNORM_EPSILON)
    for destination, result in zip((out, mean, rstd), results, strict=True):
        destination.copy_(result.view(destination.shape))


def layernorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
) -> None:
    """Adds dL/dinp to the residual stream's gradient (N, C), and the parameter gradients (C) to theirs."""
    N, C = inp.shape
    weight = weight.to(mean.dtype)
    if not uses_cpu_kernels(inp):
        dout, inp = dout.to(mean.dtype), inp.to(mean.dtype)
    mean, rstd = mean.view(N, 1), rstd.view(N, 1)
    dinp, dweight, dbias = aten.native_layer_norm_backward(dout, inp, (C,), mean, rstd, weight, weight, [True, True, True])
    dresidual_inout.add_(dinp)
    dweight_acc.add_(dweight)
    dbias_acc.add_(dbias)


# Linear: y = x W^T + b, W (out, in).  dx = dy W,  dW = dy^T x,  db = sum over tokens of dy.


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K) right (N, K)^T + bias (N), by oneDNN. In float32 it runs at 300 to 440 GFLOP/s on two AVX-512 cores of
    AMD's, where the BLAS behind `torch.mm` runs at 190; it has no accumulating and no out= form."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prefers_onednn(tensor: Tensor) -> bool:
    """Float32 on a CPU whose torch has oneDNN. In bf16 `torch.mm` calls oneDNN itself; it has no float64."""
    return tensor.dtype == torch.float32 and uses_cpu_kernels(tensor) and torch.backends.mkldnn.is_available()


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out (N, O) = inp (N, I) weight (O, I)^T + bias (O)."""
    if prefers_onednn(inp):
        out.copy_(product(inp, weight, bias))
    elif bias is None:
        torch.mm(inp, weight.t(), out=out)
    else:
        torch.addmm(bias, inp, weight.t(), out=out)


def linear_backward(
    dinp: Tensor, dweight_acc: Tensor, dbias_acc: Tensor | None, dout: Tensor, inp: Tensor, weight: Tensor
) -> None:
    """dinp (N, I) = dout (N, O) weight; dweight_acc (O, I) += dout^T inp; dbias_acc (O) += column sums of dout."""
    onednn = prefers_onednn(inp)
    if onednn:
        dinp.copy_(product(dout, weight.t()))
    else:
        torch.mm(dout, weight, out=dinp)
    if dweight_acc.dtype == inp.dtype and not onednn:
        dweight_acc.addmm_(dout.t(), inp)  # accumulates inside the product
    else:
        # By blocks of rows, whose temporary stays in cache. The library writes a bf16 product in bf16: there the sum over
        # this call's tokens is rounded once, then added in float32.
        step = ACCUMULATE_ROWS if uses_cpu_kernels(inp) else dweight_acc.shape[0]
        for row in range(0, dweight_acc.shape[0], step):
            rows = slice(row, row + step)
            left = dout[:, rows].t()
            dweight_acc[rows].add_(product(left, inp.t()) if onednn else torch.mm(left, inp))
    if dbias_acc is not None:
        dbias_acc.add_(dout.sum(0, dtype=dbias_acc.dtype))


# GELU, tanh form (Hendrycks & Gimpel 2016): y = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3).
# dy/dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) sqrt(2/pi) (1 + 3 * 0.044715 x^2).


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    """out, inp (N, F)."""
    aten.gelu.out(inp, approximate="tanh", out=out)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    """Turns the gradient after the GELU into the gradient before it, in place; inp (N, F) is the GELU's input."""
    aten.gelu_backward.grad_input(dhidden_inout, inp, approximate="tanh", grad_input=dhidden_inout)


# Residual: out = a + b. Its backward is the identity: both inputs receive the residual stream's gradient.


def residual_forward(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out, a, b (N, C)."""
    torch.add(a, b, out=out)


# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Backward: dv = P^T dy,  dP = dy v^T,  dS = P (dP - rowsum(dy y)),  dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).


def split_heads(packed: Tensor, batch: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views (B, H, T, D) of the packed (N, 3C), whose rows hold q, k, v, each head after head."""
    N, C3 = packed.shape
    q, k, v = packed.view(batch, N // batch, 3, num_heads, C3 // (3 * num_heads)).permute(2, 0, 3, 1, 4)
    return q, k, v


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor) -> None:
    """out (N, C), lse (B, H, T) = log of the softmax's denominator, from qkv (N, 3C)."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)  # a CPU's flash attention is 1.6 to 1.8 times slower in bf16
    y = out.view(B, T, H, -1).transpose(1, 2)
    if uses_cpu_kernels(qkv):  # the library's flash attention: never forms (T, T)
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        y.copy_(result)
        lse.copy_(log_sums)
        return
    for b in range(B):  # one batch entry at a time bounds the (H, T, T) scores
        scores = causal_scores(q[b], k[b])
        lse[b] = scores.logsumexp(-1)
        y[b] = torch.matmul(torch.exp_(scores.sub_(lse[b].unsqueeze(-1))), v[b])


def attention_backward(dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C)."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    parts = split_heads(dqkv, B, H)
    if uses_cpu_kernels(qkv):
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, True)
        for part, result in zip(parts, results, strict=True):
            part.copy_(result)
        return
    dq, dk, dv = parts
    scale = 1.0 / math.sqrt(q.shape[-1])
    for b in range(B):
        weights = torch.exp_(causal_scores(q[b], k[b]).sub_(lse[b].unsqueeze(-1)))
        dscores = torch.matmul(dy[b], v[b].transpose(-1, -2)).sub_((dy[b] * y[b]).sum(-1, keepdim=True)).mul_(weights)
        dv[b] = torch.matmul(weights.transpose(-1, -2), dy[b])
        dq[b] = torch.matmul(dscores, k[b]).mul_(scale)
        dk[b] = torch.matmul(dscores.transpose(-1, -2), q[b]).mul_(scale)


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D) of (H, T, D) each, minus infinity where the key comes after the query."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(1.0 / math.sqrt(q.shape[-1]))
    T = q.shape[-2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(later, -math.inf)


def attention_decode(out: Tensor, keys_inout: Tensor, values_inout: Tensor, qkv: Tensor, *, position: int) -> None:
    """One new token per sequence: appends its key and value to the caches (B, H, maxT, D) at `position`, and attends to
    positions 0..position. out (B, C), qkv (B, 3C). Forward only: it serves generation."""
    B, H, _, _ = keys_inout.shape
    q, k, v = split_heads(qkv, B, H)  # (B, H, 1, D)
    keys_inout[:, :, position] = k[:, :, 0]
    values_inout[:, :, position] = v[:, :, 0]
    keys, values = keys_inout[:, :, : position + 1], values_inout[:, :, : position + 1]
    exact = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(exact), keys.to(exact).transpose(-1, -2)).mul_(1.0 / math.sqrt(q.shape[-1]))
    y = torch.matmul(torch.softmax(scores, -1), values.to(exact))
    out.view(B, H, 1, -1).copy_(y)


# Classifier: loss = logsumexp(logits) - logits[target], over the V real words; the padded columns do not exist.
# Backward: dlogits = (softmax(logits) - onehot(target)) * scale, and 0 in the padded columns.


def classifier_forward(losses: Tensor, logits_inout: Tensor, targets: Tensor, *, vocab_size: int) -> None:
    """losses (N) from logits (N, Vp) and targets (N). Masks the padded columns of the logits with minus infinity."""
    for rows, target, log_p in _log_softmax_blocks(losses.dtype, logits_inout, targets, vocab_size):
        losses[rows] = log_p.gather(1, target).squeeze(1).neg_()


def classifier_forward_backward(
    losses: Tensor, logits_to_dlogits_inout: Tensor, targets: Tensor, *, vocab_size: int, scale: float
) -> None:
    """losses (N), and the logits (N, Vp) turned into scale * dlosses/dlogits in place, from targets (N)."""
    for rows, target, log_p in _log_softmax_blocks(losses.dtype, logits_to_dlogits_inout, targets, vocab_size):
        losses[rows] = log_p.gather(1, target).squeeze(1).neg_()
        p = log_p.exp_()  # exactly 0 in the padded columns
        p.scatter_add_(1, target, torch.full_like(target, -1, dtype=p.dtype))
        torch.mul(p, scale, out=logits_to_dlogits_inout[rows])


def _log_softmax_blocks(
    dtype: torch.dtype, logits_inout: Tensor, targets: Tensor, vocab_size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, targets (R, 1), log softmax (R, Vp)) by blocks of rows, whose temporaries stay in cache: 9 ms instead of
    21 for 256 rows of GPT-2's vocabulary on two cores. Masking instead of slicing keeps the rows contiguous."""
    N, Vp = logits_inout.shape
    logits_inout[:, vocab_size:] = -math.inf
    rows_per_block = max(1, CLASSIFIER_BLOCK_ELEMENTS // Vp) if uses_cpu_kernels(logits_inout) else N
    for row in range(0, N, rows_per_block):
        rows = slice(row, min(row + rows_per_block, N))
        yield rows, targets[rows].unsqueeze(1), torch.log_softmax(logits_inout[rows], 1, dtype=dtype)


# Global norm: sums of squares over fixed-size blocks, so that no number of threads, devices or shards changes the sum.


def squared_norms(out: Tensor, flat: Tensor) -> None:
    """out (blocks) = sum of squares of each block of flat (blocks * block size), a buffer of gradients."""
    torch.linalg.vector_norm(flat.view(out.shape[0], -1), dim=1, out=out)  # one pass over memory; square + sum takes 13x
    out.square_()


# AdamW (Loshchilov & Hutter 2019), with the gradient g scaled first:
# m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
# w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).


def adamw_update(
    weight_inout: Tensor,
    m_inout: Tensor,
    v_inout: Tensor,
    gradient_inout: Tensor,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    gradient_scale: float,
) -> None:
    """One update of flat float32 (or float64) buffers of equal length; `step` counts from 1. The gradient is left
    multiplied by `gradient_scale` (a factor <= 1 from clipping, rounded to float32).

    Cut flat buffers at multiples of 128 elements only: the library's kernel rounds a cut vector's tail differently.
    """
    one = torch.ones((), dtype=torch.float32, device=weight_inout.device)
    aten._fused_adamw_(
        [weight_inout],
        [gradient_inout],
        [m_inout],
        [v_inout],
        [],
        [one * step],
        lr=learning_rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None if gradient_scale == 1.0 else one / gradient_scale,
    )
