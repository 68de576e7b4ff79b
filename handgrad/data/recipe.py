"""The settings of `prepare`, and the recipe of a dataset: everything that determines the bytes of its shards."""

import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.data.chat_template import ChatTemplate
from handgrad.data.codes import MOST_COLOURS, MOST_SIDE, RGB, Codes, View
from handgrad.data.model_tokenizer import MODEL_FILE
from handgrad.data.recommended import out_for
from handgrad.data.shards import MANIFEST_FILE, MAX_SHARD_TOKENS, read_manifest
from handgrad.data.sources import SourceFile
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import UsageError
from handgrad.files import file_sha256

STORIES, QUESTIONS, SPRITES = "stories", "questions", "sprites"  # the sources that are generated
DEFAULT_DOCUMENTS = {STORIES: 100_000, QUESTIONS: 100_000, SPRITES: 20_000}


@dataclass(frozen=True)
class PrepareOptions:
    """The settings of `prepare`."""

    # stories, questions, sprites, a path or glob, shakespeare, tinystories, fineweb, fineweb-edu, or OWNER/NAME[:CONFIG]
    source: str
    out: Path
    tokenizer: str = "auto"  # auto, gpt2, bytes, bpe:SIZE (trained on the source), or a tokenizer.json
    text_field: str = "text"  # key or column of the text in a row
    shard_tokens: int = 100_000_000
    validation_fraction: float | None = None  # None: 0.1 of text files, 0.05 of rows, 0.005 of hub rows, 0.01 of stories
    workers: int = 0  # processes; 0: one per core
    seed: int = 0  # of the stories, and of the choice of validation rows
    documents: int = 0  # at most this many; 0: all (stories, questions: 100,000)
    chat: bool = False  # the rows are conversations, trained on what the assistant says; questions always are
    preferences: bool = False  # the rows are pairs of a chosen and a rejected answer
    skip_bad_rows: bool = False  # leave out rows that are not conversations, and report how many
    codes: str = ""  # of pictures: palette:COLOURS, rgb, or a run of an autoencoder; empty: the source is text
    size: str = "32"  # of a picture in codes: ROWSxCOLUMNS, or a number for both
    join: str = ""  # a .jsonl file of captions for pictures
    strict: bool = False  # refuse pictures of another size, which are otherwise resized
    coded: Codes | None = None  # the codes of an autoencoder (`evaluation.codec.with_codec`), and
    view: View | None = None  # what makes them of pictures
    overwrite: bool = False

    @property
    def is_generated(self) -> bool:
        return self.source in DEFAULT_DOCUMENTS

    @property
    def is_pictures(self) -> bool:
        return bool(self.codes) or self.source == SPRITES

    @property
    def is_chat(self) -> bool:
        return self.chat or self.preferences or self.source == QUESTIONS

    @property
    def most_documents(self) -> int:
        """0: all."""
        return self.documents or DEFAULT_DOCUMENTS.get(self.source, 0)


def check_options(options: PrepareOptions) -> None:
    """Raises UsageError for options that make no sense, DataError for a file that is not a tokenizer."""
    fraction = options.validation_fraction
    if not options.out.name or options.out.name == "..":
        raise UsageError(f"expected a folder to write, found --out {options.out}; name a new one, for example shards")
    if not 2 <= options.shard_tokens <= MAX_SHARD_TOKENS:
        raise UsageError(f"expected 2 to {MAX_SHARD_TOKENS} tokens a shard, found {options.shard_tokens}; try 100000000")
    if fraction is not None and not 0 < fraction <= 0.5:
        raise UsageError(f"expected a validation fraction above 0 and up to 0.5, found {fraction}; try 0.1")
    for name in ("workers", "documents", "seed"):
        if (value := getattr(options, name)) < 0:
            raise UsageError(f"expected --{name} of 0 or more, found {value}; leave it out for the default")
    if options.preferences and (options.chat or options.is_generated):
        source = "--chat" if options.chat else options.source
        raise UsageError(f"--preferences reads pairs of answers, found it with {source}; leave one out")
    check_pictures(options)
    if options.skip_bad_rows and not options.chat:
        raise UsageError("--skip-bad-rows goes with --chat, found it without; leave it out")
    if options.tokenizer.startswith("bpe:"):
        if not re.fullmatch(r"bpe:\d{3,5}", options.tokenizer) or not 257 <= int(options.tokenizer[4:]) <= 65536:
            raise UsageError(f"expected bpe:SIZE with 257 to 65536 tokens, found {options.tokenizer!r}; try bpe:4096")
    elif options.tokenizer != "auto":
        load_tokenizer(options.tokenizer)  # raises before any work


