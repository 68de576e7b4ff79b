"""Finds where two runs diverge: settings, versions, data, the first link that differs, tensors of equal steps. For runs
without a chain, compares their folders: configuration, newest checkpoint, metrics.jsonl."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import CONTEXT
from handgrad.joins.audit.chain import BEGIN, NUMBERS, STEP, Line, differing, meaning, numbers_text
from handgrad.parsing import Record, readable_records
from handgrad.settings.config import FIELDS, RunConfig, convert, differences, read_toml, to_dict
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE
from handgrad.storage.run_files import AUDIT_FILE, CHECKPOINTS, CONFIG_FILE, METRICS_FILE
from handgrad.storage.tensor_files import open_tensors
from handgrad.tools.record import RunRecord

KNOWN = ("handgrad", "torch", "device")  # versions that the `run` line of metrics.jsonl has


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors of the same name: the number of elements that differ, and by how much."""

    name: str
    differing: int
    elements: int
    largest: float  # units in the last place
    mean: float  # the same, over all elements

    def line(self) -> str:
        ulps = (
            f"largest {self.largest:.0f} ulp, mean {self.mean:.3g}" if math.isfinite(self.largest) else "NaN in one alone"
        )
        return f"  {self.name}: {self.differing} of {self.elements} elements, {ulps}"


def facts_lines(one: RunRecord, other: RunRecord) -> Iterator[str]:
    """The differences between the last `begin`s of two chains."""
    a, b = one.begins[-1], other.begins[-1]
    for line in differences(a["config"], b["config"]):
        yield f"configuration  {line}"
    for part, title in (("versions", "versions"), ("identity", "data")):
        for key in {**a[part], **b[part]}:
            then, now = (str(facts[part].get(key)) for facts in (a, b))
            if then != now:
                yield f"{title:<14} {key}: {then[:60]} -> {now[:60]}"
    if a.get("init") != b.get("init"):
        yield f"initial        weights: {a.get('init')} -> {b.get('init')}"


def link_lines(one: RunRecord, other: RunRecord) -> Iterator[str]:
    """The first difference between the contents of two chains."""
    begun = one.begins[0]["step"], other.begins[0]["step"]
    first, second = (record.state_at(step) for record, step in zip((one, other), begun, strict=True))
    if begun[0] == begun[1] and first is not None and second is not None and (names := differing_states(first, second)):
        yield f"links          the initial states differ ({names})"
        return
    ours, theirs, equal = one.steps, other.steps, max(begun)
    for step in sorted(ours.keys() & theirs.keys()):
        if fields := differing(ours[step], theirs[step]):
            values = found_text(fields, ours[step], theirs[step])
            yield f"links          step {step} is the first that differs: {meaning(fields, step, equal)} ({values})"
            return
        equal = step


def differing_states(one: Line, other: Line) -> str:
    """The buffers of two links whose digests differ: "m, weights"."""
    ours, theirs = one["state"], other["state"]
    return ", ".join(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))


def found_text(fields: list[str], one: Line, other: Line) -> str:
    numbers = numbers_text(fields, one, other, " -> ")
    return ", ".join(fields) + (f"; {numbers}" if numbers else "")


def metrics_lines(one: RunRecord, other: RunRecord) -> Iterator[str]:
    """The first step whose loss, norm or rate differs. The state before it is unknown, and therefore the cause."""
    ours, theirs = one.steps, other.steps
    for step in sorted(ours.keys() & theirs.keys()):
        if fields := differing(ours[step], theirs[step]):
            yield f"metrics        step {step} is the first that differs ({found_text(fields, ours[step], theirs[step])})"
            return


def checkpoint_lines(one: Path, other: Path, most: int) -> Iterator[str]:
    """The tensors that differ between the checkpoints of the newest step that both runs have saved."""
    ours, theirs = (
        {checkpoint.step_of(folder): folder for folder in checkpoint.folders(run / CHECKPOINTS)} for run in (one, other)
    )
    if not (common := ours.keys() & theirs.keys()):
        return
    step = max(common)
    both = [checkpoint.open_checkpoint(run[step]) for run in (ours, theirs)]
    try:
        differing_tensors = list(tensor_differences(*both))
    except DataError as error:
        yield f"checkpoints    {error}"
        return
    if not differing_tensors:
        return
    yield f"checkpoints    of step {step}: {len(differing_tensors)} tensors differ"
    yield from (one.line() for one in differing_tensors[: most or None])
    if most and len(differing_tensors) > most:
        yield f"  and {len(differing_tensors) - most} more; --tensors 0 lists all"


