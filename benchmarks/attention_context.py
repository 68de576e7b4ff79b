"""Causal attention, forward and backward, over rows of 1024 to 32,768 tokens: handgrad's kernels beside torch's.

Every call has the same number of tokens, so the projections around it would cost the same and attention's share shows. All
read the packed queries, keys and values where a model leaves them; torch's gradients come as three tensors, which a model
would still have to pack. `documents`: without a mask; one document in a row, which costs the mask alone; documents of about
500 tokens, which leave out the rest. FLOPs are those of the visible pairs: two products forward, five backward. A `*` marks
the kernels that handgrad takes. `deterministic`: under `torch.use_deterministic_algorithms`.

    python -m benchmarks.attention_context --out benchmarks/results/h200-attention-context.json
"""

import argparse
import contextlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_step import libraries
from benchmarks.measuring import launch_milliseconds
from benchmarks.record import keep_commit, rounded, write_record
from handgrad.machine import devices
from handgrad.ops import cpu
from handgrad.ops.reference.attention import Mask, split_heads

NONE, ONE, SHORT = DOCUMENTS = "none", "one", "short"
SHORT_TOKENS = (250, 750)  # of a short document, evenly drawn
ROUNDS, ROUND_SECONDS, MOST_LAUNCHES = 3, 0.015, 30  # of a direction; contenders alternate
REPEATS = 3  # whose bits are compared
LARGEST_DIFFERENCE = 0.02  # of two kernels' results in bf16, relative: several times their rounding
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class Case:
    """`length` tokens a row, `heads` of queries and `kv_heads` of keys and values, `width` channels each."""

    length: int
    heads: int
    kv_heads: int
    width: int
    documents: str


