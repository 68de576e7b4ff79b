"""Checkpoints in the record of a run: the last save, and one from which launches keep failing."""

from pathlib import Path

from handgrad.errors import DataError, NumericsError
from handgrad.run.listing import last_records


def last_failure(run: Path) -> int | None:
    """The step at which the last launch of a run ended because its numbers were not finite; None if it ended otherwise."""
    try:
        last = last_records(run).get("marker", {})
    except DataError:  # no record, or a damaged one
        return None
    failed = last.get("kind") == "stop" and last.get("code") == NumericsError.exit_code and last.get("not_finite") is True
    return last.get("step") if failed else None


def failed_twice(run: Path, resumed: int) -> bool:
    """True if the last two launches ended at the same step in that way, the second one after it went on from the checkpoint
    of step `resumed`. A launch records where the one before it failed."""
    failed_at = last_failure(run)
    if failed_at is None:
        return False
    launch = last_records(run).get("run", {})
    return launch.get("step") == resumed and launch.get("failed_at") == failed_at


def last_save(run: Path) -> int | None:
    """The step of the last checkpoint that the run's record says it wrote; None if it says so of none."""
    try:
        return last_records(run).get("save", {}).get("step")
    except DataError:  # no record, or a damaged one
        return None