def tensor_differences(one: Checkpoint, other: Checkpoint) -> Iterator[TensorDifference]:
    """Yields the tensors that differ. Raises `DataError` if the two hold different names, shapes or dtypes."""
    for file in (WEIGHTS_FILE, OPTIMIZER_FILE):
        names = [name for name, path in one.file_of_tensor.items() if path in one.parts(file)]
        if absent := [name for name in names if name not in other.file_of_tensor] or [
            n for n in other.file_of_tensor if n not in one.file_of_tensor
        ]:
            raise DataError(f"{one.folder} and {other.folder} hold other tensors, the first is {absent[0]!r}")
        for name in names:
            a, b = (read(source, name) for source in (one, other))
            if a.shape != b.shape or a.dtype != b.dtype:
                raise DataError(
                    f"{name} is {tuple(a.shape)} of {a.dtype} in one and {tuple(b.shape)} of {b.dtype} in the other"
                )
            if (compared := difference(name, a, b)).differing:
                yield compared


def read(source: Checkpoint, name: str) -> Tensor:
    with open_tensors(source.file_of_tensor[name]) as stored:
        return stored.get_tensor(name)


def difference(name: str, one: Tensor, other: Tensor) -> TensorDifference:
    """Compares two tensors, in units in the last place: the difference of the floats' bits as ordered integers."""
    a, b = ordered(one), ordered(other)
    distance = (a - b).abs().double()
    largest = math.nan if bool((one.isnan() != other.isnan()).any()) else float(distance.max()) if distance.numel() else 0.0
    bits = int((a != b).sum())
    return TensorDifference(name, bits, a.numel(), largest, float(distance.mean()) if distance.numel() else 0.0)


def ordered(values: Tensor) -> Tensor:
    """Maps floats to integers in the same order, neighbouring floats one apart; -0 maps to one below 0."""
    integer: Any = {2: torch.int16, 4: torch.int32}[values.itemsize]
    bits = values.contiguous().view(integer).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(integer).min - bits - 1, bits)


# Runs without a chain.


def unaudited(runs: list[Path]) -> list[Path]:
    """The run folders that have no chain."""
    return [run for run in runs if run.is_dir() and not (run / AUDIT_FILE).exists()]


def folder_records(runs: list[Path]) -> list[RunRecord]:
    """Records with each run's settings, versions, data, and loss, norm and rate of each step, without digests of the
    state. Versions and data come from the newest checkpoints or, if a run has none, from each run's last start. Raises
    `UsageError` for a certificate, `DataError` for a path that is not a run folder."""
    for run in runs:
        if not run.exists():
            raise DataError(f"expected a run folder or a certificate, found nothing at {run}; check the name")
        if run.is_file():
            raise UsageError(f"expected two run folders where one run was not audited, found the file {run}; name a run")
        if not (run / CONFIG_FILE).is_file() or not (run / METRICS_FILE).is_file():
            raise DataError(f"expected a run folder with {CONFIG_FILE} and {METRICS_FILE}, found {run}; check the name")
    manifests = [peeked[1] for run in runs if (peeked := checkpoint.peek(run)) is not None]
    if len(manifests) < len(runs):
        return [folder_record(run, None) for run in runs]
    return [folder_record(run, manifest) for run, manifest in zip(runs, manifests, strict=True)]


def folder_record(run: Path, manifest: dict[str, Any] | None) -> RunRecord:
    """A run's record from its settings, its metrics, and a checkpoint's manifest or the `run` line of its last start."""
    settings = {name: value for name, value in read_toml(str(run / CONFIG_FILE)).items() if name in FIELDS}
    config = to_dict(RunConfig(**{name: convert(name, value) for name, value in settings.items()}))
    lines, start = list[Line](), dict[str, Any]()
    for record in readable_records(run / METRICS_FILE):
        if record.fields.get("kind") == "run":
            start = record.fields
        elif record.fields.get("kind") == STEP:
            lines.append(step_line(record))
    facts = {"versions": {name: start.get(name) for name in KNOWN}, "identity": {"data": identity_of(start)}}
    init = start.get("init")
    if manifest is not None:
        facts, init = {name: manifest.get(name, {}) for name in facts}, manifest.get("init")
    if init:
        facts["init"] = {name: value for name, value in init.items() if name not in ("path", CONTEXT)}
    return RunRecord(run, [{"kind": BEGIN, "step": 0, "config": config, "state": {}, **facts}, *lines], run)


def identity_of(start: dict[str, Any]) -> Any:
    data = start.get("data")
    return data.get("identity") if isinstance(data, dict) else None


def step_line(record: Record) -> Line:
    """Converts a `step` line of metrics.jsonl to the form of a link."""
    numbers = {name: record.number(name).hex() for name in NUMBERS}
    skipped = record.fields.get("skipped") is not None
    return {"kind": STEP, "step": record.count("step"), **numbers, "skipped": skipped, "state": {}}
