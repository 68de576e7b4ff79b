"""The commands that prepare a text, for messages that recommend them."""

import contextlib
import shlex
from pathlib import Path
from typing import Any

from handgrad.data.sources import SUFFIXES, TALKS, files_below, is_text, longest_text, open_parquet, read_objects, reading
from handgrad.errors import HandgradError

TURNS = {"messages", "conversations"}  # keys in TALKS that mark a conversation even if there is a text


def prepare_commands(text: Path, model: str = "", *, chat: bool = False) -> str:
    """The command that prepares a text file, a file of conversations, or a folder of either, with the tokenizer of
    `model`, which may have to be imported first. `chat`: the model was trained on conversations."""
    tokenizer, first = tokenizer_of(model)
    words = ["handgrad", "prepare", str(text), *flags_for(text, chat=chat), *tokenizer, "--out", out_for(text)]
    return f"{first}`{shlex.join(words)}`"


def tokenizer_of(model: str) -> tuple[list[str], str]:
    """(the option of `prepare` for the tokenizer of `model`, a name as in `train --init-from`, a text with the command to
    run first). The text is empty unless no command of ours wrote or fetched the weights: --tokenizer refuses these."""
    if not model:
        return [], ""
    from handgrad.data.tokenizer_loading import load_tokenizer  # imports libraries that `--help` does not need

    with contextlib.suppress(HandgradError):
        load_tokenizer(model)
        return ["--tokenizer", model], ""
    run = f"runs/{Path(model).stem}"
    return ["--tokenizer", run], f"`{shlex.join(['handgrad', 'import', model, '--out', run])}`, then "


def out_for(text: Path) -> str:
    """A folder for the shards of a text, named after the text."""
    name = text.resolve().name
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return f"shards/{name[: len(name) - len(suffix)]}"


def flags_for(text: Path, *, chat: bool = False) -> list[str]:
    """The flags of `prepare` that suit the first row of a file, or of a folder with only .jsonl files. `chat`: prefers the
    conversation of a row that also has a text."""
    files = [text] if text.is_file() else sorted(filter(is_text, files_below(text)))
    row = first_row(files) if files else {}
    if (TALKS & row.keys() and "text" not in row) or (chat and TURNS & row.keys()):
        return ["--chat"]
    return ["--text-field", name] if "text" not in row and (name := longest_text(row)) else []


def first_row(files: list[Path]) -> dict[str, Any]:
    """The first row of the first file, if all files hold rows of one kind; for parquet, its columns without values."""
    names = [file.name.lower() for file in files]
    with contextlib.suppress(HandgradError), reading(files[0]):
        if all(name.endswith(".parquet") for name in names):
            with open_parquet(files[0]) as table:
                return dict.fromkeys(table.schema_arrow.names)
        if all(".json" in name for name in names):
            _, _, row = next(read_objects(files[0]), (0, "", None))
            return row if isinstance(row, dict) else {}
    return {}
