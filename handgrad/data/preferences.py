"""Pairs of answers to one prompt, of which one was chosen: their rows, and their batches.

A row has "chosen" and "rejected", each a list of messages that ends with the answer, or a text beside "prompt"; a prompt
may be a list of messages too. In shards the two conversations of a pair are neighbouring documents, the chosen one first,
and only the last answer of each is trained. Beside a split's shard lie its `references`: for every document the summed
log-probability of its answer under the model that the training starts from.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from handgrad.data.batches import WINDOW_ORDER, documents_of, mix, permute_all
from handgrad.data.chat import Conversation, Messages, messages_of
from handgrad.data.shards import MANIFEST_FILE, Dataset, Shard
from handgrad.data.sources import SourceFile, keys_of, read_objects, reading
from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.files import write_durably

if TYPE_CHECKING:
    from torch import Tensor  # `prepare` shares this package and runs without torch

FORM = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
SIDES = ("chosen", "rejected")


def read_pairs(file: SourceFile) -> Iterator[tuple[int, tuple[Conversation, Conversation]]]:
    """(position after it, chosen and rejected) for each row of a .jsonl or .json file. Raises DataError, with the row's
    number: it is no pair; StorageError: the file is unreadable."""
    with reading(file.path):
        for position, where, row in read_objects(file.path):
            seconds = file.path.stat().st_mtime
            chosen, rejected = (Conversation(one, where, seconds, answer_only=True) for one in pair_of(row, where))
            yield position, (chosen, rejected)


def pair_of(row: Any, where: str) -> tuple[Messages, Messages]:
    """The conversations of a row. Raises DataError for a row that is no pair of two answers to one prompt."""
    if not isinstance(row, dict) or any(row.get(side) is None for side in SIDES):
        raise DataError(f"expected an object with chosen and rejected, found {keys_of(row)} in {where}; write it as {FORM}")
    chosen, rejected = (messages_of({"messages": turns_of(row, side)}, f"{side} of {where}") for side in SIDES)
    if chosen[:-1] != rejected[:-1]:
        raise DataError(f"expected one prompt for both answers, found two in {where}; take the row out")
    for side, messages in zip(SIDES, (chosen, rejected), strict=True):
        if messages[-1][0] != "assistant":
            raise DataError(f"expected {side} to end with an answer, found a message of the {messages[-1][0]} in {where}")
    if chosen == rejected:
        raise DataError(f"expected two different answers, found equal ones in {where}; take the row out")
    return chosen, rejected


def turns_of(row: dict[str, Any], side: str) -> Any:
    """The messages of a side, with the prompt's before them."""
    prompt, answer = row.get("prompt"), row[side]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(before, list) or not isinstance(turns, list):
        return turns  # `messages_of` refuses it by its form
    return turns if len(turns) > 1 and isinstance(prompt, str) else [*before, *turns]  # UltraFeedback has the prompt twice


def has_pairs(dataset: Dataset) -> bool:
    """True for conversations that are pairs."""
    return bool(dataset.manifest and "preferences" in dataset.manifest)


def references_record(dataset: Dataset) -> dict[str, Any]:
    """The manifest's entry on the references: the `model` that gave them and a hash for each split; {} if it has none."""
    record = (dataset.manifest or {}).get("preferences")
    return record if isinstance(record, dict) and isinstance(record.get("model"), dict) else {}


def references_path(shard: Shard) -> Path:
    return shard.path.with_suffix(".references")


