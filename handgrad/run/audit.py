"""The audit chain that a run writes during training. All ranks compute each link, rank 0 writes it."""

import hashlib
from pathlib import Path
from typing import Any

from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_files
from handgrad.errors import ConfigError, storage_errors
from handgrad.evaluation.load import CHAT
from handgrad.files import file_sha256
from handgrad.joins.audit.chain import BEGIN, CHECKPOINT, FORMAT, LINKS, STEP, Line, faults, linked
from handgrad.joins.audit.digest import REPORT
from handgrad.joins.parallel.ranks import Ranks
from handgrad.run.assemble import Assembly
from handgrad.run.log import RunLog
from handgrad.settings.config import FIELDS, RunConfig, to_dict
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.manifest import MANIFEST, contradiction, step_of
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.training.step import StepResult


class Audit:
    """The chain of one run. Begins it, or continues it from a checkpoint."""

    def __init__(self, every: int, ranks: Ranks, log: RunLog):
        """`every`: steps between links; 0: no chain."""
        self.every, self.ranks, self.log = every, ranks, log
        self.last: Line = {}  # the newest link
        self.last_seal = ""  # of the newest checkpoint line, on rank 0

    def due(self, completed: int) -> bool:
        return bool(self.every) and completed % self.every == 0

    def begin(self, training: Assembly, facts: Line, resumed: Checkpoint | None, *, allow_changes: bool) -> None:
        """Continues the chain of a checkpoint, or begins one. `facts`: configuration, versions, data. Raises `ConfigError`
        if the chain on disk does not match the checkpoint."""
        if not self.every:
            return
        completed = resumed.step if resumed else 0
        last, begun = self.ranks.from_rank_0(lambda: self.fitting(resumed, allow_changes=allow_changes), "the chain")
        self.last = last
        if begun != facts:
            assert training.digest is not None
            state = training.digest.current(completed)
            self.write({"kind": BEGIN, "step": completed, "format": FORMAT, **facts, "state": state})
        seals = [line for line in self.log.chain if line["kind"] == CHECKPOINT]
        self.last_seal = seals[-1].get("seal", "") if seals else ""
        # Either a kill hit between the checkpoint and its line, or the chain begins here.
        if resumed and not any(line["step"] == completed for line in seals):
            self.seal(resumed.folder, resumed.manifest)

    def fitting(self, resumed: Checkpoint | None, *, allow_changes: bool) -> tuple[Line, Line]:
        """(last link on disk, facts of the last `begin`), on rank 0; empty if a chain must begin."""
        named = resumed.manifest.get("audit") if resumed else None
        lines = [line for line in self.log.chain if line["kind"] in LINKS]
        last = lines[-1] if lines else {}
        fault = next(faults(self.log.chain), "")
        if named is not None and last.get("link") != named["link"]:
            actual = f"{last['kind']} {last['step']} with {str(last.get('link'))[:12]}" if last else "no link"
            fault = (
                fault or f"the checkpoint names link {named['link'][:12]} of step {named['step']}, the chain has {actual}"
            )
        elif resumed and named is None and last.get("step"):  # the run continued without an audit
            if not (fault := contradiction(lines, resumed.manifest, "")):
                return last, {}
            allow_changes = True  # the user allowed the change of settings then
        if fault:
            path = self.log.folder / AUDIT_FILE
            if not allow_changes:
                remedy = "restore it, or begin a chain: --allow-changes"
                raise ConfigError(f"{path} does not fit the checkpoint: {fault}; {remedy}")
            # A chain is valid as a whole or not at all. The new one continues from the link that the checkpoint names.
            self.log.notes.append(f"{path}: set aside in {self.log.set_chain_aside()}, a chain begins here; {fault}")
            return {"link": named["link"]} if named else {}, {}
        begun = next((line for line in reversed(lines) if line["kind"] == BEGIN), {})
        return last, {key: value for key, value in begun.items() if key in FACTS}

    def add(self, training: Assembly, completed: int, result: StepResult, rollouts: Line) -> None:
        """Adds a link for the step whose result was just read, if one is due. `rollouts`: hashes of sampled answers."""
        if not self.due(completed):
            return
        digest, batch = training.digest, training.design.batch
        assert digest is not None
        first = batch.first_sample(completed - 1)
        self.write(
            {
                "kind": STEP,
                "step": completed,
                "samples": [first, first + batch.samples(completed - 1)],
                "loss": result.loss.hex(),
                "norm": result.norm.hex(),
                "learning_rate": result.learning_rate.hex(),
                "skipped": result.skipped is not None,
                "state": digest.joined(result.reports[REPORT]),
                **rollouts,
            }
        )

    def write(self, content: Line) -> None:
        self.last = linked(content, self.last.get("link", ""))
        self.log.audit(self.last)

    def named(self) -> dict[str, Any]:
        """The manifest entry that names a checkpoint's link."""
        return {"audit": {"step": self.last["step"], "link": self.last["link"]}} if self.last else {}

    def seal(self, folder: Path, manifest: Line) -> None:
        """Writes the line that binds a complete checkpoint to its link and to the previous checkpoint's line."""
        if self.last and self.ranks.is_rank_0:
            with storage_errors(f"reading {folder}"):
                digest = file_sha256(folder / MANIFEST)
            link = manifest.get("audit", self.last)["link"]  # a checkpoint older than the chain takes its first link
            content = {"kind": CHECKPOINT, "step": step_of(folder), "link": link, "manifest": digest}
            line = linked(content, self.last_seal, "seal")
            self.last_seal = line["seal"]
            self.log.audit(line)


FACTS = ("config", "versions", "identity", "init", "chat", "files")


def facts(config: RunConfig, versions: dict[str, str], identity: Line, origin: Line | None, dataset: Dataset) -> Line:
    """Everything that determines a run's numbers or its model's text: settings, versions and device, hashes of the data,
    the initial weights and the tokenizer's files, and whether the data are conversations."""
    touching = {name: value for name, value in to_dict(config).items() if not FIELDS[name].metadata["free"]}
    init = {name: value for name, value in (origin or {}).items() if name != "path"}
    known = {"config": touching, "versions": versions, "identity": identity, **({"init": init} if origin else {})}
    return known | text_facts(dataset)


def text_facts(dataset: Dataset) -> Line:
    """The chat flag and the hashes of the tokenizer's files, for `facts` and for a checkpoint's manifest."""
    files = tokenizer_files(dataset.tokenizer).items()
    return {CHAT: dataset.is_chat, "files": {name: hashlib.sha256(content).hexdigest() for name, content in files}}
