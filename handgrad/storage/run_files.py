"""The names in a run folder.

config.toml     the resolved configuration
metrics.jsonl   a JSON object per step, validation, sample and event
audit.jsonl     the chain of an audited run: a link per step, and a line per checkpoint
main.log        losses in llm.c's format
log.txt         the lines of the console
samples/        texts written during training
checkpoints/    step_00001000/, ...; damaged/ and failing/: no longer used
*.damaged       lines of metrics.jsonl, main.log and audit.jsonl that could not be read
report.html     curves and tables
.lock           marks a folder as a run's; one trainer at a time holds it
best            no folder: RUN/best stands for the checkpoint with the lowest validation loss
"""

from pathlib import Path

CONFIG_FILE = "config.toml"
METRICS_FILE, MAIN_LOG_FILE, LOG_FILE = "metrics.jsonl", "main.log", "log.txt"
AUDIT_FILE = "audit.jsonl"
SAMPLES, CHECKPOINTS, BEST = "samples", "checkpoints", "best"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"


def named_run(path: Path) -> str:
    """The advice for a path that holds no checkpoint: a run in it, if it is a folder of runs."""
    if runs := sorted(folder.parent for folder in path.glob(f"*/{CHECKPOINTS}")):
        return f"name one of the runs in it, as {runs[0]}"
    return "give a run folder, the --out of `handgrad train`, or RUN/checkpoints/step_00001000"
