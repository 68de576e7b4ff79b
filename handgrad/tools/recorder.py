"""Puts a step's operations into ranges named after their kernel types, counts the work of each type, and reads its launches
and times from a trace of torch's profiler.

The trace is Chrome's JSON. A kernel carries the number (`correlation`) of the host call that launched it; it belongs to the
innermost of our ranges around that call. Nothing depends on the names of kernels.
"""

import functools
import gzip
import inspect
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.dropout.bind import dropout_operations
from handgrad.joins.fp8.formats import Quantized, plain
from handgrad.ops.reference.muon import POLAR_EXPRESS
from handgrad.training.design import Design

PREFIX = "handgrad/"  # of the ranges' names; the rest is the kernel type
COPIES, OTHER = "copies and zeroing", "other"
COPYING = {"aten::copy_", "aten::zero_", "aten::fill_"}  # outside our operations
Event = dict[str, Any]
Named = dict[str, Any]  # an operation's arguments by name


@dataclass(frozen=True)
class Counted:
    """The kernel type of an operation, and its work: in FLOPs by `flops`, or without it in bytes."""

    kind: str
    flops: Callable[[Named], int] | None = None


def gradients_flops(t: Named) -> int:
    """FLOPs of both gradients of a GEMM; a frozen weight has none."""
    rows = next(t[name] for name in ("dinp", "hidden", "dhidden") if name in t)
    return 2 * (1 + (t["dweight_acc"] is not None)) * rows.numel() * t["weight"].shape[0]


def pair_flops(t: Named) -> int:
    """FLOPs of one GEMM over all visible pairs of queries and keys."""
    (N, C), T, starts = plain(t["out"]).shape, t["lse"].shape[-1], t["mask"].document_starts
    pairs = N * (T + 1) // 2
    if starts is not None:
        pairs -= int(starts.sum())  # the keys before the start of each query's document
    return 2 * C * pairs


def polar_flops(t: Named) -> int:
    """FLOPs of three GEMMs per polynomial; counts a symmetric product as if the GEMM computed all of it."""
    (matrices, *sides), steps = t["update_to_polar_inout"].shape, len(POLAR_EXPRESS)
    return steps * matrices * (4 * min(sides) * math.prod(sides) + 2 * min(sides) ** 3)


FORWARD, BACKWARD = "{place} products, forward", "{place} products, dgrad and wgrad"

# Kernel type: its operations whose work is counted in bytes.
MOVING = {
    "embedding": "embedding_forward embedding_backward token_embedding_forward token_embedding_backward",
    "layernorm forward": "layernorm_forward",
    "layernorm backward": "layernorm_backward",
    "RMS norm forward": "rmsnorm_forward",
    "RMS norm backward": "rmsnorm_backward",
    "QK-norm and rotation": "rotary_forward rotary_backward qk_norm_forward qk_norm_backward qk_norm_rotary_forward"
    " qk_norm_rotary_backward gained_qk_norm_rotary_forward gained_qk_norm_rotary_backward",
    "scalars and RMS norm": "mix_rmsnorm_forward mix_rmsnorm_backward",
    "value embeddings": "value_embedding_forward value_embedding_backward",
    "residual sum": "residual_forward",
    "dropout": "dropout_forward dropout_backward",
    "dropout and residual sum": "dropout_residual_forward",
    "GELU alone": "gelu_forward gelu_backward",
    "squared ReLU": "relu2_forward relu2_backward",
    "SwiGLU": "swiglu_forward swiglu_backward",
    "GEGLU": "geglu_forward geglu_backward",
    "bias sums": "bias_backward",
    "classifier": "classifier_forward classifier_forward_backward distill_forward_backward softcap_forward",
    "loss and verdict": "loss_sum verdict",
    "norm": "squared_norms",
    "sums over lanes": "tree_sum",
    "checksum": "checksum",
    "digest of the state": "digest",
    "AdamW": "adamw_update",
    "Muon, momentum": "muon_momentum",
    "Muon, weights": "muon_update",
    "quantising in a pass of its own": "quantize",
    "transposing fp8 weights": "transpose",
    "fp8 scales": "fold_statistics update_scaling",
}
FORWARDS = ("linear_forward", "linear_residual_forward", "linear_gelu_forward", "linear_relu2_forward")
BACKWARDS = ("linear_backward", "gelu_linear_backward", "relu2_linear_backward", "swiglu_linear_backward")
# Causal attention: a query attends to the keys from the start of its document to itself. Two GEMMs forward, five backward;
# the five include one recomputation of the scores, even if a kernel recomputes them more often.
OPERATIONS = {
    **{operation: Counted(kind) for kind, operations in MOVING.items() for operation in operations.split()},
    **dict.fromkeys(FORWARDS, Counted(FORWARD, lambda t: 2 * math.prod(t["out"].shape) * t["inp"].shape[1])),
    **dict.fromkeys(BACKWARDS, Counted(BACKWARD, gradients_flops)),
    "linear_swiglu_forward": Counted(FORWARD, lambda t: 2 * t["hidden"].numel() * t["inp"].shape[1]),
    "attention_forward": Counted("attention forward", lambda t: 2 * pair_flops(t)),
    "attention_backward": Counted("attention backward", lambda t: 5 * pair_flops(t)),
    "muon_polar": Counted("Muon, polar factors", polar_flops),
}

