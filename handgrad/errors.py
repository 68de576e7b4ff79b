"""What a user may be told: one line that says what was expected, what was found, where, and what to try next.

Everything a user can cause is raised as one of these classes and printed by `cli.main`, which exits with the class's
code. A mistake of our own is an `assert` or any other exception, and shows its traceback.
"""

import errno
import re


class HandgradError(ValueError):
    """Base of all messages meant for users; `exit_code` is the exit status of the command that raised it."""

    exit_code = 64
    shared = False  # whether every rank of the run ends by it

    def __init__(self, message: str):
        # One line, whatever was interpolated: a message is read in a log as often as on a terminal.
        super().__init__(re.sub(r"\s*\n\s*", " ", message.strip()))


class UsageError(HandgradError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 64


class DataError(HandgradError):
    """An input file is missing, damaged or not what its name promises."""

    exit_code = 65


class StorageError(HandgradError):
    """Reading or writing failed: no space, no permission, a device that gave up."""

    exit_code = 74


class Preempted(HandgradError):
    """The run was asked to stop, saved its state and can be launched again with the same command."""

    exit_code = 75
    shared = True


class LostRank(HandgradError):
    """Another process of the run is gone; launched again with the same command, all go on from the last checkpoint."""

    exit_code = 75


class NumericsError(HandgradError):
    """The training diverged: losses or gradients stayed non-finite, or ranks that should agree do not."""

    exit_code = 76
    shared = True


class ConfigError(HandgradError):
    """A run folder or checkpoint belongs to another configuration, or is in use."""

    exit_code = 78


def storage_error(error: OSError, doing: str) -> StorageError:
    """Turns an `OSError` met while `doing` something ("writing shards/train_000000.bin") into one readable line."""
    hint = {
        errno.ENOSPC: "; free some space, or write elsewhere",
        errno.EDQUOT: "; your quota is used up, write elsewhere",
        errno.EACCES: "; check its permissions",
        errno.EROFS: "; the file system is read-only, write elsewhere",
    }.get(error.errno or 0, "")
    return StorageError(f"{doing} failed: {error.strerror or error}{hint}")
