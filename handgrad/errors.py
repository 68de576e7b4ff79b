"""Errors for users: one line that says what was expected, what was found, where, and what to do next.

`tell` prints the line and `cli.main` exits with the class's code. A bug is an `assert` or any other exception, and shows
its traceback.
"""

import errno
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HandgradError(ValueError):
    """Base of all messages for users; `exit_code` is the exit status of the command that raised it."""

    exit_code = 64
    shared = False  # all ranks of the run raise it together

    def __init__(self, message: str):
        # One line, whatever was interpolated: a message is read in a log as often as on a terminal.
        super().__init__(re.sub(r"\s*\n\s*", " ", message.strip()))


class UsageError(HandgradError):
    """The command line asks for something that does not exist or does not fit together."""


class DataError(HandgradError):
    """An input file is missing, damaged or not what its name promises."""

    exit_code = 65


class StorageError(HandgradError):
    """Reading or writing failed: no space, no permission, a broken device."""

    exit_code = 74


class Preempted(HandgradError):
    """A signal stopped the run after it saved its state; the same command goes on."""

    exit_code = 75
    shared = True


class LostRank(HandgradError):
    """Another process of the run is gone; the same command goes on from the last checkpoint."""

    exit_code = 75


class NumericsError(HandgradError):
    """The training diverged: losses or gradients stayed non-finite, or ranks that should agree do not."""

    exit_code = 76
    shared = True


class ConfigError(HandgradError):
    """A run folder or checkpoint belongs to another configuration, or is in use."""

    exit_code = 78


HINTS = {
    errno.ENOSPC: "; free some space, or write elsewhere",
    errno.EDQUOT: "; your quota is used up, write elsewhere",
    errno.EACCES: "; check its permissions",
    errno.EROFS: "; the file system is read-only, write elsewhere",
}


def storage_error(error: OSError, doing: str) -> StorageError:
    """An `OSError` met while `doing` something ("writing shards/train_000000.bin") as one readable line."""
    return StorageError(f"{doing} failed: {error.strerror or error}{HINTS.get(error.errno or 0, '')}")


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Raises an `OSError` of the block as the `storage_error` of `doing`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing) from None


def tell(error: HandgradError) -> None:
    """Prints the error's line on stderr.

    Of the processes that one torchrun has started on a machine, the first with this line prints it; all hand it to
    torchrun, whose own report ends with it.
    """
    line = f"handgrad: {error}"
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # attempt_0/RANK/error.json, in a folder of this start
        try:
            extra = {"timestamp": str(int(time.time()))}
            Path(report).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
            (Path(report).parents[1] / f"handgrad_{zlib.crc32(line.encode()):08x}").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # no such folder, or a full one: each prints its own
            pass
    print(line, file=sys.stderr, flush=True)
