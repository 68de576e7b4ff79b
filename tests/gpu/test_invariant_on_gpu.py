"""The forwards of runs on rewards give a token the same bits whatever is computed beside it."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.ops.cuda import invariant as ops
from handgrad.ops.sizes import WORKSPACE_BYTES


@pytest.fixture
def scratch() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("O", "I"), [(2048, 8192), (896, 4864), (3072, 2048), (4096, 896), (384, 128)])
def test_a_gemm_over_any_number_of_rows(O: int, I: int, dtype: torch.dtype, scratch: torch.Tensor) -> None:
    weight, x, residual = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((O, I), (4096, I), (4096, O)))
    whole, added = torch.empty_like(residual), torch.empty_like(residual)
    ops.linear_forward(whole, x, weight, None, scratch=scratch)
    ops.linear_residual_forward(added, residual, x, weight, None, scratch=scratch)
    for rows in (2, 16, 64, 200, 1024):
        some, more = torch.empty_like(whole[:rows]), torch.empty_like(whole[:rows])
        ops.decode.linear_forward(some, x[:rows], weight, None, scratch=scratch)
        ops.decode.linear_residual_forward(more, residual[:rows], x[:rows], weight, None, scratch=scratch)
        assert torch.equal(some, whole[:rows]) and torch.equal(more, added[:rows]), rows


@pytest.mark.parametrize("rows", [6912, 13824])
def test_a_product_whose_first_algorithm_has_no_form_without_a_split(rows: int, scratch: torch.Tensor) -> None:
    """For 13824 rows of float32, of cuBLASLt 13.2 on an H200. Sums of 512 products and a number: 513 roundings at most."""
    weight, x, residual = (torch.randn(*shape, device="cuda") for shape in ((128, 512), (rows, 512), (rows, 128)))
    out = torch.empty_like(residual)
    ops.linear_residual_forward(out, residual, x, weight, None, scratch=scratch)
    exact, sizes = (
        residual.double() + x.double() @ weight.double().T,
        residual.abs().double() + x.abs().double() @ weight.abs().double().T,
    )
    assert ((out - exact).abs() <= 513 * 2**-24 * sizes).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("H", "K", "D"), [(4, 4, 64), (8, 2, 64), (6, 2, 128), (4, 1, 256), (4, 4, 32), (4, 2, 80)])
def test_attention_over_a_cache_is_that_of_training(
    H: int, K: int, D: int, dtype: torch.dtype, scratch: torch.Tensor
) -> None:
    B, T = 3, 333
    qkv = torch.randn(B * T, (H + 2 * K) * D, device="cuda").to(dtype)
    out, lse = torch.empty(B * T, H * D, device="cuda", dtype=dtype), torch.empty(B, H, T, device="cuda")
    ops.attention_forward(out, lse, qkv, scratch=scratch)
    keys, values = torch.full((2, B, K, T, D), torch.nan, device="cuda", dtype=dtype)
    step = torch.empty(B, H * D, device="cuda", dtype=dtype)
    for position in range(T):
        positions = torch.full((B,), position, device="cuda")
        rows = qkv.view(B, T, -1)[:, position].contiguous()
        ops.decode.attention_decode(step, keys, values, rows, positions, scratch=scratch)
        assert torch.equal(step, out.view(B, T, -1)[:, position]), position
