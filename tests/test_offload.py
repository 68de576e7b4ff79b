"""The optimizer's state in host memory: the same bits as in the device's, from what is planned, in any way that runs go on.

A CPU's tensors stand in for a GPU's here; tests/gpu/test_small_cards_on_gpu.py runs it with streams, graphs, pinned memory.
"""

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from handgrad.errors import UsageError
from handgrad.joins import offload
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine.gpus import GPUS
from handgrad.memory.rows import flat_elements
from handgrad.ops import LOSS_NOT_FINITE, RESULT_VERDICT
from handgrad.run import checks, saves
from handgrad.run.checkpointing import HostCopy
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.settings.presets import preset
from handgrad.tools.forecast import resolve_for
from tests.test_runs import tensors
from tests.test_training import assembly_of, steps_of

SETTINGS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "without masters": {"precision": "bf16", "master_weights": False},
    "moments of bf16": {"precision": "bf16", "moments": "bf16"},
    "fp8": {"precision": "fp8", "num_layers": 2},
    "lanes": {"precision": "bf16", "lanes": 2, "micro_batch": 2},
    "frozen": {"precision": "bf16", "freeze": "blocks.0"},
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small model has many, and a last one that is shorter."""
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 640)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", SETTINGS)
def test_offload_changes_no_bit(kind: str, config: RunConfig) -> None:
    config = dataclasses.replace(config, **SETTINGS[kind])
    kept, results = steps_of(config, 4)
    state, found = steps_of(dataclasses.replace(config, offload=True), 4)
    assert found == results and torch.equal(state.parameters, kept.parameters)
    assert torch.equal(state.master, kept.master)
    assert all(torch.equal(state.optimizer[name], kept.optimizer[name]) for name in ("m", "v"))


@pytest.mark.usefixtures("small_pieces")
def test_the_pieces_are_the_whole_state_once(config: RunConfig) -> None:
    """In slots that take turns, none of them larger than its slot."""
    state = assembly_of(dataclasses.replace(config, precision="bf16", offload=True)).state
    found = list(offload.pieces(state))
    assert sum(piece.staged.weight.numel() for piece in found) == flat_elements(state.design.parameters)
    assert len(found) > 10 and len({piece.staged.weight.numel() for piece in found}) > 1
    for tensor, name in ((0, "master"), (1, "optimizer.m"), (2, "optimizer.v")):
        spans = sorted((piece.copies[tensor][0].data_ptr(), piece.copies[tensor][0].nbytes) for piece in found)
        assert spans[0][0] == state.views[name].data_ptr()
        assert all(start + size == following for (start, size), (following, _) in itertools.pairwise(spans))
    slots = [piece.copies[0][1].data_ptr() for piece in found]
    assert len({*slots}) == offload.SLOTS and all(a != b for a, b in itertools.pairwise(slots))


def test_a_skipped_update_leaves_the_state(config: RunConfig) -> None:
    training = assembly_of(dataclasses.replace(config, precision="bf16", offload=True, skip_loss_z=3.0))
    training.stepper.step(0)
    before = [flat.clone() for flat in (training.state.master, *training.state.optimizer.values())]
    training.stepper.begin(1)
    training.state.losses_of_step.fill_(float("nan"))
    training.stepper.finish(1)
    assert training.state.results[RESULT_VERDICT] == LOSS_NOT_FINITE
    after = (training.state.master, *training.state.optimizer.values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.run.open.check_offload", lambda *_: None)


@pytest.mark.usefixtures("on_a_cpu", "small_pieces")
def test_a_run_takes_it_up_and_leaves_it_when_it_resumes(config: RunConfig, tmp_path: Path) -> None:
    """And another recompute level with it. Checkpoints, audits and judged saves read the state where it lies."""
    config = dataclasses.replace(config, precision="bf16", audit_every=2, save_every=4, keep_checkpoints=0)
    found = []
    for name, turns in {
        "off": (False, False),
        "on": (True, True),
        "off, on": (False, True),
        "on, off": (True, False),
    }.items():
        run = dataclasses.replace(config, out=str(tmp_path / name))
        train(dataclasses.replace(run, offload=turns[0], recompute=3 * turns[0]))
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_00000012")
        train(dataclasses.replace(run, offload=turns[1], recompute=3 * turns[1]))
        found.append(tensors(run.out, 12))
    for others in found[1:]:
        assert all(torch.equal(others[name], tensor) for name, tensor in found[0].items())


def test_norms_are_joined_where_they_lie(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without masters are the GPU's, their moments the host's: one stack cannot hold the norms of both."""
    state = assembly_of(dataclasses.replace(config, precision="bf16", master_weights=False, offload=True)).state
    found, stack, norm_of = saves.tensor_norms(state, Ranks()), torch.stack, saves.norm_of

    def stack_of(pieces: list[torch.Tensor]) -> torch.Tensor:
        assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
        return stack([norm_of(piece) for piece in pieces])

    monkeypatch.setattr(saves, "norm_of", lambda piece: piece)
    monkeypatch.setattr(torch, "stack", stack_of)
    assert saves.tensor_norms(state, Ranks()) == found and len(found) == 3 * len(state.design.parameters)


