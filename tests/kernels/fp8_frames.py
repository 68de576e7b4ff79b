"""Frames of the checks of kernels that write fp8, one for each kind of kernel, whatever network it belongs to.

What a kernel writes must be, bit for bit, what the reference's `quantize` makes of the results of the 16-bit kernel. Its
other results must be equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from handgrad.joins.fp8 import reference
from handgrad.joins.fp8.formats import CLIPPED, E4M3, VANISHED, Form, Quantized
from handgrad.joins.fp8.reference.quantizing import write_forms
from handgrad.joins.fp8.sizes import statistics_parts
from tests.kernels.fp8_checks import NAN, SCALES, codes, copy, forms_of, make, same, totals
from tests.kernels.memory_checks import Draw

Run = Callable[[Form], Sequence[Tensor]]  # launches the kernel with this output; returns its other results


def fresh(tensor: Quantized) -> Quantized:
    return replace(copy(tensor), statistics=torch.zeros_like(tensor.statistics))


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_counts(tensor: Quantized, some: bool) -> None:
    if some:
        assert totals(tensor)[CLIPPED] > 0 and totals(tensor)[VANISHED] > 0


def parts_of(N: int, C: int) -> int:
    """Parts of the statistics of (N, C), enough for any kernel."""
    sizes = {"batch": 1, "length": N, "num_heads": 1, "head_width": 64, "padded_vocab_size": N}
    return statistics_parts(**sizes, channels=C, feed_forward=C, widest=C)


def norm_forward(
    draw: Draw, shape: tuple[int, int], kind: torch.dtype, run: Run, *, counting: bool, scale: float = 2.0**9
) -> None:
    """With each of the forms that readers may want, and beside a 16-bit one."""
    plain = torch.full(shape, math.nan, dtype=draw.dtype, device=draw.device)
    beside = run(plain)
    tensor = make(*shape, parts_of(*shape), kind, draw.device, scale=scale, counting=counting)
    both = replace(tensor, plain=torch.full_like(plain, math.nan))
    for name, form in [*forms_of(tensor).items(), ("plain", both)]:
        found = copy(replace(form, plain=both.plain) if name == "columns" else form)
        expected = copy(found)
        reference.quantize(expected, plain)
        assert equal(run(found), beside), name
        same(found, expected)
        assert found.plain is None or torch.equal(found.plain, plain), name


def norm_backward(draw: Draw, stream: Tensor, kind: torch.dtype, run: Run, *, counting: bool) -> None:
    """Of the stream's gradient, which is updated in place and quantised."""
    plain = stream.clone()
    beside = run(plain)
    tensor = make(*stream.shape, parts_of(*stream.shape), kind, draw.device, scale=SCALES[kind], counting=counting)
    for name, form in forms_of(tensor).items():
        found = copy(replace(form, plain=stream))
        expected = copy(found)
        reference.quantize(expected, plain)
        assert equal(run(found), beside), name
        same(found, expected)
        assert found.plain is not None and torch.equal(found.plain, plain), name


def nonlinearity_forward(
    draw: Draw, result: Tensor, launch: Callable[[Quantized], None], *, counting: bool, **changes: object
) -> None:
    """Of the nonlinearity whose 16-bit kernel made `result` (N, F): rows alone. `changes`: of the output."""
    N, F = result.shape
    found = make(N, F, parts_of(N, F), E4M3, draw.device, scale=SCALES[E4M3], counting=counting)
    found = replace(found, **changes)  # type: ignore[arg-type]
    expected = fresh(found)
    reference.quantize(replace(expected, columns=None), result)
    launch(found)
    same(replace(found, columns=None), replace(expected, columns=None))
    columns = codes(found.columns)
    assert columns is not None and (columns == NAN).all(), "the forward writes no columns"
    check_counts(found, counting and not found.current and N * F > 1000)


def nonlinearity_backward(
    draw: Draw,
    dplain: Tensor,
    plain: Tensor,
    kind: torch.dtype,
    launch: Callable[[Quantized, Quantized], None],
    inputs: Sequence[Tensor],
    *,
    counting: bool,
    current: bool,
    inp_plain: Tensor | None = None,
) -> None:
    """`launch(dhidden, inp)`: the gradient before a nonlinearity, which `dplain` is in 16 bits, and the columns of its
    output `plain`. inp has a 16-bit form, `inp_plain`, where the kernel reads it; `inputs` stay as they are."""
    found = make(*dplain.shape, parts_of(*dplain.shape), kind, draw.device, scale=SCALES[kind], counting=counting)
    found, inp = replace(found, current=current), make(*plain.shape, 3, E4M3, draw.device, scale=SCALES[E4M3])
    inp = replace(inp, plain=inp_plain)
    inp.statistics.fill_(7.0)
    expected, expected_inp, before = fresh(found), copy(inp), [tensor.clone() for tensor in inputs]
    reference.quantize(expected, dplain)
    write_forms(replace(expected_inp, rows=None), plain)
    launch(found, inp)
    same(found, expected)
    same(inp, expected_inp)  # its rows and statistics as they were
    assert equal(inputs, before)
    check_counts(found, counting and not current and plain.numel() > 1000 and kind == E4M3)


def turn_back(
    draw: Draw,
    dturned: Tensor,
    turned_columns: int,
    kind: torch.dtype,
    run: Run,
    *,
    counting: bool,
    columns: torch.dtype | None = None,
    terms: float = 0.0,
) -> None:
    """`run(dqkv)` turns the gradient of queries and keys, the first `turned_columns` of `dturned`, back, and returns the
    gradients of their gains, sums of so many `terms`. `columns`: the format of the transposed form, if it is another."""
    N, width = dturned.shape
    expected_plain = dturned.clone()
    expected_sums = run(expected_plain)
    options = {"scale": SCALES[kind], "counting": counting, "columns_kind": columns}
    tensor = make(N, width, parts_of(N, width), kind, draw.device, **options)
    for form in forms_of(tensor).values():
        if form.rows is None and columns is not None:
            continue  # whose own limits are others
        found = replace(copy(form), workspace=dturned.clone(), plain=torch.full_like(dturned, math.nan))
        sums = run(found)
        plain = found.plain
        assert plain is not None and found.workspace is not None and torch.equal(found.workspace, dturned)
        # Sums over a head may be added in another order than by the kernel in place: a rounding in a thousand flips.
        assert (plain.double() - expected_plain.double()).norm() <= torch.finfo(draw.dtype).eps * expected_plain.norm()
        assert torch.equal(plain[:, turned_columns:], dturned[:, turned_columns:]), "the values pass"
        # And those over rows: of terms of random sign, in float32.
        for found_sum, expected_sum in zip(sums, expected_sums, strict=True):
            most = math.sqrt(terms) * max(1.0, expected_plain.abs().max().item()) * 4
            assert (found_sum - expected_sum).abs().max() <= 2.0**-20 * most
        expected = fresh(form)
        reference.quantize(expected, plain)
        same(found, expected)
        check_counts(found, counting and not found.current and N * width > 1000 and kind == E4M3)
        alone = replace(copy(form), workspace=dturned.clone())
        assert equal(run(alone), sums), "with a 16-bit form or without, the same bits"
        same(alone, expected)
