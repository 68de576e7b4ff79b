"""The folder of a run: its lock, its configuration, and the checkpoint to resume from."""

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from handgrad.data.mixture import MIXTURE
from handgrad.errors import ConfigError, DataError, UsageError, storage_errors
from handgrad.files import sync_folder, write_durably
from handgrad.joins.parallel.ranks import Ranks
from handgrad.run.listing import Records, failed_twice, last_failure, records_of
from handgrad.run.packing import DOCUMENTS, REWARD, TEACHER
from handgrad.settings.config import AUTO, STREAM, RunConfig, check, differences, to_dict, to_toml
from handgrad.settings.objective import FORWARD, TOKENS
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.run_files import CHECKPOINTS, CONFIG_FILE, LOCK_FILE, SAMPLES, take_lock


class RunFolder:
    """A run folder opened for training. Locks it, finds its newest valid checkpoint, and writes the configuration."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, allow_changes: bool, strict: bool = False):
        """Opens the folder on rank 0, which tells the other ranks the checkpoint it found. Raises `ConfigError` if
        another trainer holds the folder or another configuration made it, `UsageError` if it is no run folder,
        `StorageError` if it cannot be written."""
        self.config = config
        self.path = Path(config.out)
        self.checkpoints = self.path / CHECKPOINTS
        self.changes: list[str] = []
        self.passed_over: list[str] = []
        self.failure: dict[str, int] = {}  # failed_at: the step at which the last launch hit non-finite numbers
        self._lock: TextIO | None = None
        self._is_new = False
        self.resumed: Checkpoint | None = None
        folder = ranks.from_rank_0(lambda: self._open(allow_changes=allow_changes, strict=strict), "the run folder")
        if not ranks.is_rank_0 and folder is not None:
            self.resumed = checkpoint.open_checkpoint(folder)

    def _open(self, *, allow_changes: bool, strict: bool) -> Path | None:
        """Locks the folder; returns the folder of its newest valid checkpoint."""
        check_place(self.path)
        with storage_errors(f"making the run folder {self.path}"):
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path)  # first: the lock marks a run folder
            (self.path / SAMPLES).mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            sync_folder(self.path)
            sync_folder(self.path.parent)
        try:
            self.resumed, self.passed_over = checkpoint.newest(self.checkpoints, moves=not strict)
            if strict and self.resumed is not None and self.passed_over:
                raise DataError(checkpoint.strict_message(self.resumed, self.passed_over))
            records = records_of(self.path)
            failed_at = last_failure(records)
            self.failure = {} if failed_at is None else {"failed_at": failed_at}
            self._leave_failing(records)
            if self.resumed is None and self.passed_over:
                raise DataError(
                    f"{self.path} has checkpoints, but none that can be used ({self.passed_over[0]}); restore one,"
                    f" or remove {self.path} to start over"
                )
            if self.resumed is None and "save" in records:
                raise DataError(
                    f"expected the checkpoint of step {records['save'].get('step')} in {self.checkpoints}, found none;"
                    f" restore it, or remove {self.path} to start over"
                )
            if self.resumed is not None:
                with storage_errors(f"reading {self.checkpoints}"):
                    names = checkpoint.unknown_names(self.resumed)
                self.passed_over += [f"ignored in {self.checkpoints}: {', '.join(names)}"] if names else []
                self.changes = differences(self.resumed.manifest["config"], to_dict(self.config))
            if self.changes and not allow_changes:
                raise ConfigError(
                    f"{self.path} was started with another configuration ({'; '.join(self.changes)});"
                    f" use the old settings (--config {shlex.quote(str(self.path / CONFIG_FILE))}), another --out, or"
                    " --allow-changes"
                )
            if self.resumed is not None and self.resumed.step > self.config.steps:
                completed, asked = self.resumed.step, self.config.steps
                raise ConfigError(f"expected --steps {completed} or more, as {self.path} has made, found {asked}; raise it")
        except BaseException:
            self.close()
            raise
        return None if self.resumed is None else self.resumed.folder

    def _leave_failing(self, records: Records) -> None:
        """Falls back to the previous checkpoint if the last two launches from this one failed at the same step."""
        failing = self.resumed
        if failing is None or not failed_twice(records, failing.step):
            return
        moved_aside = self.checkpoints / checkpoint.FAILING / failing.folder.name
        if moved_aside.exists() or differences(failing.manifest["config"], to_dict(self.config)):
            return  # going back did not help, or the user is trying something else
        older, lines = checkpoint.newest(self.checkpoints, moves=True, before=failing.step)
        if older is not None:
            with storage_errors(f"moving {failing.folder}"):
                moved = checkpoint.move_aside(failing.folder, checkpoint.FAILING)
            why = f"the run failed at step {self.failure['failed_at']} each time it resumed from it; it is now in {moved}"
            self.resumed, self.passed_over = older, [*self.passed_over, f"passed over {failing.folder.name}: {why}", *lines]

    def check_identity(self, identity: dict[str, Any], *, allow_changes: bool) -> None:
        """Notes what changed. `ConfigError`: the checkpoint has seen other data."""
        old = self.resumed.manifest.get("identity") if self.resumed else identity
        old = {DOCUMENTS: identity.get(DOCUMENTS), **old} if isinstance(old, dict) else {}
        trained_on, here = self.resumed.manifest["config"].get("data") if self.resumed else None, self.config.data
        hashes = {**identity, MIXTURE: old.get(MIXTURE)}
        changed = [f"{key}: {old.get(key)} -> {value}" for key, value in hashes.items() if old.get(key) != value]
        if self.resumed and old.get(MIXTURE) != identity.get(MIXTURE):
            changed.append(f"data: {trained_on} -> {here}, after step {self.resumed.step}")
        if old.get(TEACHER) != identity.get(TEACHER) and not allow_changes:
            then, now = (str(hashes.get(TEACHER))[:12] for hashes in (old, identity))
            raise ConfigError(
                f"{self.path} learns from a teacher with SHA-256 {then}, found {now} at {self.config.teacher}; name the"
                " first by --teacher, as RUN/checkpoints/step_00001000, or choose another --out, or --allow-changes"
            )
        if old.get(REWARD) != identity.get(REWARD) and not allow_changes:
            raise ConfigError(
                f"{self.path} has learnt from another function than {self.config.reward} holds now; restore it, choose"
                " another --out, or --allow-changes"
            )
        if changed and not allow_changes:
            old = f": {trained_on}; give that --data," if trained_on else "; use the old data,"
            if trained_on == here:
                old = " holds now; restore it,"
            others = "choose another --out, or --allow-changes"
            raise ConfigError(f"{self.path} was trained on other data than {here}{old} {others}")
        self.changes += changed

    def write_config(self) -> None:
        """Claims the folder, once its checkpoint is loaded: a refused resume leaves the configuration as it was."""
        with storage_errors(f"writing {self.path / CONFIG_FILE}"):
            write_durably(self.path / CONFIG_FILE, to_toml(self.config))

    def close(self) -> None:
        """Releases the folder. Removes it if this launch created but never claimed it."""
        if self._lock is None:
            return
        if self._is_new and not (self.path / CONFIG_FILE).exists():
            with contextlib.suppress(OSError):  # not empty: keep it
                for folder in (self.path / SAMPLES, self.checkpoints):
                    folder.rmdir()
                if [path.name for path in self.path.iterdir()] == [LOCK_FILE]:  # remove it last: it marks a run folder
                    (self.path / LOCK_FILE).unlink()
                    self.path.rmdir()
        self._lock.close()


def inherited_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that `config` leaves open and that the run in `config.out` has decided."""
    begun = checkpoint.peek_config(Path(config.out))
    if begun is None:
        return {}
    # (setting, its value when left open, its value before the setting existed)
    decided = (
        ("precision", AUTO, AUTO),
        ("packing", AUTO, STREAM),
        ("objective", AUTO, TOKENS),
        ("teacher_divergence", AUTO, FORWARD),
        ("lanes", 0, 1),
        ("fp8_head", AUTO, ""),
        ("fp8_gradients", AUTO, "e4m3"),
        ("answer_tokens", 0, 0),
    )
    return {name: begun.get(name, older) for name, left_open, older in decided if getattr(config, name) == left_open}


