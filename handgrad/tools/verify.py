"""Replays a run between its checkpoints, with the training loop itself, and compares link by link."""

import itertools
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.data.mixture import MIXTURE
from handgrad.errors import AuditError, ConfigError, UsageError
from handgrad.evaluation.load import CHAT
from handgrad.joins.audit.chain import Line, differing, meaning, numbers_text
from handgrad.run.loop import Run
from handgrad.run.open import open_run
from handgrad.settings.config import RunConfig, check
from handgrad.storage import checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE, read_manifest
from handgrad.storage.run_files import CHECKPOINTS, LOCK_FILE, ROLLOUTS
from handgrad.tools.record import RunRecord, check_data, check_initial, config_of, machine_differences
from handgrad.training.step import StepResult

# Fields of a checkpoint's manifest that a replay compares. Fields that a run's checkpoints share are compared before it.
REPEATED = (CHAT, "vocab_size", "tokenizer", "loss_window", "norm_window", "loss_scale", "skips_in_a_row")


@dataclass(frozen=True)
class Span:
    """Steps `first` + 1 to `last`, replayed from the state after `first`."""

    first: int
    last: int


def spans_of(record: RunRecord, first: int | None, last: int | None, segments: int, seed: int) -> list[Span]:
    """Chooses the spans to replay: `first` to `last`, or `segments` spans between neighbouring checkpoints, drawn with
    `seed`. Raises `UsageError` or `ConfigError` for steps that no replay can reach."""
    starts = record.starts
    if not starts:
        raise UsageError(f"{record.path} has no checkpoint at hand before step {record.last_step}; put one in checkpoints/")
    first = starts[0] if first is None else first
    last = record.last_step if last is None else last
    if first not in starts:
        near = min(starts, key=lambda step: abs(step - first))
        raise UsageError(f"expected --from with a checkpoint at hand, or 0, found {first}; the nearest is {near}")
    if not first < last <= record.last_step:
        raise UsageError(f"expected --to after {first}, up to the record's last step {record.last_step}, found {last}")
    cuts = [step for step in starts if first < step < last]
    for before, begin in zip([record.begun(first), *record.begins], record.begins, strict=False):
        if first < begin["step"] < last and rules_of(begin) != rules_of(before) and begin["step"] not in cuts:
            raise ConfigError(
                f"{record.path} goes on with another configuration after step {begin['step']}, of which no checkpoint is at"
                f" hand; verify up to there: --to {begin['step']}"
            )
    edges = [first, *cuts, last]
    pieces = [Span(a, b) for a, b in itertools.pairwise(edges)]
    if segments:
        return sorted(random.Random(seed).sample(pieces, min(segments, len(pieces))), key=lambda span: span.first)
    changed = [begin["step"] for begin in record.begins if rules_of(begin) != rules_of(record.begun(first))]
    edges = [first, *(step for step in cuts if step in changed), last]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def rules_of(begin: Line) -> tuple[Line, str | None]:
    """The configuration and the weights of the data from a `begin` on."""
    return begin["config"], begin["identity"].get(MIXTURE)


def begins_of(record: RunRecord, span: Span) -> list[Line]:
    """The `begin`s in force during a span."""
    return [record.begun(span.first), *(line for line in record.begins if span.first < line["step"] < span.last)]


def check_machine(record: RunRecord, spans: Sequence[Span], elsewhere: dict[str, str], *, allow_changes: bool) -> list[str]:
    """Lists how this machine differs from the run's. Raises `DataError` for other data, and `ConfigError` for another
    device or other versions unless `allow_changes`."""
    lines = list[str]()
    for span in spans:
        config = config_of(record, span.first, elsewhere)
        check_data(record, begins_of(record, span), config)
        lines += [line for line in machine_differences(begins_of(record, span), config) if line not in lines]
    if lines and not allow_changes:
        raise ConfigError(
            f"{record.path} was made with another device or versions ({'; '.join(lines)}), which may give other bits;"
            " verify with those (threads: OMP_NUM_THREADS), or --allow-changes"
        )
    return lines


