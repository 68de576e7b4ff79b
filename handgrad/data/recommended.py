"""The `prepare` command that fits a text, for messages that recommend it."""

import contextlib
import shlex
from pathlib import Path

from handgrad.data.sources import SUFFIXES, TALKS, files_below, is_text, longest_text, read_objects, reading
from handgrad.errors import HandgradError


def prepare_command(text: Path) -> str:
    """The command that prepares a text file, a file of conversations, or a folder of either."""
    return shlex.join(["handgrad", "prepare", str(text), *flags_for(text), "--out", out_for(text)])


def out_for(text: Path) -> str:
    """A folder for the shards of a text, by its name."""
    name = text.resolve().name
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return f"shards/{name[: len(name) - len(suffix)]}"


def flags_for(text: Path) -> list[str]:
    """The flags of `prepare` that the first row of a .jsonl file, or of a folder of such files alone, asks for."""
    files = [text] if text.is_file() else sorted(filter(is_text, files_below(text)))
    if not files or any(".jsonl" not in file.name.lower() for file in files):
        return []
    with contextlib.suppress(HandgradError), reading(files[0]):
        _, _, row = next(read_objects(files[0]), (0, "", None))
        if isinstance(row, dict) and TALKS & row.keys() and "text" not in row:
            return ["--chat"]
        if isinstance(row, dict) and "text" not in row and (name := longest_text(row)):
            return ["--text-field", name]
    return []
