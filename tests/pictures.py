"""Pictures made up here, as shards of bytes."""

import json
from pathlib import Path

import numpy as np

import handgrad
from handgrad.data.codes import GREYS, RGB, Codes, codes_tokenizer
from handgrad.data.shards import MANIFEST_FILE, SCHEMA, SPLITS, token_form
from handgrad.data.tokenizer import write_tokenizer
from handgrad.data.writer import Encoded, SplitState, SplitWriter


def discs(count: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """(count, rows, columns, 3) uint8: a disc of one colour before a gradient of another."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:rows, 0:columns]
    pictures = np.empty((count, rows, columns, 3), np.uint8)
    for picture in pictures:
        (row, column), radius = draw.random(2) * (rows, columns), (0.15 + 0.25 * draw.random()) * rows
        colour, ground = draw.integers(0, 256, (2, 3))
        inside = ((y - row) ** 2 + (x - column) ** 2 < radius**2)[..., None]
        picture[:] = np.where(inside, colour, ground * (0.5 + 0.5 * y / rows)[..., None])
    return pictures


def write_pictures(folder: Path, pictures: np.ndarray, held_out: int) -> Path:
    """A prepared folder; the last `held_out` pictures are for validation."""
    folder.mkdir(parents=True)
    _, rows, columns, _ = pictures.shape
    tokenizer = codes_tokenizer(Codes(rows, 3 * columns, GREYS, decoder=RGB))
    states = {split: SplitState() for split in SPLITS}
    parts = pictures[: len(pictures) - held_out], pictures[len(pictures) - held_out :]
    for split, part in zip(("train", "validation"), parts, strict=True):
        bytes_of = part.reshape(len(part), -1).astype(tokenizer.dtype)
        tokens = np.insert(bytes_of, 0, tokenizer.end_of_text, axis=1)
        starts = np.arange(len(part), dtype=np.int64) * tokens.shape[1]
        writer = SplitWriter(folder, split, 1 << 26, states[split], token_form(tokenizer.vocab_size), chat=False)
        writer.append(Encoded(tokens.reshape(-1), starts, 0, 0.0, np.empty((0, 2), np.int64)))
        writer.finish_shard()
    manifest = {
        "schema": SCHEMA,
        "handgrad_version": handgrad.__version__,
        "tokenizer": write_tokenizer(tokenizer, folder),
        "splits": {
            split: {
                "tokens": state.tokens,
                "text_tokens": state.tokens - state.documents,
                "documents": state.documents,
                "text_bytes": state.text_bytes,
                "source_nats": None,
                "shards": state.shards,
            }
            for split, state in states.items()
        },
        "recipe": {},
        "urls": [],
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder
