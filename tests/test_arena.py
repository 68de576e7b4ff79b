"""The arena: buffers alive together never share a byte, plans are tight, and a poisoned plan gives the same numbers."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from handgrad.joins.fp8.formats import E5M2
from handgrad.joins.fp8.tables import Fp8Gemms, activation_buffers, fp8_gemms
from handgrad.memory.arena import ALWAYS, Buffer, Plan, make_plan
from handgrad.models import gpt2
from handgrad.ops import reference
from handgrad.settings.config import ModelShape
from tests.conftest import make_model

BF16_BYTES = 2


def overlapping_pairs(plan: Plan) -> list[tuple[str, str]]:
    """Pairs that are alive at the same tick and share bytes."""
    pairs = []
    for i, a in enumerate(plan.buffers):
        for b in plan.buffers[:i]:
            if a.kind == b.kind and a.overlaps(b):
                start_a, start_b = plan.offsets[a.name], plan.offsets[b.name]
                if start_a < start_b + b.size_bytes and start_b < start_a + a.size_bytes:
                    pairs.append((a.name, b.name))
    return pairs


def lower_bound(plan: Plan, kind: str) -> int:
    """Bytes alive at the busiest tick: no placement can take less."""
    mine = [b for b in plan.buffers if b.kind == kind]
    ticks = {tick for b in mine for interval in b.lifetimes for tick in interval}
    alive = (sum(b.padded_bytes for b in mine if any(s <= t <= e for s, e in b.lifetimes)) for t in ticks)
    return max(alive, default=0)


def gemms_of(shape: ModelShape, keep_bf16: str = "", head: str = "") -> Fp8Gemms:
    return fp8_gemms(keep_bf16, head, shape.num_layers, shape.fp8_parts)


def planned(shape: ModelShape, recompute: int, *, training: bool = True, fp8: bool = False) -> Plan:
    """The activations of 4 samples of 1024 tokens in bf16."""
    rows = tuple(gpt2.activations(shape, 4, 1024, torch.bfloat16, reference, chunk=1024, training=training))
    if fp8:
        return make_plan(activation_buffers(rows, shape.forms, gemms_of(shape), (E5M2, E5M2), recompute))
    return make_plan(row.buffer(recompute) for row in rows if not row.of)


intervals = st.tuples(st.integers(0, 9), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
lifetimes = st.one_of(st.just(ALWAYS), st.lists(intervals, min_size=1, max_size=3).map(tuple))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), lifetimes), max_size=30))
def test_no_two_living_buffers_share_bytes(rows: list) -> None:
    buffers = [Buffer(f"b{i}", (size,), torch.uint8, "k", lives) for i, (size, lives) in enumerate(rows)]
    plan = make_plan(buffers)
    assert overlapping_pairs(plan) == []
    assert all(plan.offsets[b.name] + b.size_bytes <= plan.size_bytes["k"] for b in buffers)


USES, LEVELS = ["training", "fp8 training", "evaluation"], [0, 1, 2, 3]


@pytest.mark.nightly(but=[f"{layers}-{use}-{level}" for layers in (1, 2, 12) for use in USES for level in LEVELS])
@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layers", [1, 2, 12, 48])
def test_the_activation_plan_is_tight(layers: int, recompute: int, use: str) -> None:
    shape = ModelShape(50257, 1024, layers, 12, 768)
    plan = planned(shape, recompute, training=use != "evaluation", fp8=use == "fp8 training")
    assert overlapping_pairs(plan) == []
    most = 1.01 if recompute < 3 else 1.016  # so little is kept that a gap beside the logits, 2 MB, counts
    assert plan.size_bytes["activations"] <= most * lower_bound(plan, "activations")


@pytest.mark.parametrize(
    ("precision", "recompute", "bytes_per_channel"),
    [
        *(("bf16", level, size) for level, size in enumerate((32, 16, 12, 2))),
        *(("fp8", level, size) for level, size in enumerate((23, 16, 13, 2))),
    ],
)
def test_kept_activations_take_what_the_levels_promise(precision: str, recompute: int, bytes_per_channel: int) -> None:
    """Bytes per layer and B*T*C, beside the few of the statistics (16 per token and 4 per head)."""
    N, C, H = 4 * 1024, 768, 12

    def size(layers: int) -> int:
        shape = ModelShape(50257, 1024, layers, H, C)
        return planned(shape, recompute, fp8=precision == "fp8").size_bytes["activations"]

    per_layer, statistics = (size(30) - size(20)) / 10, 16 + 4 * H if recompute < 3 else 0
    assert abs(per_layer - N * (bytes_per_channel * C + statistics)) < 0.001 * per_layer


SHARING = ModelShape(57, 16, 4, 2, 32)
HEAD = 1 + 2 * SHARING.num_layers  # the tick of the loss
GEMMS = {
    "16 bits": None,
    "fp8": gemms_of(SHARING),
    "fp8 in some layers, and in the head": gemms_of(SHARING, "0.mlp,1.qkv,2.proj", "forward,dgrad"),
}


@pytest.mark.parametrize("gemms", GEMMS)
@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
def test_sharing_memory_changes_no_bit(recompute: int, gemms: str) -> None:
    """The plan's lifetimes are right: with a private place for every buffer the numbers are the same."""
    settings = {"recompute": recompute, "chunk": 7, "fp8": GEMMS[gemms]}
    found = []
    for private in (False, True):
        model = make_model(SHARING, 2, 16, torch.float32, private=private, **settings)
        model.forward()
        model.backward(torch.tensor([0.1]), recompute)
        found.append(model.flat_gradients)
    assert torch.isfinite(found[0]).all() and torch.equal(*found)


CLOSES_A_TICK = ("embedding_forward", "linear_residual_forward", "layernorm_backward")


class Touches(TorchDispatchMode):
    """Notes the address of every tensor that torch's own operations are given."""

    def __init__(self, note: Callable[[int], None]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, torch.Tensor):
                self.note(argument.data_ptr())
        return function(*args, **(kwargs or {}))


class Recorder:
    """Operations that note at which tick each buffer is touched: passed as a tensor, or read or written in one of its
    forms. Every tick ends with one of three operations."""

    def __init__(self, ops: ModuleType, views: dict[str, torch.Tensor]):
        self.ops = ops
        self.starts = sorted((view.data_ptr(), name) for name, view in views.items() if view.numel())
        self.ends = {name: view.data_ptr() + view.numel() * view.element_size() for name, view in views.items()}
        self.touched: dict[str, set[int]] = {}
        self.tick = 0

    def __getattr__(self, operation: str):
        def call(*tensors: object, **settings: object) -> None:
            for tensor in (*tensors, settings.get("scratch")):
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor.data_ptr())
            with Touches(self.note):
                getattr(self.ops, operation)(*tensors, **settings)
            again = operation == "linear_residual_forward" and self.tick >= HEAD  # a block's forward, in its backward
            self.tick += operation in CLOSES_A_TICK and not again

        return call

    def note(self, pointer: int) -> None:
        before = [name for start, name in self.starts if start <= pointer]
        if before and pointer < self.ends[before[-1]]:
            self.touched.setdefault(before[-1], set()).add(self.tick)


@pytest.mark.parametrize("gemms", GEMMS)
@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
def test_lifetimes_are_neither_too_short_nor_too_long(recompute: int, gemms: str) -> None:
    """Every buffer is touched only while it lives, and at both ends of each of its intervals."""
    settings = {"recompute": recompute, "chunk": 7, "fp8": GEMMS[gemms]}
    model = make_model(SHARING, 2, 16, torch.float32, private=True, **settings)
    model.ops = recorder = Recorder(model.ops, model.views)
    model.forward()
    model.backward(torch.tensor([0.1]), recompute)
    assert recorder.tick == 4 * SHARING.num_layers + 2
    for buffer in model.plan.buffers:
        if buffer.lifetimes == ALWAYS or not buffer.size_bytes:
            continue
        alive = {tick for first, last in buffer.lifetimes for tick in range(first, last + 1)}
        touched = recorder.touched[buffer.name]
        assert touched <= alive, f"{buffer.name} is touched at {sorted(touched - alive)}, when it is not alive"
        ends = {tick for interval in buffer.lifetimes for tick in interval}
        assert ends <= touched, f"{buffer.name} is kept alive for {sorted(ends - touched)} without need"


def test_views_are_aligned_and_typed() -> None:
    plan = make_plan([Buffer("a", (3,), torch.bfloat16, "k"), Buffer("b", (2, 5), torch.float32, "k")])
    views = plan.allocate(torch.device("cpu"))
    assert views["b"].shape == (2, 5) and views["b"].dtype == torch.float32
    assert plan.offsets["b"] % 512 == 0 and plan.size_bytes["k"] == 1024
    assert (views["a"] == 0).all()
