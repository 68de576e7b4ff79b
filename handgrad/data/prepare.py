"""Turns documents into shards: one process reads, many tokenise. Any number of workers gives the same bytes.

The main process reads documents, cuts long ones and groups the pieces into units (`pieces`). Workers tokenise units;
the main process appends their tokens in order and journals its progress (`writer`). A second attempt reads the source again
but tokenises only what is missing. The folder gets its name when it is complete.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import handgrad
from handgrad.data import hub
from handgrad.data.chat import check_files
from handgrad.data.codes import PALETTE, codes_tokenizer
from handgrad.data.llmc_header import token_form
from handgrad.data.picture_pieces import make_codes
from handgrad.data.pictures import find_pictures
from handgrad.data.pieces import TRAIN, units_of
from handgrad.data.recipe import QUESTIONS, SPRITES, STORIES, PrepareOptions, check_options, is_prepared, recipe_of
from handgrad.data.shards import MANIFEST_FILE, MAX_SHARD_TOKENS, SCHEMA, SPLITS, Dataset, open_dataset
from handgrad.data.sources import SourceFile, find_local, holds_text
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer, train_bpe, write_tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer, read_tokenizer
from handgrad.data.writer import (
    JOURNAL_FILE,
    SplitState,
    SplitWriter,
    read_journal,
    tokenize_in_order,
    unit_pieces,
    write_journal,
)
from handgrad.errors import DataError, StorageError, UsageError, storage_errors
from handgrad.files import locked, sync_folder, write_durably

BPE_SAMPLE_CHARACTERS = 16 << 20
CHECKPOINT_UNITS = 32  # about 32 MB of text, a few seconds of one core
# A worker starts in a third of a second: less work than this gets none.
BYTES_PER_WORKER, STORIES_PER_WORKER = 2 << 20, 5000
# Trains a vocabulary on a text below this size: in 4 MiB, a million tokens, each of GPT-2's 50,257 occurs twenty times in
# the text on average, and most of them never; a small model would spend its weights and its time on them.
SMALL_TEXT_BYTES, SMALL_TEXT_TOKENIZER = 4 << 20, "bpe:4096"


class Progress(NamedTuple):
    """`done` of `total` (None: unknown) `unit`s ("bytes" or "documents") of `phase`, and the tokens written so far."""

    phase: str
    done: int
    total: int | None
    unit: str
    tokens: int


class Prepared(NamedTuple):
    """The dataset; `already_prepared` if it needed no work."""

    dataset: Dataset
    already_prepared: bool


def prepare(options: PrepareOptions, progress: Callable[[Progress], None] | None = None) -> Prepared:
    """Writes the shards that `options` describe, finishes an interrupted attempt, or returns the finished dataset.
    Raises UsageError: options that make no sense, or another dataset at `out`; DataError: the source is missing,
    damaged, or too small for two splits; StorageError: disk, network, or a killed worker."""
    check_options(options)
    out, source = options.out, options.source
    there = options.is_generated or bool(options.codes) or Path(source).expanduser().exists()
    from_hub = not there and hub.is_hub_name(source)
    if options.chat and (source == STORIES or (from_hub and source in ("shakespeare", *hub.ALIASES))):
        remedy = "name a file, a folder or OWNER/NAME, or leave --chat out to prepare text"
        raise UsageError(f"expected conversations with --chat, found {source!r}; {remedy}")
    if (Path(source) / MANIFEST_FILE).is_file() and not holds_text(Path(source)):
        ready = f"`handgrad train --data {shlex.quote(source)}` trains on it"
        raise DataError(f"expected a text source, found {source}, which is prepared already; {ready}")
    with storage_errors(f"writing {out}"):
        with storage_errors(f"reading {source}"):
            find = find_pictures if options.codes else find_local
            files = None if from_hub else [] if options.is_generated else find(source)
        if options.preferences:
            options = replace(options, shard_tokens=MAX_SHARD_TOKENS)  # a split is one shard, with one file of references
        if options.chat or options.preferences:
            check_files(files or [], pairs=options.preferences)
        if options.tokenizer == "auto" and not options.is_pictures:
            options = replace(options, tokenizer="bytes" if source == QUESTIONS else suited_tokenizer(files or []))
        if is_prepared(options, recipe_of(options, files)):
            return Prepared(open_dataset(out), True)
        if files is None:
            files = hub.find_hub(source)
            if options.chat or options.preferences:
                check_files(files, pairs=options.preferences)
        partial = out.with_name(out.name + ".partial")
        with locked(partial):
            attempt = _Attempt(options, files, partial, progress or (lambda _: None))
            try:
                attempt.run()
                _rename(partial, out)
            except DataError:
                attempt.discard()  # a repeat fails at the same place; after a change it begins anew
                raise
            except KeyboardInterrupt:
                how = "go on" if attempt.keeps_its_work() else "start again"
                raise KeyboardInterrupt(f"interrupted; run the same command to {how}") from None
        return Prepared(open_dataset(out), False)


def suited_tokenizer(files: list[SourceFile]) -> str:
    """The tokenizer for `auto`: one trained on the text for small local files, else GPT-2's."""
    own = files and not any(file.download for file in files)
    return SMALL_TEXT_TOKENIZER if own and sum(file.size_bytes for file in files) < SMALL_TEXT_BYTES else "gpt2"