def replay(record: RunRecord, span: Span, elsewhere: dict[str, str], scratch: Path, *, writes: bool) -> tuple[int, int]:
    """Repeats the steps of a span in the empty folder `scratch`; returns (equal links, equal checkpoints). `writes`: True
    on the rank that prepares the folder. Raises `AuditError` at the first difference."""
    config = quiet(config_of(record, span.first, elsewhere), scratch)
    if writes:
        prepare(record, span, scratch)
    with open_run(config, allow_changes=True, console="nothing") as run:
        if not span.first:
            check_initial(record, run.origin, config.init_from)
        run.begin()
        comparing = Comparing(record, span, run)
        comparing.begin()
        run.advance(span.last, comparing.step)
    for path in sorted((scratch / ROLLOUTS).glob("*")):
        if (stored := record.folder / ROLLOUTS / path.name).exists() and stored.read_bytes() != path.read_bytes():
            raise AuditError(f"{stored} was changed: the replay has other answers or rewards")
    return comparing.links, comparing.checkpoints


def quiet(config: RunConfig, scratch: Path) -> RunConfig:
    """The run's configuration without validations, samples, saves and trackers, and with a link for every step."""
    nothing: dict[str, Any] = {"eval_tasks": "", "log_to": "", "keep_best": False, "async_save": False}
    nothing |= dict.fromkeys(("eval_every", "sample_every", "sample_tokens", "gpu_every", "save_every", "keep_every"), 0)
    return check(replace(config, out=str(scratch), audit_every=1, eval_tokens=1, keep_checkpoints=0, **nothing))


def prepare(record: RunRecord, span: Span, scratch: Path) -> None:
    """Creates the folder of a run that stopped where the span begins."""
    (scratch / LOCK_FILE).touch()
    (scratch / CHECKPOINTS).mkdir()
    if span.first:
        folder = record.checkpoints[span.first].absolute()
        (scratch / CHECKPOINTS / folder.name).symlink_to(folder, target_is_directory=True)
    if (sampled := record.folder / ROLLOUTS).is_dir():  # a span may begin between two updates on the same ones
        shutil.copytree(sampled, scratch / ROLLOUTS)


