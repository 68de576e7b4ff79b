"""The memory-bound kernels beside the same operations by torch, against the bandwidth of the GPU's memory.

Each time is the median of single launches, by CUDA events, with a cold L2 cache: a gigabyte is read before each launch,
which also gives the host time to queue it. Bytes are those that the operation cannot avoid.

    python -m benchmarks.gpu_kernels        (or: handgrad bench kernels)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import write_record
from handgrad.machine import devices
from handgrad.ops import CONTROLS, RESULTS
from handgrad.ops.cuda import activations, classifier, column_sums, embedding, layernorm, optimizer, reduction
from handgrad.ops.sizes import scratch_bytes

aten = torch.ops.aten

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SIZES = {"124M": (64, 1024, 768), "1558M": (16, 1024, 1600)}  # batch, length, channels
V, Vp = 50257, 50304
CLASSIFIER_ROWS = 4096
OPTIMIZER_BLOCKS, OPTIMIZER_BLOCK = 1900, 65536  # 124.5 million parameters
LANES, LANE_ELEMENTS = 4, 7_087_872  # the gradients of one block of 124M
FLUSH_BYTES = 1 << 30
GOAL = 0.85  # of the copy bandwidth

Step = Callable[[], object]


@dataclass
class Case:
    """One operation at one size: the bytes it must move, our kernel, and torch's version for each peer."""

    name: str
    size: str
    size_bytes: int
    kernel: Step
    eager: Step
    traced: Step | None = None  # for torch.compile, if it differs from the eager version


