"""Vector quantisation: a code is the nearest vector of a codebook, which moving averages of the latents teach."""

import torch
from torch import Tensor

from handgrad import ops
from handgrad.ops.hashing import BITS32, WEYL, mixed
from handgrad.ops.reference.convolution import rows

# VQ-VAE (van den Oord et al. 2017, https://arxiv.org/abs/1711.00937). Equations 1 and 2: q(z) = e_k, k the nearest vector,
# argmin |z - e_j|^2. Equation 3 adds beta |z - sg(e)|^2 to the loss; sg stops gradients. With weight w:
#
#   dz = dq + 2 w beta (z - e_k), dq straight through
#
# |z - e|^2 = |z|^2 - 2 z.e + |e|^2, and |z|^2 does not change the argmin.
#
# A row of the codebook is (e, N): a vector, and the moving average of n, the number of a step's latents with this code. In
# appendix A.1, m = g m + (1 - g) sum(z), N = g N + (1 - g) n, e = m / N. Before a step m = N e, so with the new N
#
#   e -= (1 - g) sum(e - z) / N
#
# N is 0 at first, so e is the mean of the latents so far, the later ones with more weight.
SPLIT = 2.0**-10  # how far a moved vector lies from the one that it shares the latents of, relative to it
RARE = 1 / 32


def vq_forward(out: Tensor, codes: Tensor, errors: Tensor, inp: Tensor, codebook: Tensor) -> None:
    """out, inp (B, Y, X, Z); codes (B, Y X) int64, of ties the lowest; errors (B, Y X): |z - e|^2; codebook (E, Z + 1)."""
    z, vectors = rows(inp), codebook[:, :-1]
    distances = (vectors * vectors).sum(1) - 2 * z @ vectors.t()  # (B Y X, E), less |z|^2
    codes.copy_(distances.argmin(1).view(codes.shape))
    vq_values(out, codes, codebook)
    errors.copy_((inp - out).square().sum(3).view(errors.shape))


def vq_backward(
    dinp_inout: Tensor,
    sums_acc: Tensor,
    inp: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    commitment: float,
    weight: float = 1.0,
) -> None:
    """dinp_inout (B, Y, X, Z): the gradient of `out`, passed straight through, plus the commitment's; beta = `commitment`,
    w = weight * scale (1). sums_acc (E, Z + 1): plus scale * (sum(e - z), n)."""
    z, chosen = rows(inp), codebook[codes.view(-1)]
    difference = z - chosen[:, :-1]  # (B Y X, Z)
    rows(dinp_inout).add_(difference * (2 * weight * scale).to(z.dtype), alpha=commitment)
    uses = torch.zeros(len(z), len(codebook), dtype=z.dtype, device=z.device)
    uses.scatter_(1, codes.view(-1, 1), 1.0)  # a GEMM sums in one order, whatever the number of threads
    terms = torch.cat([-difference, torch.ones_like(z[:, :1])], 1)
    sums_acc.add_((uses.t() @ terms) * scale.to(z.dtype))


def vq_values(out: Tensor, codes: Tensor, codebook: Tensor) -> None:
    """out (B, Y, X, Z): the codebook's vectors of codes (B, Y X)."""
    rows(out).copy_(codebook[codes.view(-1), :-1])


def vq_update(
    published: Tensor, weight_inout: Tensor, sums: Tensor, controls: Tensor, results: Tensor, *, decay: float
) -> None:
    """One update of a codebook (E, Z + 1) by a step's sums (E, Z + 1), in any unit of n, unless the verdict in `results`
    forbids it. `published` receives the new one.

    Then it pairs codes, the least used with the most used, and so on. One used less than `RARE` times as often as the other
    moves beside it and takes half of its N: a split (Linde, Buzo and Gray 1980). Its direction is a hash of the step."""
    new, pairs = weight_inout.clone(), len(weight_inout) // 2
    vectors, usage = new[:, :-1], new[:, -1:]
    usage.mul_(decay).add_(sums[:, -1:], alpha=1 - decay)
    vectors.sub_((1 - decay) * sums[:, :-1] / usage.clamp(min=torch.finfo(new.dtype).tiny))  # without n there is no sum
    order = usage.view(-1).argsort(stable=True)
    rare, often = order[:pairs], order.flip(0)[:pairs]
    indices = torch.arange(pairs * vectors.shape[1], device=new.device).view(pairs, -1)
    signs = 1 - 2 * (mixed((indices * WEYL + mixed(controls[ops.CONTROL_STEP].long())) & BITS32) & 1)
    moves = usage[rare] < RARE * usage[often]
    usage[often] = torch.where(moves, usage[often] / 2, usage[often])
    new[rare] = torch.where(moves, torch.cat([vectors[often] * (1 + SPLIT * signs), usage[often]], 1), new[rare])
    weight_inout.copy_(torch.where(results[ops.RESULT_VERDICT] == ops.UPDATE, new, weight_inout))
    if published.data_ptr() != weight_inout.data_ptr():
        published.copy_(weight_inout)
