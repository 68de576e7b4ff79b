"""The provenance of a figure, stored beside it: machine, versions, commit and date."""

import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from handgrad.errors import DataError, HandgradError
from handgrad.machine import devices

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> str:
    """Runs a git command and returns its output; "" where there is no history."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def keep_commit() -> None:
    """Gives the records of this process the commit of now: by the end of a long run there may be another one."""
    if not git("status", "--porcelain", "--untracked-files=no"):
        os.environ.setdefault("HANDGRAD_COMMIT", git("rev-parse", "--short=12", "HEAD"))


def provenance(device: torch.device) -> dict[str, Any]:
    """The first fields of a results file. `uncommitted_changes` is there only if the code differs from the commit."""
    commit = os.environ.get("HANDGRAD_COMMIT")
    changed = not commit and git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return {
        "machine": f"{devices.describe(device)}; {os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        # A copy without its history (a tarball, a rented machine) gets its commit from the environment.
        "commit": commit or git("rev-parse", "--short=12", "HEAD") or "unknown",
        **({"uncommitted_changes": True} if changed else {}),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def rounded(value: Any, digits: int = 5) -> Any:
    """The figures of a record, to so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    return [rounded(entry, digits) for entry in value] if isinstance(value, list) else value


def version(library: str) -> str | None:
    """The version of a library, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def continued(path: str | Path, device: torch.device, same: dict[str, Any]) -> Any:
    """The figures of a record that a benchmark adds to; None where there is no file. Raises `DataError` if its commit,
    machine, versions or the fields in `same` differ: figures would not compare."""
    path = Path(path)
    if not path.is_file():
        return None
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        figures = record["figures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no record of a benchmark ({error}); remove it") from None
    origin = {name: value for name, value in provenance(device).items() if name != "date"}
    for name, value in {**origin, **same}.items():
        if record.get(name) != value:
            has = f"{path} has {name} {record.get(name)!r}, here it is {value!r}"
            raise DataError(f"{has}: the figures do not compare; name another --out")
    return figures


def free_memory(device: torch.device) -> None:
    """Returns the memory of deleted objects to the device, for other processes and the next model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit code of `main`, or with the line of its error."""
    try:
        sys.exit(main())
    except HandgradError as error:
        sys.exit(f"error: {error}")


def write_record(path: str | Path, device: torch.device, **content: Any) -> None:
    """Writes a results file: provenance first, then the figures."""
    text = json.dumps({**provenance(device), **content}, indent=1) + "\n"
    Path(path).write_text(text, encoding="utf-8")
    print(f"written    {path}")
