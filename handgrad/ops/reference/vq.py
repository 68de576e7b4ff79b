"""Vector quantisation: a code is the nearest vector of a learned codebook."""

import torch
from torch import Tensor

from handgrad.ops.reference.convolution import rows

# VQ-VAE (van den Oord et al. 2017, https://arxiv.org/abs/1711.00937). Equations 1 and 2: q(z) = e_k, k the nearest vector,
# argmin |z - e_j|^2. Equation 3 adds |sg(z) - e|^2 + beta |z - sg(e)|^2 to the loss; sg stops gradients. With weight w:
#
#   de_k += 2 w (e_k - z) over the places with code k         dz = dq + 2 w beta (z - e_k), dq straight through
#
# |z - e|^2 = |z|^2 - 2 z.e + |e|^2, and |z|^2 does not change the argmin.


def vq_forward(out: Tensor, codes: Tensor, errors: Tensor, inp: Tensor, codebook: Tensor) -> None:
    """out, inp (B, Y, X, Z); codes (B, Y X) int64, of ties the lowest; errors (B, Y X): |z - e|^2; codebook (E, Z)."""
    z = rows(inp)
    distances = (codebook * codebook).sum(1) - 2 * z @ codebook.t()  # (B Y X, E), less |z|^2
    codes.copy_(distances.argmin(1).view(codes.shape))
    vq_values(out, codes, codebook)
    errors.copy_((inp - out).square().sum(3).view(errors.shape))


def vq_backward(
    dinp_inout: Tensor,
    dcodebook_acc: Tensor,
    inp: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    commitment: float,
    weight: float = 1.0,
) -> None:
    """dinp_inout (B, Y, X, Z): the gradient of `out`, passed straight through, plus the commitment's. dcodebook_acc (E, Z):
    plus the codebook's. w = weight * scale (1), beta = `commitment`."""
    z, chosen = rows(inp), codebook[codes.view(-1)]
    difference = (z - chosen) * (2 * weight * scale).to(z.dtype)  # (B Y X, Z)
    rows(dinp_inout).add_(difference, alpha=commitment)
    uses = torch.zeros(len(z), len(codebook), dtype=z.dtype, device=z.device)
    uses.scatter_(1, codes.view(-1, 1), 1.0)  # a GEMM sums in one order, whatever the number of threads
    dcodebook_acc.sub_(uses.t() @ difference)


def vq_values(out: Tensor, codes: Tensor, codebook: Tensor) -> None:
    """out (B, Y, X, Z): the codebook's vectors of codes (B, Y X)."""
    rows(out).copy_(codebook[codes.view(-1)])