class Comparing:
    """Compares a replay with its record while it runs."""

    def __init__(self, record: RunRecord, span: Span, run: Run):
        self.record, self.span, self.run = record, span, run
        self.recorded, self.at_hand = record.steps, record.checkpoints
        self.begun_again = {line["step"]: line for line in begins_of(record, span)[1:]}
        self.links = self.checkpoints = 0
        self.equal = span.first  # the last step whose state was compared

    def begin(self) -> None:
        """Compares the state that the replay starts from. Raises `AuditError` if it differs."""
        step, link = self.span.first, self.record.state_at(self.span.first)
        if link is None:
            return  # no link for this step: the next link must do
        digest = self.run.training.digest
        assert digest is not None
        state = digest.current(step)
        if link["state"] != state:
            names = ", ".join(name for name in {**state, **link["state"]} if state.get(name) != link["state"].get(name))
            source = f"{self.at_hand[step]}" if step else "the initial state"
            raise AuditError(f"{self.record.path}, step {step}: {source} is not the state of the link; {names} differ")

    def step(self, completed: int, result: StepResult) -> None:
        """Compares the link of the step just made, and its checkpoint if at hand. Raises `AuditError` for a difference."""
        link, replayed = self.recorded.get(completed), self.run.audit.last
        fields = [] if link is None else differing(replayed, link)
        if (begin := self.begun_again.get(completed)) and begin["state"] != replayed["state"] and not fields:
            raise AuditError(f"{self.record.path}, step {completed}: the state that it begins anew with is another")
        tensors = self.differing_tensors(completed) if completed in self.at_hand else []
        if fields or tensors:
            raise AuditError(f"{self.record.path}, step {completed}: {self.difference(completed, link, fields, tensors)}")
        if numbers := self.differing_numbers(completed) if completed in self.at_hand else []:
            manifest = f"{', '.join(numbers)} in the manifest of {self.at_hand[completed]}"
            raise AuditError(f"{self.record.path}, step {completed}: every tensor is equal; {manifest} are others")
        self.links += link is not None
        self.checkpoints += completed in self.at_hand
        self.equal = completed if link is not None or completed in self.at_hand else self.equal

    def difference(self, completed: int, link: Line | None, fields: list[str], tensors: list[tuple[str, int, int]]) -> str:
        text = "no link" if link is None else "every digest is equal"
        if link is not None and fields:
            numbers = numbers_text(fields, link, self.run.audit.last, ", replayed ")
            text = f"{meaning(fields, completed, self.equal)} ({', '.join(fields)}{f'; {numbers}' if numbers else ''})"
        if tensors:
            name, count, elements = tensors[0]
            more = f", the first of {len(tensors)} tensors" if len(tensors) > 1 else ""
            text += f"; in {self.at_hand[completed]} {count} of {elements} elements of {name} differ{more}"
        return text

    def differing_numbers(self, step: int) -> list[str]:
        """Names the fields of a checkpoint's manifest that differ from the replay's and that a resumed run or a reader of
        the model uses. Leaves out fp8's scales: on a GPU the next step may already be changing them."""
        stored, replayed = read_manifest(self.at_hand[step]), self.run.manifest()
        further = sorted(stored.keys() - replayed.keys() - {"schema", "step", "files"})
        stored.setdefault(CHAT, replayed[CHAT])  # older ones lack it
        return [name for name in REPEATED if stored.get(name) != replayed[name]] + further

    def differing_tensors(self, step: int) -> list[tuple[str, int, int]]:
        """(name, differing elements, elements) of each tensor of a checkpoint that differs from the replay's."""
        folder = self.at_hand[step]
        training, source = self.run.training, checkpoint.Checkpoint(folder, read_manifest(folder))  # `hold` has hashed it
        training.await_weights()
        state, names, counts, elements = training.state, list[str](), list[float](), list[int]()
        for saved in state.saved:
            for row in saved.layout.rows:
                file = WEIGHTS_FILE if saved.values is state.master else OPTIMIZER_FILE
                values = source.tensor(file, row.name, row.stored_shape).reshape(-1)
                pieces = [(row.stored(saved.values).reshape(-1), slice(None))] if saved.is_whole else saved.pieces(row)
                if saved.is_whole and not self.run.ranks.is_rank_0:
                    pieces = []  # all ranks hold it; rank 0 counts
                names.append(row.name)
                counts.append(sum(unequal(piece, values[part]) for piece, part in pieces))
                elements.append(values.numel())
        totals = [sum(column) for column in zip(*self.run.ranks.all_gather_numbers(counts, "a checkpoint"), strict=True)]
        return [(n, int(t), e) for n, t, e in zip(names, totals, elements, strict=True) if t]


def unequal(replayed: Tensor, stored: Tensor) -> int:
    """The number of elements whose bits differ."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[replayed.itemsize]
    return int((replayed.cpu().contiguous().view(integer) != stored.contiguous().view(integer)).sum())


def holds(record: RunRecord, spans: Sequence[Span], links: int, checkpoints: int, begun: float) -> str:
    """One line about a record that passed."""
    steps = ", ".join(f"{span.first} to {span.last}" for span in spans)
    states = f" and {checkpoints} checkpoint{'s' * (checkpoints != 1)}" if checkpoints else ""
    late = record.begins[0]["step"]
    before = f", none before step {late}, where its chain begins" if late else ""
    apart = [step for step in record.checkpoints if not any(span.first <= step <= span.last for span in spans)]
    others = sum(step >= late for step in apart)
    before += f"; {others} other checkpoint{'s' * (others != 1)} by hash alone" if others else ""
    equal = f"{links} link{'s' * (links != 1)}{states} equal"
    return f"{record.path} holds: {equal}, bit by bit, of steps {steps}{before} ({time.perf_counter() - begun:.1f} s)"