def test_a_copy_of_what_lies_on_the_host_is_not_pinned(config: RunConfig) -> None:
    """The driver pins pages of the state alone: it would refuse here, where there is none."""
    config = dataclasses.replace(config, precision="bf16", offload=True, backend="reference")
    design = resolve(config, 257, device=torch.device("cpu"))
    copy = HostCopy(dataclasses.replace(design, device=torch.device("cuda")), Ranks())
    assert not copy.pinned and copy.size_bytes >= checks.checkpoint_bytes(design)


def test_only_the_slots_are_left_on_the_device() -> None:
    """1558M in bf16: of 18 bytes a parameter weights and gradients stay; the slots lie in activations' memory."""
    config = dataclasses.replace(preset("d48"), precision="bf16", micro_batch=4, lanes=1)
    kept, moved = (resolve_for(GPUS["h200"], dataclasses.replace(config, offload=on), 50257) for on in (False, True))
    elements = flat_elements(kept.parameters)
    assert moved.host_plan.size_bytes == {"master weights": 4 * elements, "moments": 8 * elements}
    assert kept.plan.total_bytes - moved.plan.total_bytes == 12 * elements
    assert not kept.host_plan.buffers and "moments" not in moved.plan.size_bytes


def test_sixteen_gigabytes_hold_1558m_with_unchanged_bits() -> None:
    config = dataclasses.replace(preset("d48"), precision="bf16", micro_batch=1, lanes=1, recompute=2, offload=True)
    assert resolve_for(GPUS["h200"], config, 50257).plan.total_bytes < 15e9


def test_what_offload_is_not_for(config: RunConfig) -> None:
    with pytest.raises(UsageError, match="off a GPU, found device cpu; leave it off"):
        train(dataclasses.replace(config, offload=True, device="cpu"))
    with pytest.raises(UsageError, match="offload is for one GPU, found 2 ranks"):
        checks.check_offload(dataclasses.replace(config, offload=True), torch.device("cuda"), 2)
    with pytest.raises(UsageError, match="moves AdamW's state, found optimizer muon"):
        check(dataclasses.replace(config, offload=True, optimizer="muon"))


class FakeStream:
    """Knows which launches have ended when its next one begins."""

    current: "FakeStream"

    def __init__(self) -> None:
        self.ended: frozenset[str] = frozenset()

    def wait_stream(self, other: "FakeStream") -> None:
        self.ended |= other.ended

    def wait_event(self, event: "FakeEvent") -> None:
        self.ended |= event.ended

    def launch(self, name: str, before: dict[str, frozenset[str]]) -> None:
        before[name] = self.ended
        self.ended |= {name}


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.ended = stream.ended


@contextlib.contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    outside, FakeStream.current = FakeStream.current, stream
    yield
    FakeStream.current = outside


@pytest.mark.usefixtures("small_pieces")
def test_copies_and_updates_wait_for_each_other_and_for_no_more(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the launches on a GPU's streams: a slot is filled, updated, emptied, and only then filled again; a copy
    in waits for no update but that of the slot's last piece."""
    main, before = FakeStream(), dict[str, frozenset[str]]()
    FakeStream.current = main
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    state = assembly_of(dataclasses.replace(config, precision="bf16", offload=True)).state
    update = offload.OffloadedUpdate(state)
    update.streams, update.emptied = [FakeStream(), FakeStream()], [FakeEvent() for _ in range(offload.SLOTS)]

    def launcher(name: str) -> Callable[[], None]:
        return lambda: FakeStream.current.launch(name, before)

    count = len(update.pieces)
    update.pieces = [SimpleNamespace(copy_in=launcher(f"in {n}"), copy_out=launcher(f"out {n}")) for n in range(count)]
    update.updates = [launcher(f"update {n}") for n in range(count)]
    for launch in (launcher("backward"), update, launcher("forward")):
        launch()
    for n in range(count):
        filled = {f"in {n}", f"update {n}", f"out {n}"}
        assert (
            "backward" in before[f"in {n}"] and f"in {n}" in before[f"update {n}"] and f"update {n}" in before[f"out {n}"]
        )
        assert filled <= before["forward"]
        if n >= offload.SLOTS:
            assert f"out {n - offload.SLOTS}" in before[f"in {n}"]
        latest = {f"{kind} {m}" for kind in ("update", "out") for m in range(n - offload.SLOTS + 1, n)}
        assert not latest & before[f"in {n}"], "the copy would run alone"