def check_place(path: Path) -> None:
    """Raises `UsageError` if `path` cannot hold a run: it is a file, or a folder with other files."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path} is a file; give a folder for the run")
    is_run = (path / LOCK_FILE).exists() or checkpoint.folders(path / CHECKPOINTS)  # a copy may lack the lock
    if path.is_dir() and any(path.iterdir()) and not is_run:
        raise UsageError(f"--out {path} has files in it but is no run folder; choose another folder")


def model_of(config: RunConfig) -> str:
    """The model whose tokenizer the run's data must use: the run itself once it has begun, or its initial weights."""
    return config.out if checkpoint.peek(Path(config.out)) else config.init_from


def as_begun(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(`config` with the settings that the run in `config.out` keeps, a line that names these; no line for a new run)."""
    begun = inherited_settings(config)
    in_fp8 = begun.get("precision", config.precision) == "fp8"
    told = {"fp8_head": in_fp8, "fp8_gradients": in_fp8, "teacher_divergence": config.teacher}
    named = {name: value for name, value in begun.items() if value not in (TOKENS, 0) and told.get(name, True)}
    listed = ", ".join(f"{name} {value or 'none'}" for name, value in named.items())
    line = f"begun      {config.out}, which keeps the settings of its start: {listed}"
    return check(replace(config, **begun)), [line] if named else []


def resolve_lanes(config: RunConfig, ranks: int) -> int:
    """The run's lanes: from the configuration, else from the run in `config.out`, else one per rank. Raises
    `ConfigError` when the ranks cannot share them equally."""
    lanes = config.lanes or inherited_settings(config).get("lanes") or ranks
    if lanes & (lanes - 1):
        raise ConfigError(f"expected a power of two of ranks, found {lanes}; start {1 << lanes.bit_length() - 1} processes")
    if lanes % ranks:
        widths = ", ".join(str(1 << power) for power in range(lanes.bit_length()))
        raise ConfigError(f"expected ranks that share {lanes} lanes equally, found {ranks}; start {widths} processes")
    return lanes