def milliseconds(step: Step, flush: Tensor, runs: int = 21, warmup: int = 3) -> float:
    """Median time of one launch with a cold cache."""
    times = []
    for run in range(warmup + runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()  # reading leaves nothing to write back later, unlike zeroing
        start.record()
        step()
        stop.record()
        if run >= warmup:
            times.append((start, stop))
    torch.cuda.synchronize()
    return median(start.elapsed_time(stop) for start, stop in times)


def copy_bandwidth(flush: Tensor) -> float:
    """Bytes per second of a device copy, read and written."""
    source = torch.empty(FLUSH_BYTES // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), flush) * 1e3


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=CUDA)


def zipf_tokens(B: int, T: int) -> Tensor:
    """Tokens whose k-th word has a share of 1/k."""
    weights = 1.0 / torch.arange(1, V + 1, device=CUDA)
    return torch.multinomial(weights, B * T, replacement=True).view(B, T) * 7919 % V


def cases() -> Iterator[Case]:
    """Yields one case after another, whose buffers are freed before the next one's are made."""
    for size, (B, T, C) in SIZES.items():
        scratch = torch.empty(scratch_bytes(tokens=B * T, channels=C, widest=4 * C), dtype=torch.uint8, device=CUDA)
        yield from layernorm_cases(size, B * T, C, scratch)
        yield from wide_cases(size, B * T, C, scratch)
        yield from embedding_cases(size, B, T, C, scratch)
    yield from classifier_cases()
    yield from optimizer_cases()
    yield from reduction_cases()


def layernorm_cases(size: str, N: int, C: int, scratch: Tensor) -> Iterator[Case]:
    unit = 2 * N * C
    inp, out, dout, stream = (normal(N, C) for _ in range(4))
    weight, bias = normal(C), normal(C)
    mean, rstd = normal(N, dtype=torch.float32), normal(N, dtype=torch.float32)
    dweight, dbias, below = (torch.zeros(C, device=CUDA) for _ in range(3))

    def forward() -> Tensor:
        return F.layer_norm(inp, (C,), weight, bias)

    def backward() -> None:
        dinp, dw, db = aten.native_layer_norm_backward(
            dout, inp, (C,), mean.view(N, 1), rstd.view(N, 1), weight, bias, [True, True, True]
        )
        stream.add_(dinp)
        dweight.add_(dw)
        dbias.add_(db)
        below.add_(stream.sum(0, dtype=torch.float32))

    def ours() -> None:
        layernorm.layernorm_backward(stream, dweight, dbias, dout, inp, mean, rstd, weight, below, scratch=scratch)

    layernorm.layernorm_forward(out, mean, rstd, inp, weight, bias)
    args = (out, mean, rstd, inp, weight, bias)
    yield Case("layernorm_forward", size, 2 * unit, lambda: layernorm.layernorm_forward(*args), forward)
    yield Case("layernorm_backward", size, 4 * unit, ours, backward)


def wide_cases(size: str, N: int, C: int, scratch: Tensor) -> Iterator[Case]:
    """Operations on the feed-forward's (N, 4C), and the bias gradient of q, k and v."""
    for width in (3 * C, 4 * C):
        dout, acc = normal(N, width), torch.zeros(width, device=CUDA)

        def sums(dout: Tensor = dout, acc: Tensor = acc) -> None:
            acc.add_(dout.sum(0, dtype=torch.float32))

        def ours(dout: Tensor = dout, acc: Tensor = acc) -> None:
            column_sums.bias_backward(acc, dout, scratch=scratch)

        yield Case(f"bias_backward {width}", size, 2 * N * width, ours, sums)
    inp, out = normal(N, 4 * C), normal(N, 4 * C)
    unit = 2 * inp.numel()
    forward, backward = lambda: activations.gelu_forward(out, inp), lambda: activations.gelu_backward(out, inp)
    yield Case("gelu_forward", size, 2 * unit, forward, lambda: F.gelu(inp, approximate="tanh"))
    yield Case("gelu_backward", size, 3 * unit, backward, lambda: aten.gelu_backward(out, inp, approximate="tanh"))


def embedding_cases(size: str, B: int, T: int, C: int, scratch: Tensor) -> Iterator[Case]:
    """The backward reads dout twice, by token and by position: no order serves both."""
    N, tokens = B * T, zipf_tokens(B, T)
    places = torch.sort(tokens.view(-1), stable=True).indices.int()
    used = tokens.unique().numel()
    wte, wpe, out = normal(Vp, C), normal(T, C), normal(N, C)
    dwte, dwpe = torch.zeros(Vp, C, device=CUDA), torch.zeros(T, C, device=CUDA)

    def backward() -> None:
        dout = out.float()
        dwte.index_add_(0, tokens.view(-1), dout)
        dwpe.add_(dout.view(B, T, C).sum(0))

    def ours() -> None:
        embedding.embedding_backward(dwte, dwpe, out, tokens, places, scratch=scratch)

    forward_bytes = 2 * C * (N + used + T) + 8 * N
    backward_bytes = 2 * 2 * N * C + 8 * C * (used + T) + 12 * N
    forward = lambda: embedding.embedding_forward(out, tokens, wte, wpe)  # noqa: E731
    yield Case("embedding_forward", size, forward_bytes, forward, lambda: wte[tokens] + wpe)
    yield Case("embedding_backward", size, backward_bytes, ours, backward)


def classifier_cases() -> Iterator[Case]:
    N = CLASSIFIER_ROWS
    logits, losses = normal(N, Vp), torch.empty(N, device=CUDA)
    targets, scale = torch.randint(V, (N,), device=CUDA), torch.ones(1, device=CUDA)
    unit = 2 * N * Vp

    def forward() -> Tensor:
        return F.cross_entropy(logits[:, :V].float(), targets, reduction="none")

    # For the compiler the padded columns are masked and not cut off, which keeps its loads aligned.
    real = torch.arange(Vp, device=CUDA) < V

    def masked_forward() -> Tensor:
        return F.cross_entropy(torch.where(real, logits, -math.inf).float(), targets, reduction="none")

    def masked_both() -> Tensor:
        log_p = torch.log_softmax(torch.where(real, logits, -math.inf).float(), 1)
        one_hot = torch.arange(Vp, device=CUDA) == targets.unsqueeze(1)
        logits.copy_((log_p.exp() - one_hot.float()) * scale)
        return -log_p.gather(1, targets.unsqueeze(1))

    def both() -> Tensor:
        log_p = torch.log_softmax(logits[:, :V].float(), 1)
        one_hot = torch.arange(V, device=CUDA) == targets.unsqueeze(1)
        logits[:, :V] = (log_p.exp() - one_hot.float()) * scale
        logits[:, V:] = 0
        return -log_p.gather(1, targets.unsqueeze(1))

    forward_args, args = (losses, logits, targets), (losses, logits, targets, scale)
    ours = lambda: classifier.classifier_forward(*forward_args, vocab_size=V)  # noqa: E731
    yield Case("classifier_forward", "4096 rows", unit, ours, forward, masked_forward)
    ours = lambda: classifier.classifier_forward_backward(*args, vocab_size=V)  # noqa: E731
    yield Case("classifier_forward_backward", "4096 rows", 2 * unit, ours, both, masked_both)


def optimizer_cases() -> Iterator[Case]:
    elements = OPTIMIZER_BLOCKS * OPTIMIZER_BLOCK
    weight, m, gradient = (normal(elements, dtype=torch.float32) for _ in range(3))
    v, published = m.square(), normal(elements)
    norms = torch.empty(OPTIMIZER_BLOCKS, device=CUDA)
    controls, results = (torch.zeros(n, dtype=torch.float64, device=CUDA) for n in (CONTROLS, RESULTS))
    controls[0], controls[1], results[2] = 100, 1e-4, 1.0
    step = torch.full((), 100.0, device=CUDA)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}

    def ours() -> None:
        optimizer.adamw_update(published, weight, m, v, gradient, controls, results, **settings)

    def fused() -> None:
        names = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        aten._fused_adamw_([weight], [gradient], [m], [v], [], [step], amsgrad=False, maximize=False, **names)
        published.copy_(weight)

    def traced() -> None:
        m.mul_(0.9).add_(gradient, alpha=0.1)
        v.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        root = (v / (1 - 0.95**100)).sqrt() + 1e-8
        weight.mul_(1 - 1e-5).sub_(1e-4 * (m / (1 - 0.9**100)) / root)
        published.copy_(weight)

    def ours_squared() -> None:
        optimizer.squared_norms(norms, gradient, block_elements=OPTIMIZER_BLOCK)

    def squares() -> Tensor:
        return gradient.view(OPTIMIZER_BLOCKS, -1).square().sum(1)

    yield Case("adamw_update", "124M", 30 * elements, ours, fused, traced)
    yield Case("squared_norms", "124M", 4 * elements, ours_squared, squares)