class Inputs:
    """The tensors of a case: packed qkv (N, (H + 2K) D), dout (N, H D), and the lengths of the documents by rows."""

    def __init__(self, case: Case, tokens: int, device: torch.device, dtype: torch.dtype):
        self.case, self.batch = case, tokens // case.length
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        columns = (case.heads + 2 * case.kv_heads) * case.width
        self.qkv = torch.randn(tokens, columns, **options)
        self.dout = torch.randn(tokens, case.heads * case.width, **options)
        draw = np.random.default_rng(0)
        self.lengths = [row_of_documents(case, draw) for _ in range(self.batch)]
        self.starts: Tensor | None = None
        if case.documents != NONE:
            rows = [np.repeat(np.cumsum([0, *row[:-1]]), row) for row in self.lengths]
            self.starts = torch.tensor(np.array(rows), dtype=torch.int32, device=device)

    def flops(self, products: int) -> int:
        pairs = sum(length * (length + 1) // 2 for row in self.lengths for length in row)
        return products * 2 * pairs * self.case.heads * self.case.width


def row_of_documents(case: Case, draw: np.random.Generator) -> list[int]:
    """The lengths of a row's documents."""
    if case.documents != SHORT:
        return [case.length]
    lengths: list[int] = []
    while (left := case.length - sum(lengths)) > 0:
        lengths.append(min(left, int(draw.integers(*SHORT_TOKENS))))
    return lengths


@dataclass
class Contender:
    """The launches of one direction each, and the results (out, dq, dk, dv) of the last ones."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    results: Callable[[], list[Tensor]]


def handgrad_kernels(inputs: Inputs, forward: Any, backward: Any, scratch_bytes: int) -> Contender:
    case, qkv, dout = inputs.case, inputs.qkv, inputs.dout
    out, dqkv = torch.empty_like(dout), torch.empty_like(qkv)
    lse = torch.empty(inputs.batch, case.heads, case.length, device=qkv.device)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=qkv.device)
    C, keys = dout.shape[1], case.kv_heads * case.width
    return Contender(
        lambda: forward(out, lse, qkv, scratch=scratch),
        lambda: backward(dqkv, dout, out, lse, qkv, scratch=scratch),
        lambda: [out, *dqkv.split((C, keys, keys), 1)],
    )


def triton_kernels(inputs: Inputs) -> Contender:
    from handgrad.ops.cuda import attention_triton as kernels

    def forward(*tensors: Tensor, scratch: Tensor) -> None:
        kernels.attention_forward(*tensors, mask=Mask(inputs.starts))

    size = kernels.attention_scratch_bytes(batch=inputs.batch, length=inputs.case.length, num_heads=inputs.case.heads)
    return handgrad_kernels(inputs, forward, partial(kernels.attention_backward, mask=Mask(inputs.starts)), size)


def cudnn_kernels(inputs: Inputs) -> Contender:
    from handgrad.ops.cuda import attention as kernels

    case = inputs.case
    sizes = inputs.batch, case.heads, case.kv_heads, case.length, case.width, inputs.qkv.dtype
    size = max(kernels.forward_graph(*sizes).workspace_bytes, kernels.backward_graph(*sizes).workspace_bytes)
    return handgrad_kernels(inputs, kernels.cudnn_forward, kernels.cudnn_backward, size)


def ragged_kernels(inputs: Inputs) -> Contender:
    from benchmarks.ragged import RaggedAttention

    case, qkv, dout = inputs.case, inputs.qkv, inputs.dout
    lengths = [length for row in inputs.lengths for length in row]
    kernels = RaggedAttention(lengths, case.heads, case.kv_heads, case.width, qkv)
    out, dqkv = torch.empty_like(dout), torch.empty_like(qkv)
    return Contender(
        lambda: kernels.forward(out, qkv),
        lambda: kernels.backward(dqkv, dout, out, qkv),
        lambda: [out, *dqkv.split(kernels.columns, 1)],
    )


def cpu_kernels(inputs: Inputs) -> Contender:
    options = {"mask": Mask(inputs.starts)}
    forward, backward = partial(cpu.attention_forward, **options), partial(cpu.attention_backward, **options)
    return handgrad_kernels(inputs, forward, backward, 0)


def by_autograd(inputs: Inputs, attend: Callable[..., Tensor], leaves: list[Tensor]) -> Contender:
    """`attend(q, k, v)` -> (N, H D). The graph of the last forward is kept for the backwards."""
    found: dict[str, Any] = {}

    def forward() -> None:
        found["out"] = attend(*leaves)

    def backward() -> None:
        found["gradients"] = torch.autograd.grad(found["out"], leaves, inputs.dout, retain_graph=True)

    def results() -> list[Tensor]:
        # Of leaves (B, heads, T, D) or (N, heads, D).
        rows = [g.transpose(1, 2) if g.dim() == 4 else g for g in found["gradients"]]
        return [found["out"].detach(), *(g.reshape(len(inputs.qkv), -1) for g in rows)]

    return Contender(forward, backward, results)


def sdpa(inputs: Inputs, backend: SDPBackend) -> Contender:
    case = inputs.case

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.kv_heads < case.heads)
        return y.transpose(1, 2).reshape(len(inputs.qkv), -1)

    heads = split_heads(inputs.qkv, inputs.batch, case.heads, case.width)
    return by_autograd(inputs, attend, [part.detach().requires_grad_() for part in heads])


def varlen(inputs: Inputs) -> Contender:
    """torch's flash attention over documents end to end, grouped heads as they are: its kernels take fewer heads of keys
    than of queries, which torch 2.13 wants said by a keyword and torch 2.11 does not know."""
    from torch.nn.attention.varlen import varlen_attn

    case, flat = inputs.case, [length for row in inputs.lengths for length in row]
    ends = torch.tensor([0, *np.cumsum(flat)], dtype=torch.int32, device=inputs.qkv.device)
    knows = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped = {"enable_gqa": True} if knows and case.kv_heads < case.heads else {}
    columns = [heads * case.width for heads in (case.heads, case.kv_heads, case.kv_heads)]
    parts = [part.unflatten(1, (-1, case.width)) for part in inputs.qkv.split(columns, 1)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = varlen_attn(q, k, v, ends, ends, max(flat), max(flat), window_size=(-1, 0), **grouped)
        assert isinstance(y, Tensor)
        return y.flatten(1)

    return by_autograd(inputs, attend, [part.detach().requires_grad_() for part in parts])


DETERMINISTIC = ", deterministic"
FLASH, CUDNN, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
Make = Callable[[Inputs], Contender]


def contenders(case: Case, device: torch.device) -> dict[str, Make]:
    """By name; those of torch twice."""
    if device.type != "cuda":
        ours: dict[str, Make] = {"handgrad cpu": cpu_kernels}
        theirs: dict[str, Make] = {"torch math": partial(sdpa, backend=MATH)}
    else:
        ours = {"handgrad triton": triton_kernels}
        theirs = {"torch flash": partial(sdpa, backend=FLASH), "torch cudnn": partial(sdpa, backend=CUDNN)}
        if case.documents == NONE:
            ours["handgrad cudnn"] = cudnn_kernels
        else:
            ours["cudnn ragged"] = ragged_kernels
    if case.documents == ONE:
        theirs = {}
    elif case.documents == SHORT:
        theirs = {"torch varlen": varlen}
    return {**ours, **theirs, **{name + DETERMINISTIC: make for name, make in theirs.items()}}


def taken(case: Case, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the kernels that handgrad takes."""
    if device.type != "cuda":
        return "handgrad cpu"
    from handgrad.ops.cuda import attention

    by_library = case.documents == NONE and attention.cudnn_runs(dtype, case.width)
    return "handgrad cudnn" if by_library else "handgrad triton"


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """torch's switch, without its filling of new memory, which is no part of attention."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def seconds_of(launch: Callable[[], object], launches: int, device: torch.device) -> float:
    """Of one of so many launches in a row."""
    if device.type == "cuda":
        return launch_milliseconds(launch, launches) / 1e3
    before = time.perf_counter()
    for _ in range(launches):
        launch()
    return (time.perf_counter() - before) / launches


def measure(case: Case, tokens: int, device: torch.device, dtype: torch.dtype, peak: float | None) -> list[dict[str, Any]]:
    """A row of figures for every contender; one that cannot take part has its reason there."""
    inputs, rows, made = Inputs(case, tokens, device, dtype), dict[str, dict[str, Any]](), dict[str, Contender]()
    measured: list[Tensor] = []
    for name, make in contenders(case, device).items():
        rows[name] = {**asdict(case), "contender": name, "taken": name == taken(case, dtype, device)}
        try:
            with deterministic(name.endswith(DETERMINISTIC)):
                one = make(inputs)
                runs = [first := run(one), *(run(one) for _ in range(REPEATS - 1))]
        except (RuntimeError, ImportError, TypeError) as error:  # refused by the library, or no library
            rows[name]["failed"] = (str(error).splitlines() or [type(error).__name__])[0][:160]
            continue
        measured = measured or first
        rows[name]["same_bits"] = all(torch.equal(a, b) for again in runs[1:] for a, b in zip(first, again, strict=True))
        rows[name]["difference"] = max(map(difference, first, measured))
        made[name] = one
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in made}
    for _ in range(ROUNDS):
        for name, one in made.items():
            with deterministic(name.endswith(DETERMINISTIC)):
                for direction, launch in (("forward", one.forward), ("backward", one.backward)):
                    launches = math.ceil(ROUND_SECONDS / max(1e-6, seconds_of(launch, 1, device)))
                    times[name][direction].append(seconds_of(launch, min(MOST_LAUNCHES, launches), device))
    for name, taken_seconds in times.items():
        rows[name] |= figures(inputs, *(median(taken_seconds[way]) for way in ("forward", "backward")), peak)
    return list(rows.values())


def run(one: Contender) -> list[Tensor]:
    one.forward()
    one.backward()
    return [result.clone() for result in one.results()]


def difference(found: Tensor, measured: Tensor) -> float:
    return float((found.float() - measured.float()).norm() / measured.float().norm())


def figures(inputs: Inputs, forward: float, backward: float, peak: float | None) -> dict[str, Any]:
    """From the seconds of a call in each direction."""
    ahead, back = inputs.flops(FORWARD_PRODUCTS), inputs.flops(BACKWARD_PRODUCTS)
    both = (ahead + back) / (forward + backward)
    return {
        "forward_milliseconds": forward * 1e3,
        "backward_milliseconds": backward * 1e3,
        "forward_tflop_per_second": ahead / forward / 1e12,
        "backward_tflop_per_second": back / backward / 1e12,
        "tflop_per_second": both / 1e12,
        "share_of_peak": both / peak if peak else None,
    }


def compile_kernels(cases: list[Case], device: torch.device) -> None:
    """All Triton kernels of these cases at once; they do not depend on the number of rows."""
    from handgrad.ops.cuda.launch import compile_ahead

    made = [triton_kernels(Inputs(case, case.length, device, torch.bfloat16)) for case in cases]
    compile_ahead(*(launch for one in made for launch in (one.forward, one.backward)))


HEADING = (
    f"{'':<28}{'T':>6}{'D':>5}{'heads':>7} {'documents':<10}{'fwd ms':>9}{'bwd ms':>9}{'fwd TF/s':>9}{'bwd TF/s':>9}"
    f"{'TF/s':>7}{'peak':>7}  same bits"
)


def line(row: dict[str, Any]) -> str:
    name = ("* " if row["taken"] else "  ") + row["contender"]
    start = f"{name:<28}{row['length']:>6}{row['width']:>5}{row['heads']:>4}/{row['kv_heads']:<2} {row['documents']:<10}"
    if "failed" in row:
        return f"{start} {row['failed']}"
    share = "-" if row["share_of_peak"] is None else f"{row['share_of_peak']:.1%}"
    return (
        f"{start}{row['forward_milliseconds']:>9.3f}{row['backward_milliseconds']:>9.3f}"
        f"{row['forward_tflop_per_second']:>9.1f}{row['backward_tflop_per_second']:>9.1f}{row['tflop_per_second']:>7.1f}"
        f"{share:>7}  {'yes' if row['same_bits'] else 'no'}"
    )


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,4096,16384,32768")
    parser.add_argument("--widths", default="64,128", help="of a head")
    parser.add_argument("--heads", default="32/32,32/8", help="of queries / of keys and values")
    parser.add_argument("--documents", default=",".join(DOCUMENTS), help="no mask; one a row; short ones")
    parser.add_argument("--tokens", type=int, default=32768, help="of a call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="", help="file for the record")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = parse(given)
    keep_commit()
    device = devices.resolve_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak, rows = devices.peak_flops(device), list[dict[str, Any]]()
    print(f"{devices.describe(device)}, torch {torch.__version__}, {options.tokens} tokens a call\n\n{HEADING}")
    cases = [
        Case(length, *map(int, pair.split("/")), width, documents)
        for width in map(int, options.widths.split(","))
        for pair in options.heads.split(",")
        for length in map(int, options.lengths.split(","))
        for documents in options.documents.split(",")
    ]
    if device.type == "cuda":
        compile_kernels([case for case in cases if case.length == min(one.length for one in cases)], device)
    for case in cases:
        rows += (found := measure(case, options.tokens, device, dtype, peak))
        print("\n".join(map(line, found)), flush=True)
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        counted = {"peak_flop_per_second": peak, "dtype": str(dtype).removeprefix("torch.")}
        write_record(options.out, device, settings=settings, libraries=libraries(), **counted, figures=rounded(rows))
    wrong = [row for row in rows if not row.get("difference", 0.0) <= LARGEST_DIFFERENCE]  # NaN is none
    for row in wrong:
        print(f"other results: {line(row)}, off by {row['difference']:.2g}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
