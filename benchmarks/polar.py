"""Muon's five polynomials against the polar factor by SVD, on matrices whose singular values are spread over three decades.

python -m benchmarks.polar
python -m benchmarks.polar benchmarks/results/cpu-polar.json
"""

import argparse
from typing import Any

import torch

from benchmarks.record import write_record
from handgrad.ops.reference import muon

# The same polynomial five times, chosen for its slope at 0 (Jordan et al. 2024).
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
SHAPES = ((768, 768), (768, 3072))
SMALLEST = 1e-3  # singular value, of a largest of 1


def matrix_of(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 matrix with singular values from 1 down to `SMALLEST` in a geometric sequence, and its polar factor."""
    generator = torch.Generator().manual_seed(1)
    n = min(shape)
    u, v = (torch.linalg.qr(torch.randn(side, n, dtype=torch.float64, generator=generator)).Q for side in shape)
    return u * torch.logspace(0, torch.tensor(SMALLEST).log10().item(), n, dtype=torch.float64) @ v.T, u @ v.T


def measure(shape: tuple[int, int], coefficients: tuple, dtype: torch.dtype) -> dict[str, Any]:
    matrix, factor = matrix_of(shape)
    chosen, muon.POLAR_EXPRESS = muon.POLAR_EXPRESS, coefficients
    try:
        found = muon.polar(matrix.to(dtype)).double()
    finally:
        muon.POLAR_EXPRESS = chosen
    values = torch.linalg.svdvals(found)
    return {
        "smallest_singular_value": round(values.min().item(), 3),
        "median_singular_value": round(values.median().item(), 3),
        "largest_singular_value": round(values.max().item(), 3),
        "relative_error": round(((found - factor).norm() / factor.norm()).item(), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="", help="the record to write (default: none)")
    out = parser.parse_args().out
    rows = []
    for shape in SHAPES:
        for name, coefficients in (("Polar Express", muon.POLAR_EXPRESS), ("Jordan", JORDAN)):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                row = {"shape": shape, "coefficients": name, "dtype": str(dtype).removeprefix("torch.")}
                rows.append(row | measure(shape, coefficients, dtype))
                print(*rows[-1].values())
    if out:
        write_record(out, torch.device("cpu"), smallest=SMALLEST, rows=rows)


if __name__ == "__main__":
    main()
