"""The end of the launch before, in the record of a run: did it fail, and where the launch before it had failed?"""

from pathlib import Path
from typing import Any

from handgrad.errors import DataError, NumericsError
from handgrad.run.listing import last_records

Records = dict[str, dict[str, Any]]


def records_of(run: Path) -> Records:
    """`last_records`; none where there is no record, or a damaged one."""
    try:
        return last_records(run)
    except DataError:
        return {}


def last_failure(records: Records) -> int | None:
    """The step at which the last launch of a run ended because its numbers were not finite; None if it ended otherwise."""
    last = records.get("marker", {})
    failed = last.get("kind") == "stop" and last.get("code") == NumericsError.exit_code and last.get("not_finite") is True
    return last.get("step") if failed else None


def failed_twice(records: Records, resumed: int) -> bool:
    """True if the last two launches ended at the same step in that way, the second one after it went on from the checkpoint
    of step `resumed`. A launch records where the one before it failed."""
    failed_at, launch = last_failure(records), records.get("run", {})
    return failed_at is not None and launch.get("step") == resumed and launch.get("failed_at") == failed_at