class _Attempt:
    """An attempt to complete the folder `partial`, new or resumed."""

    def __init__(self, options: PrepareOptions, files: list[SourceFile], partial: Path, report: Callable[[Progress], None]):
        self.options, self.files, self.partial, self.report = options, files, partial, report
        self.recipe = recipe_of(options, files)
        self.size_bytes = sum(file.size_bytes for file in files)

    def fetch(self, file: SourceFile) -> Path:
        return hub.fetch(file, lambda done, size: self.report(Progress(f"downloading {file.name}", done, size, "bytes", 0)))

    def run(self) -> None:
        tokenizer, units_done, states = self.begin()
        record = write_tokenizer(tokenizer, self.partial)
        file = str(self.partial / TOKENIZER_FILE)
        spec = {"bpe": file, PALETTE: file, "model": self.options.tokenizer}.get(tokenizer.kind, tokenizer.kind)
        documents = self.options.most_documents
        enough = documents // STORIES_PER_WORKER if self.options.is_generated else self.size_bytes // BYTES_PER_WORKER
        unit, total = ("documents", documents) if documents else ("bytes", self.size_bytes)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = 1 if self.options.view else max(1, min(self.options.workers or cores, enough))  # a view has threads
        form, chat = token_form(tokenizer.vocab_size), self.options.is_chat
        writers = [
            SplitWriter(self.partial, split, self.options.shard_tokens, states[split], form, chat) for split in SPLITS
        ]

        def checkpoint() -> None:
            for writer in writers:
                writer.checkpoint()
            write_journal(self.partial, self.recipe, record, units_done, states)

        checkpoint()
        try:
            missing = itertools.islice(units_of(self.options, self.files, self.fetch), units_done, None)
            # Closed at once when anything fails, so that no worker outlives the attempt.
            with contextlib.closing(tokenize_in_order(tokenizer, spec, missing, workers)) as results:
                for position, encoded in results:
                    for writer, part in zip(writers, encoded, strict=True):
                        writer.append(part)
                    units_done += 1
                    if units_done % CHECKPOINT_UNITS == 0:
                        checkpoint()
                    tokens = sum(state.tokens for state in states.values())
                    done = position.documents if documents else position.size_bytes
                    self.report(Progress("tokenising", done, total, unit, tokens))
            for writer in writers:
                writer.finish_shard()
        except StorageError:  # reading or a worker failed between two units: keep the finished ones
            checkpoint()
            raise
        finally:
            with contextlib.suppress(OSError):  # a full disk fails again here; its error is already raised
                for writer in writers:
                    writer.close()
        self.check_splits(states)
        manifest = self.manifest(record, len(tokenizer.document_start), states)
        write_durably(self.partial / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")

    def begin(self) -> tuple[Tokenizer, int, dict[str, SplitState]]:
        """(tokenizer, units done, state per split): from the journal if it has this recipe, else a clean start."""
        if (journal := read_journal(self.partial, self.recipe)) is not None:
            record, units_done, states = journal
            with contextlib.suppress(DataError):  # a tokenizer.json that changed: start over
                return read_tokenizer(self.partial, record), units_done, states
        self.clear()
        if self.options.is_pictures:
            self.report(Progress("training the palette", 0, None, "bytes", 0))
            tokenizer = codes_tokenizer(make_codes(self.options, self.files))
        elif self.options.tokenizer.startswith("bpe:"):
            self.report(Progress("training the tokenizer", 0, None, "bytes", 0))
            tokenizer = train_bpe(self.training_texts(), int(self.options.tokenizer[4:]))
        else:
            tokenizer = load_tokenizer(self.options.tokenizer)
        return tokenizer, 0, {split: SplitState() for split in SPLITS}

    def clear(self) -> None:
        """Removes the files that have names of ours."""
        for path in self.partial.iterdir():
            if re.fullmatch(
                r"(train|validation)_\d{6}\.(bin|idx|trained)|(journal|manifest|tokenizer(_others)?)\.json(\.\d+\.new)?",
                path.name,
            ):
                path.unlink()

    def keeps_its_work(self) -> bool:
        """True if a second attempt can resume from this folder; if not, removes the folder."""
        journal = read_journal(self.partial, self.recipe)
        if journal is not None and (journal[1] or self.options.tokenizer.startswith("bpe:")):
            return True
        self.discard()
        return False

    def discard(self) -> None:
        """Removes the folder, unless it has its final name already or holds a file that is not ours."""
        with contextlib.suppress(OSError):
            self.clear()
            self.partial.rmdir()

    def training_texts(self) -> Iterator[str]:
        """The first 16 Mi characters of the training split."""
        characters = 0
        for _, unit in units_of(self.options, self.files, self.fetch):
            for piece in unit_pieces(unit):
                if piece.split == TRAIN:
                    yield piece.text
                    characters += len(piece.text)
            if characters >= BPE_SAMPLE_CHARACTERS:
                return

    def check_splits(self, states: dict[str, SplitState]) -> None:
        source, documents = self.options.source, sum(state.documents for state in states.values())
        if not documents:
            told = next((f" ({state.first_left_out})" for state in states.values() if state.left_out), "")
            raise DataError(f"expected text, found no document in {source}{told}; name a source that holds some")
        for split in SPLITS:
            if not states[split].documents:
                more = split == "validation" and documents > 1
                raise DataError(
                    f"expected documents for training and validation, found none for {split} among the {documents} of "
                    f"{source}; {'raise --validation-fraction (up to 0.5), or ' * more}add text"
                )

    def manifest(self, tokenizer: dict[str, Any], marker: int, states: dict[str, SplitState]) -> dict[str, Any]:
        """`marker`: tokens before each document of text."""
        chat = self.options.is_chat
        splits = {
            split: {
                "tokens": state.tokens,
                "text_tokens": state.tokens - (0 if chat else marker * state.documents),
                "documents": state.documents,
                "text_bytes": state.text_bytes,
                "source_nats": state.source_nats if self.options.source in (STORIES, SPRITES) else None,
                **({"trained_tokens": state.trained_tokens} if chat else {}),
                **({"left_out": state.left_out, "first_left_out": state.first_left_out} if state.left_out else {}),
                "shards": state.shards,
            }
            for split, state in states.items()
        }
        return {
            "schema": SCHEMA,
            "handgrad_version": handgrad.__version__,
            **({"chat": True} if chat else {}),
            **({"preferences": {}} if self.options.preferences else {}),
            "tokenizer": tokenizer,
            "splits": splits,
            "recipe": self.recipe,
            "urls": [file.download.url for file in self.files if file.download],
        }


def _rename(partial: Path, out: Path) -> None:
    """Renames a complete folder to `out`; moves a dataset that is there aside first and removes it last."""
    (partial / JOURNAL_FILE).unlink()
    sync_folder(partial)
    aside = out.with_name(out.name + ".replaced")
    if out.exists():
        if aside.exists():
            shutil.rmtree(aside)
        out.replace(aside)
    partial.replace(out)
    sync_folder(out.parent)
    if aside.exists():
        shutil.rmtree(aside)