# Functions that the operations of a module `linear` call, by name. If one is a GEMM, they count instead of the operation.
NONLINEARITIES = {"gelu": "GELU", "relu2": "squared ReLU", "swiglu": "SwiGLU"}
PARTS = {
    "multiply": Counted("{place} products, {role}", lambda t: 2 * t["d"].numel() * t["a"].shape[bool(t["transpose_a"])]),
    "bias_backward": OPERATIONS["bias_backward"],
    **{f"{name}_{way}": OPERATIONS[f"{name}_{way}"] for name in NONLINEARITIES for way in ("forward", "backward")},
    **{
        f"{name}_{way}_fp8": Counted(f"{kind} to fp8, {way}")
        for name, kind in NONLINEARITIES.items()
        for way in ("forward", "backward")
    },
}

ONCE = {"gradient_inout", "logits_inout"}  # may be overwritten, or changes only in its padded columns
BY_TOKEN, BY_POSITION = {"wte", "dwte_acc", "table"}, {"wpe", "dwpe_acc"}  # operations touch only some rows of these tables
PACKED = {"qkv", "qkv_inout", "dqkv_inout"}  # operations that count in bytes touch only their queries and keys
VALUES = {"qkv_inout", "dqkv"}  # operations with a lookup table touch only their values


def is_wgrad(t: Named) -> bool:
    """True for a weight gradient's GEMM. In fp8, which transposes both operands, its float32 result identifies it."""
    return bool(t.get("transpose_b")) or ("d" in t and t["a"].itemsize == 1 and t["d"].dtype == torch.float32)


def size_bytes(t: Named) -> int:
    """The minimum bytes that an operation moves: reads each input once, writes each output once, does both in place."""
    total, seen = 0, set()
    for name, tensor in flattened(t):
        if not isinstance(tensor, Tensor) or name == "scratch" or (tensor.data_ptr(), tensor.shape) in seen:
            continue
        seen.add((tensor.data_ptr(), tensor.shape))
        if name in BY_TOKEN:
            elements = tensor[0].numel() * t["tokens"].unique().numel()
        elif name in BY_POSITION:
            elements = tensor[0].numel() * t["tokens"].shape[1]
        elif name in VALUES and "table" in t:
            elements = tensor.numel() // 3
        elif name in PACKED:
            elements = tensor.numel() // 3 * 2
        else:
            elements = tensor.numel()
        total += elements * tensor.element_size() * (2 if name.endswith(("_acc", "_inout")) and name not in ONCE else 1)
    return total


def flattened(t: Named) -> Iterator[tuple[str, Any]]:
    """Yields the arguments, each form of a quantised tensor as an argument; only the plain form changes in place."""
    for name, value in t.items():
        if isinstance(value, Quantized):
            forms = ("rows", "columns", "workspace")
            yield from ((name, value.plain), *((f"{name}.{form}", getattr(value, form)) for form in forms))
        else:
            yield name, value


@dataclass(frozen=True)
class Running:
    """An operation, or a part of one, whose range is open."""

    frame: FrameType
    entry: Counted
    kind: str
    arguments: Named
    span: AbstractContextManager
    products: int  # GEMMs launched before it


