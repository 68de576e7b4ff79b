"""The provenance of a figure, stored beside it: machine, versions, commit and date."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from handgrad import devices

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


def write_record(path: str | Path, device: torch.device, **content: Any) -> None:
    """Writes a results file: provenance first, then the figures."""
    text = json.dumps({**provenance(device), **content}, indent=1) + "\n"
    Path(path).write_text(text, encoding="utf-8")
    print(f"written    {path}")