def record_references(dataset: Dataset, sums: Mapping[str, np.ndarray], model: dict[str, Any]) -> None:
    """Writes each split's sums (documents) as float32, and into the manifest their hashes and the `model` they are from."""
    record: dict[str, Any] = {"model": model}
    with storage_errors(f"writing {dataset.folder}"):
        for split, values in sums.items():
            content = values.astype("<f4").tobytes()
            references_path(dataset.splits[split][0]).write_bytes(content)
            record[f"{split}_sha256"] = hashlib.sha256(content).hexdigest()
        assert dataset.manifest is not None
        manifest = dataset.manifest | {"preferences": record}
        write_durably(dataset.folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def read_references(dataset: Dataset, split: str) -> np.ndarray:
    """The sums of a split's documents, float32. Raises DataError: the data has none, or other ones than its manifest."""
    record, shards = references_record(dataset), dataset.splits[split]
    again = f"run `handgrad prepare --preferences` again with --reference and --out {dataset.folder}"
    if not record or len(shards) != 1:
        raise DataError(f"expected pairs with references in {dataset.folder}, found none; {again}")
    path = references_path(shards[0])
    with storage_errors(f"reading {path}"):
        content = path.read_bytes() if path.is_file() else b""
    actual = hashlib.sha256(content).hexdigest()
    if actual != record.get(f"{split}_sha256"):
        raise DataError(f"expected SHA-256 {record.get(f'{split}_sha256')}, found {actual} in {path}; {again}")
    return np.frombuffer(content, "<f4")


class PairBatches:
    """Samples of one document each, padded with end-of-text: samples 2 i and 2 i + 1 are a pair. With `shuffle`, pairs in
    an order that (seed, epoch) chooses. Raises UsageError for a document longer than a row."""

    trains_all = False

    def __init__(self, shard: Shard, sequence_length: int, seed: int, *, shuffle: bool = True, references: Any = None):
        self.shard, self.sequence_length, self.seed, self.shuffle = shard, sequence_length, seed, shuffle
        self.references = references
        self.starts, self.lengths = documents_of(shard.document_starts, shard.token_count)
        self.samples_per_epoch = len(self.starts)
        longest = int(self.lengths.max(initial=0))
        if longest > sequence_length + 1:
            raise UsageError(
                f"expected pairs of at most {sequence_length + 1} tokens, found one of {longest} in {shard.path}; try"
                f" --sequence-length {longest - 1} (to evaluate: --context), or take it out"
            )

    def locate_all(self, first_sample: int, samples: int) -> np.ndarray:
        """The documents of samples `first_sample`, ..., int64."""
        epochs, indices = divmod(np.arange(first_sample, first_sample + samples), self.samples_per_epoch)
        pairs, sides = divmod(indices, 2)
        for epoch in np.unique(epochs).tolist() if self.shuffle else ():
            key, at = mix(self.seed, WINDOW_ORDER, epoch), epochs == epoch
            pairs[at] = permute_all(pairs[at], self.samples_per_epoch // 2, key)
        return 2 * pairs + sides

    @functools.cached_property
    def trained(self) -> np.ndarray:
        """(first, end) of each document's answer, int64."""
        stretches = self.shard.trained
        assert stretches is not None and len(stretches) == self.samples_per_epoch
        return stretches.astype(np.int64)

    def fill(self, inputs: "Tensor", targets: "Tensor", first_sample: int, references: "Tensor | None" = None) -> None:
        """Writes the documents of samples `first_sample`, ... into `inputs` and `targets`, int64 CPU tensors (B, T), and
        their sums into `references` (B), float32."""
        inputs.fill_(self.shard.end_of_text)
        targets.fill_(-1)
        for row, document in enumerate(self.locate_all(first_sample, len(inputs)).tolist()):
            start, length = int(self.starts[document]), int(self.lengths[document])
            tokens = self.shard.read(start, length).astype(np.int64)
            inputs.numpy()[row, : min(length, self.sequence_length)] = tokens[: self.sequence_length]
            first, end = self.trained[document] - start
            targets.numpy()[row, first - 1 : end - 1] = tokens[first:end]
        if references is not None:
            references.numpy()[:] = self.references_of(first_sample, len(inputs))

    def references_of(self, first_sample: int, samples: int) -> np.ndarray:
        """The sums of samples `first_sample`, ..., float32."""
        return self.references[self.locate_all(first_sample, samples)]


def pair_batches(dataset: Dataset, split: str, sequence_length: int, seed: int, *, shuffle: bool = True) -> PairBatches:
    """Raises the errors of `read_references` and `PairBatches`."""
    references = read_references(dataset, split)
    return PairBatches(dataset.splits[split][0], sequence_length, seed, shuffle=shuffle, references=references)