def reduction_cases() -> Iterator[Case]:
    """Lanes summed in place, then in bf16 as they arrive from another device; and a checksum of all weights beside the
    plain sum of their bits."""
    pieces = normal(LANES, LANE_ELEMENTS, dtype=torch.float32)
    sent, out = pieces.bfloat16(), torch.empty_like(pieces[0])
    flat = normal(OPTIMIZER_BLOCKS * OPTIMIZER_BLOCK, dtype=torch.float32)
    found, words = torch.zeros(1, dtype=torch.int64, device=CUDA), flat.view(torch.int32)

    def total(rows: Tensor) -> Tensor:
        return rows.sum(0, dtype=torch.float32)

    unit = 4 * LANE_ELEMENTS
    ours = lambda: reduction.tree_sum(pieces[0], pieces, rounded=False)  # noqa: E731
    yield Case("tree_sum", "4 rows", (LANES + 1) * unit, ours, lambda: total(pieces))
    ours = lambda: reduction.tree_sum(out, pieces, rounded=True)  # noqa: E731
    yield Case("tree_sum", "4 rounded", (LANES + 1) * unit, ours, lambda: total(pieces.bfloat16()))
    ours = lambda: reduction.tree_sum(out, sent, rounded=True)  # noqa: E731
    yield Case("tree_sum", "4 of bf16", LANES * unit // 2 + unit, ours, lambda: total(sent))
    yield Case("checksum", "124M", 4 * flat.numel(), lambda: reduction.checksum(found, flat), lambda: words.sum())


def compare(out: str) -> None:
    """Measures every case and prints the table; writes it to `out` if that is not empty."""
    torch.manual_seed(0)
    flush = torch.zeros(FLUSH_BYTES // 4, device=CUDA)
    bandwidth = copy_bandwidth(flush)
    print(f"{devices.describe(CUDA)}, device copy {bandwidth / 1e12:.2f} TB/s; times in ms, torch {torch.__version__}\n")
    columns = {"MB": 7, "ours": 9, "TB/s": 7, "of copy": 9, "eager": 9, "compile": 9, "x eager": 9, "x comp.": 9}
    print(" " * 41 + "".join(f"{name:>{width}}" for name, width in columns.items()))
    figures, below = [], 0
    for case in cases():
        torch._dynamo.reset()
        ours, eager = milliseconds(case.kernel, flush), milliseconds(case.eager, flush)
        compiled = milliseconds(torch.compile(case.traced or case.eager, dynamic=False), flush)
        rate = case.size_bytes / ours * 1e3
        figures.append(
            {
                "operation": case.name,
                "size": case.size,
                "size_bytes": case.size_bytes,
                "milliseconds": round(ours, 4),
                "terabytes_per_second": round(rate / 1e12, 3),
                "share_of_copy": round(rate / bandwidth, 3),
                "eager_milliseconds": round(eager, 4),
                "compiled_milliseconds": round(compiled, 4),
            }
        )
        mark = "" if rate >= GOAL * bandwidth else "  <"
        below += bool(mark)  # before any rounding
        print(
            f"{case.name:<30}{case.size:<11}{case.size_bytes / 1e6:>7.0f}{ours:>9.4f}{rate / 1e12:>7.2f}"
            f"{rate / bandwidth:>9.1%}{eager:>9.4f}{compiled:>9.4f}{eager / ours:>9.2f}{compiled / ours:>9.2f}{mark}",
            flush=True,
        )
    print(f"\n{below} of {len(figures)} below {GOAL:.0%} of the copy bandwidth")
    if out:
        write_record(out, CUDA, copy_terabytes_per_second=round(bandwidth / 1e12, 3), goal=GOAL, figures=figures)


if __name__ == "__main__":
    compare("")
