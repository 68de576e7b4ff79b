"""The names in a run folder, and its lock: one trainer at a time holds it, until its process exits.

config.toml     the resolved configuration
metrics.jsonl   a JSON object per step, validation, sample and event
audit.jsonl     the chain of an audited run: a link per step, and a line per checkpoint
main.log        losses in llm.c's format
log.txt         the lines of the console
samples/        texts written during training
rollouts/       step_00000012.jsonl, ...: the answers of a run on rewards, with their tokens and rewards
checkpoints/    step_00001000/, ...; damaged/ and failing/: no longer used
*.damaged       lines of metrics.jsonl, main.log and audit.jsonl that could not be read
report.html     curves and tables
.lock           marks a folder as a run's
best            no folder: RUN/best stands for the checkpoint with the lowest validation loss
"""

import contextlib
import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import sleep
from typing import Any, TextIO

from handgrad.errors import ConfigError, DataError, storage_errors

CONFIG_FILE = "config.toml"
METRICS_FILE, MAIN_LOG_FILE, LOG_FILE = "metrics.jsonl", "main.log", "log.txt"
AUDIT_FILE = "audit.jsonl"
SAMPLES, ROLLOUTS, CHECKPOINTS, BEST = "samples", "rollouts", "checkpoints", "best"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"
BEGUN_IN = "begun_in"  # in a manifest: the absolute path of the folder where its paths begin

TRIES = 20
HELD = "; wait for it or choose another --out"


def missing_run(path: Path) -> str:
    """The message about a run that is not there."""
    above = next(folder for folder in path.absolute().parents if folder.is_dir())
    here = str(above.relative_to(Path.cwd())) if above.is_relative_to(Path.cwd()) else str(above)
    return f"there is no run {path}; `handgrad runs {shlex.quote(here)}` lists those in that folder"


def named_run(path: Path) -> str:
    """The advice for a path without a checkpoint: names a run in it, if it is a folder of runs."""
    if runs := sorted(folder.parent for folder in path.glob(f"*/{CHECKPOINTS}")):
        return f"name one of the runs in it, as {runs[0]}"
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"import it first: `handgrad import {shlex.quote(str(path))} --out imported`"
    return "give a run folder, the --out of `handgrad train`, or RUN/checkpoints/step_00001000"


def place_of(name: str, run: Path, config: Mapping[str, Any], manifest: Mapping[str, Any], *, needed: bool = False) -> str:
    """The path in a setting of a run, as it reads from here: "data", which may name several sets, or "init_from".
    `manifest`: of a checkpoint, or empty.

    A relative path starts at the folder from which the run's --out leads to `run`. A run that was moved alone has the
    folder in which it was begun in its manifests. The path as it stands comes last. Raises `DataError` for a path that is
    `needed` and leads nowhere."""
    text, out = str(config.get(name, "")), Path(os.path.normpath(str(config.get("out", ""))))
    parts, depth = Path(os.path.abspath(run)).parts, len(out.parts)  # noqa: PTH100 - without following links
    begun = [Path(*parts[:-depth])] if not out.is_absolute() and parts[-depth:] == out.parts else []
    recorded = manifest.get(BEGUN_IN)
    folders = [*begun, *([Path(recorded)] if isinstance(recorded, str) else [])]
    origin = (manifest.get("init") or {}).get("path") if name == "init_from" else None

    def place(path: str) -> str:
        paths = [*(str(folder / path) for folder in folders), *([origin] if isinstance(origin, str) else []), path]
        paths = list(dict.fromkeys(path if Path(one) == Path.cwd() / path else one for one in paths))
        here = next((one for one in paths if Path(one).exists()), "")
        if needed and not here:
            raise DataError(f"expected the data of {run}, found none at {' nor at '.join(paths)}; name them by --data DIR")
        return here or path

    if name != "data" or "=" not in text or Path(text).exists():
        return place(text)
    sets = (entry.strip().rpartition("=") for entry in text.split(","))
    return ",".join(f"{place(folder)}={weight}" for folder, _, weight in sets)


def take_lock(run: Path, remedy: str = HELD) -> TextIO:
    """Takes the lock of a run folder until the returned file is closed. Retries for a second, as `is_held` takes it for
    an instant. Raises `ConfigError` if another process holds it, `OSError` if the file cannot be opened."""
    path = run / LOCK_FILE
    for _ in range(TRIES):
        lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, lock):
                return lock
        except BlockingIOError:
            pass
        lock.close()  # held; or a refused start removed the file, so it locks nothing
        sleep(1 / TRIES)  # seconds
    raise ConfigError(f"another process is training in {run}, or a `handgrad.Training` that is not closed{remedy}")


def is_at(path: Path, file: TextIO) -> bool:
    """True if the path still refers to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(run: Path, remedy: str) -> Iterator[None]:
    """Keeps trainers out of a run folder in a `with` block. Raises the errors of `take_lock`."""
    with storage_errors(f"locking {run}"):
        lock = take_lock(run, remedy)
    with lock:
        yield


def is_held(run: Path) -> bool:
    """True while a live process trains in a run folder."""
    try:
        with (run / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so two callers do not block each other
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
