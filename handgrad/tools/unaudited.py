"""Two runs, one of them without a chain, compared by their folders: configuration, newest checkpoint, metrics.jsonl."""

from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import CONTEXT
from handgrad.joins.audit.chain import BEGIN, NUMBERS, STEP, Line
from handgrad.settings.config import FIELDS, RunConfig, convert, read_toml, to_dict
from handgrad.storage.checkpoint import peek
from handgrad.storage.jsonl import Record, readable_records
from handgrad.storage.run_files import AUDIT_FILE, CONFIG_FILE, METRICS_FILE
from handgrad.tools.record import RunRecord

KNOWN = ("handgrad", "torch", "device")  # versions that the `run` line of metrics.jsonl has


def unaudited(runs: list[Path]) -> list[Path]:
    """The run folders that have no chain."""
    return [run for run in runs if run.is_dir() and not (run / AUDIT_FILE).exists()]


def folder_records(runs: list[Path]) -> list[RunRecord]:
    """Records with the settings of each run, versions and data, and loss, norm and rate of each step, without digests of
    any state. Versions and data come from the newest checkpoints, or, if a run has none, of each run's last start.

    Raises `UsageError` for a certificate, `DataError` for what is no run folder.
    """
    for run in runs:
        if not run.exists():
            raise DataError(f"expected a run folder or a certificate, found nothing at {run}; check the name")
        if run.is_file():
            raise UsageError(f"expected two run folders where one run was not audited, found the certificate {run}")
        if not (run / CONFIG_FILE).is_file() or not (run / METRICS_FILE).is_file():
            raise DataError(f"expected a run folder with {CONFIG_FILE} and {METRICS_FILE}, found {run}; check the name")
    manifests = [found[1] for run in runs if (found := peek(run)) is not None]
    if len(manifests) < len(runs):
        return [folder_record(run, None) for run in runs]
    return [folder_record(run, manifest) for run, manifest in zip(runs, manifests, strict=True)]


def folder_record(run: Path, manifest: dict[str, Any] | None) -> RunRecord:
    """A run by its settings, its metrics, and a checkpoint's manifest or the `run` line of its last start."""
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
    """A step's line of metrics.jsonl in the form of a link."""
    numbers = {name: record.number(name).hex() for name in NUMBERS}
    skipped = record.fields.get("skipped") is not None
    return {"kind": STEP, "step": record.count("step"), **numbers, "skipped": skipped, "state": {}}