def check_pictures(options: PrepareOptions) -> None:
    """Raises `UsageError` for settings that pictures lack, or that only pictures have."""
    if not options.codes:
        for name in ("join", "strict", "size"):
            if getattr(options, name) != getattr(PrepareOptions, name):
                raise UsageError(f"--{name} is for files of pictures, found it without --codes; try --codes palette:512")
    if not options.is_pictures:
        return
    for name, usual in (("chat", False), ("preferences", False), ("tokenizer", "auto")):
        if getattr(options, name) != usual:
            raise UsageError(f"--{name} is for text, found it with pictures; leave it out")
    if options.codes and options.source in DEFAULT_DOCUMENTS:
        raise UsageError(f"--codes is for files of pictures, found it with {options.source}; leave one out")
    if options.codes:
        sides(options.size)
    if options.codes == RGB and options.join:
        raise UsageError("--codes rgb is for an autoencoder, which reads pictures alone, found --join; leave it out")
    if options.codes and options.codes != RGB and options.coded is None:
        palette_size(options.codes)
    if options.join and not Path(options.join).is_file():
        raise UsageError(f"expected a file of captions, found no {options.join}; check --join")


def palette_size(codes: str) -> int:
    """The colours of `palette:COLOURS`. Raises `UsageError` for another text."""
    if not (size := re.fullmatch(r"palette:(\d{1,5})", codes)) or not 2 <= int(size[1]) <= MOST_COLOURS:
        forms = f"palette:COLOURS with 2 to {MOST_COLOURS}, rgb, or a run of a vqvae"
        raise UsageError(f"expected --codes {forms}, found {codes!r}; try palette:512")
    return int(size[1])


def sides(size: str) -> tuple[int, int]:
    """(rows, columns) of `ROWSxCOLUMNS`, or of one number. Raises `UsageError` for another text."""
    numbers = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", size)
    rows, columns = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if not (1 <= rows <= MOST_SIDE and 1 <= columns <= MOST_SIDE):
        raise UsageError(f"expected --size ROWSxCOLUMNS or one number, 1 to {MOST_SIDE}, found {size!r}; try 32")
    return rows, columns


def recipe_of(options: PrepareOptions, files: list[SourceFile] | None) -> dict[str, Any]:
    """Everything that determines the bytes of the shards. `files` None: a hub dataset, compared only by name."""
    spec = options.tokenizer
    tokenizer = None if spec.startswith("bpe:") or options.is_pictures else load_tokenizer(spec)
    local = files and not any(file.download for file in files)
    others = ("text_field", "shard_tokens", "validation_fraction", "seed", "documents")
    return {
        "source": Path(options.source).name if local else options.source,
        "files": None if files is None else [[f.name, f.size_bytes, f.fingerprint] for f in files],
        "tokenizer": spec if tokenizer is None or spec in ("gpt2", "bytes") else f"file {tokenizer.sha256}",
        **({"begins": list(tokenizer.begins)} if tokenizer and tokenizer.begins and not options.is_chat else {}),
        **{name: getattr(options, name) for name in others},
        **({"chat": _chat_form(tokenizer)} if options.is_chat else {}),
        **({"skip_bad_rows": True} if options.skip_bad_rows else {}),
        **({"preferences": True} if options.preferences else {}),
        **(_pictures_form(options) if options.is_pictures else {}),
    }


def _pictures_form(options: PrepareOptions) -> dict[str, Any]:
    """The recipe's entries for pictures."""
    if options.source == SPRITES:
        return {"codes": SPRITES}
    join = file_sha256(Path(options.join)) if options.join else ""
    return {"codes": options.codes, "size": list(sides(options.size)), "join": join, "strict": options.strict}


def _chat_form(tokenizer: Tokenizer | None) -> str:
    """The recipe's entry for the chat template. `tokenizer` None: a vocabulary that is yet to be trained."""
    if tokenizer is None or ChatTemplate(tokenizer).is_plain:
        return "plain"
    files = json.dumps({k: v for k, v in tokenizer.others.items() if k != MODEL_FILE}, sort_keys=True).encode()
    return f"template {hashlib.sha256(files).hexdigest()}"


def is_prepared(options: PrepareOptions, recipe: dict[str, Any]) -> bool:
    """True if `out` holds this dataset. UsageError: it holds something else, and --overwrite was not given."""
    out = options.out
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST_FILE).is_file():
        free = Path(out_for(Path(options.source)))
        like = f", as {shlex.quote(str(free))}" if Path(options.source).exists() and not free.exists() else ""
        raise UsageError(
            f"expected no folder or a prepared dataset at {out}, found something else; choose another folder{like}"
        )
    if options.overwrite:
        return False
    stored = read_manifest(out).get("recipe")
    earlier = stored if isinstance(stored, dict) else {}
    # Compares a hub dataset only by name: once prepared, it needs no connection.
    recipe = dict.fromkeys(("chat", "skip_bad_rows", "preferences", "codes"), None) | recipe
    different = (key for key in recipe if earlier.get(key) != recipe[key] and not (key == "files" and recipe[key] is None))
    if (key := next(different, None)) is None:
        return True
    change = "other source files" if key == "files" else f"{key} {earlier.get(key)!r:.60} instead of {recipe[key]!r:.60}"
    raise UsageError(f"expected the dataset asked for at {out}, found one with {change}; use another --out, or --overwrite")