class Recorder:
    """Opens a range, named after the kernel type, around every operation of a run, and around each part of a GEMM.

    The interpreter reports the calls, as it does to Python's own profilers, so nothing in the backend is wrapped.
    `counted` has the work of each type, FLOPs or bytes, done while `counting`. `head`: weight of the loss head; all other
    GEMMs belong to a block."""

    def __init__(self, design: Design, head: Tensor, span: Callable[[str], AbstractContextManager]):
        self.head, self.span = head.data_ptr(), span
        backends = [design.ops, *([dropout_operations(design.plain_ops)] if design.dropout else [])]
        backends += [design.plain_ops] if design.fp8_only else []
        self.operations = {code_of(getattr(b, n)): e for b in backends for n, e in OPERATIONS.items() if hasattr(b, n)}
        self.running: list[Running] = []
        self.place, self.forward, self.products, self.counting = "block", True, 0, False
        self.counted: dict[str, int] = defaultdict(int)
        self.in_flops: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records this thread's calls."""
        before = sys.getprofile()
        sys.setprofile(self.on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entry = self.entry_of(frame)
            if entry is not None:
                self.enter(frame, entry)
        elif event == "return" and self.running and self.running[-1].frame is frame:
            self.leave()

    def entry_of(self, frame: FrameType) -> Counted | None:
        """The entry for an operation that the model calls, or for a part that an operation of `linear` calls, else None."""
        if not self.running:
            return self.operations.get(frame.f_code)
        caller = frame.f_back.f_globals["__name__"] if frame.f_back else ""
        return PARTS.get(frame.f_code.co_name) if caller.endswith(".linear") else None

    def enter(self, frame: FrameType, entry: Counted) -> None:
        t = dict(frame.f_locals)
        if entry.kind in (FORWARD, BACKWARD):
            weight = t["weight"].plain if isinstance(t["weight"], Quantized) else t["weight"]
            # A frozen weight of a block may have no 16-bit form.
            self.place = "head" if weight is not None and weight.data_ptr() == self.head else "block"
            self.forward = entry.kind == FORWARD
        role = "wgrad" if is_wgrad(t) else "forward" if self.forward else "dgrad"
        kind = entry.kind.format(place=self.place, role=role)
        span = self.span(PREFIX + kind)
        self.running.append(Running(frame, entry, kind, t, span, self.products))
        span.__enter__()

    def leave(self) -> None:
        ended = self.running.pop()
        ended.span.__exit__(None, None, None)
        kind, flops, t = ended.kind, ended.entry.flops, ended.arguments
        if self.products == ended.products and self.counting:  # else its parts are counted
            self.counted[kind] += flops(t) if flops else size_bytes(t)
        if flops:
            self.in_flops.add(kind)
            self.products += ended.entry is PARTS["multiply"]


def code_of(operation: Callable[..., None]) -> CodeType:
    """The code object of a backend's operation, which may be a `partial` or decorated."""
    operation = inspect.unwrap(operation.func if isinstance(operation, functools.partial) else operation)
    return operation.__code__


# Reading a trace.


@dataclass
class Spent:
    """Launches of a kernel type, and their time. On a CPU each operation counts as a launch."""

    launches: int = 0
    microseconds: float = 0.0


@dataclass
class Range:
    kind: str
    start: float  # microseconds
    end: float


def read_trace(path: Path) -> list[Event]:
    """The complete events of a trace, which may be compressed."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "cat" in event]


def ranges_of(events: Sequence[Event], category: str) -> list[Range]:
    """Our ranges of this category, and torch's copies outside them, sorted by start, an outer range before an inner one."""
    ranges: list[Range] = []
    open_until = 0.0
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        ours = event["cat"] == category and event["name"].startswith(PREFIX)
        if ours or (event["cat"] == "cpu_op" and event["name"] in COPYING and event["ts"] >= open_until):
            ranges.append(Range(event["name"].removeprefix(PREFIX) if ours else COPIES, event["ts"], end))
            open_until = max(open_until, end)
    return ranges


def innermost(ranges: Sequence[Range], moments: Sequence[float]) -> list[str | None]:
    """For each moment, in ascending order, the kind of the innermost range around it, or None."""
    kinds: list[str | None] = []
    around: list[Range] = []
    following = 0
    for moment in moments:
        while following < len(ranges) and ranges[following].start <= moment:
            around = [*(r for r in around if r.end >= ranges[following].start), ranges[following]]
            following += 1
        around = [r for r in around if r.end >= moment]
        kinds.append(around[-1].kind if around else None)
    return kinds


def spent_on_gpu(events: Sequence[Event]) -> dict[str, Spent]:
    """A GPU's kernels, copies and fills by type. If the trace lacks the launch of one, it belongs to the range that the
    profiler shows on the device at that time."""
    calls = {e.get("args", {}).get("correlation"): e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    by_call: list[tuple[float, Event]] = []
    by_time: list[tuple[float, Event]] = []
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = calls.get(event["args"]["correlation"])
            if call is None:
                by_time.append((event["ts"], event))
            else:
                by_call.append((call, event))
    spent: dict[str, Spent] = defaultdict(Spent)
    for chosen, ranges in (
        (by_call, ranges_of(events, "user_annotation")),
        (by_time, ranges_of([e for e in events if e["cat"] == "gpu_user_annotation"], "gpu_user_annotation")),
    ):
        chosen.sort(key=lambda pair: pair[0])
        for kind, (_, event) in zip(innermost(ranges, [moment for moment, _ in chosen]), chosen, strict=True):
            row = spent[kind or (OTHER if event["cat"] == "kernel" else COPIES)]
            row.launches += 1
            row.microseconds += event["dur"]
    return dict(spent)


def spent_on_cpu(events: Sequence[Event]) -> dict[str, Spent]:
    """Ranges by type; the time of a range excludes the ranges inside it."""
    spent: dict[str, Spent] = defaultdict(Spent)
    around: list[Range] = []
    for span in ranges_of(events, "user_annotation"):
        around = [r for r in around if r.end > span.start]
        if around:
            spent[around[-1].kind].microseconds -= span.end - span.start
        spent[span.kind].launches += 1
        spent[span.kind].microseconds += span.end - span.start
        around.append(span)
    return dict(spent)
