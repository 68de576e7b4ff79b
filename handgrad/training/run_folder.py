"""The folder of a run: who may write to it, which configuration it belongs to, and where it goes on.

config.toml     the resolved configuration
metrics.jsonl   one JSON object per step, validation, sample and event
main.log        losses in llm.c's format
log.txt         what the console said
samples/        texts written during training
checkpoints/    step_00001000/, ...
report.html     curves and tables
"""

import fcntl
from pathlib import Path
from typing import Any

from handgrad import checkpoint
from handgrad.checkpoint import Checkpoint
from handgrad.config import RunConfig, differences, read_toml, to_dict, to_toml
from handgrad.errors import ConfigError, UsageError, storage_error
from handgrad.files import write_durably

CONFIG_FILE, LOCK_FILE, SAMPLES, CHECKPOINTS = "config.toml", ".lock", "samples", "checkpoints"


class RunFolder:
    """A run folder opened for training: locked, its configuration written, its newest valid checkpoint found."""

    def __init__(self, config: RunConfig, *, allow_changes: bool):
        """Raises `ConfigError` if another trainer holds the folder or another configuration made it, `UsageError` if it is
        no run folder, `StorageError` if it cannot be written."""
        self.path = Path(config.out)
        self.checkpoints = self.path / CHECKPOINTS
        self.changes: list[str] = []
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file; give a folder for the run")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / LOCK_FILE).exists():
            raise UsageError(f"--out {self.path} has files in it but is no run folder; choose another folder")
        try:
            (self.path / SAMPLES).mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = (self.path / LOCK_FILE).open("a")
        except OSError as error:
            raise storage_error(error, f"making the run folder {self.path}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is training in {self.path}; wait for it or choose another --out") from None
        try:
            self.resumed, self.passed_over = checkpoint.newest(self.checkpoints)
            self._settle_config(config, allow_changes)
        except BaseException:
            self.close()
            raise

    def _settle_config(self, config: RunConfig, allow_changes: bool) -> None:
        path = self.path / CONFIG_FILE
        if self.resumed is not None and path.exists():
            self.changes = differences(read_toml(str(path)), to_dict(config))
            if self.changes and not allow_changes:
                raise ConfigError(
                    f"{self.path} was started with another configuration ({'; '.join(self.changes)});"
                    " use the old settings, another --out, or --allow-changes"
                )
        write_text(path, to_toml(config))

    def check_identity(self, identity: dict[str, Any], *, allow_changes: bool) -> None:
        """Compares what the checkpoint says of its data with the data at hand; raises `ConfigError` on a difference."""
        if self.resumed is None:
            return
        old = self.resumed.manifest.get("identity")
        old = old if isinstance(old, dict) else {}
        changed = [f"{key}: {old.get(key)} -> {value}" for key, value in identity.items() if old.get(key) != value]
        if changed and not allow_changes:
            raise ConfigError(
                f"{self.path} was trained on other data ({'; '.join(changed)});"
                " use the old data, another --out, or --allow-changes"
            )
        self.changes += changed

    def close(self) -> None:
        self._lock.close()


def write_text(path: Path, text: str) -> None:
    """`write_durably` with our error; raises `StorageError`."""
    try:
        write_durably(path, text)
    except OSError as error:
        raise storage_error(error, f"writing {path}") from None


def load_weights(source: Checkpoint, state: Any) -> None:
    """The weights of a checkpoint into a state; the optimizer starts afresh. Raises `DataError` if shapes differ."""
    source.load(checkpoint.WEIGHTS_FILE, [(row.name, row.stored(state.master)) for row in state.table])
    state.publish_master()


def load_everything(source: Checkpoint, state: Any) -> None:
    """Weights and moments of a checkpoint into a state."""
    load_weights(source, state)
    source.load(checkpoint.OPTIMIZER_FILE, [(n, t) for n, t in state.named_state() if n.startswith(("m.", "v."))])
