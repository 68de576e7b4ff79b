"""Text that a machine has anyway, for runs on one without a network: sources and documentation of what is installed there.

    python -m benchmarks.machine_text FOLDER [--characters 340000000] [--roots DIR ...] [--vocabulary 151936]
    handgrad prepare "FOLDER/text/*.jsonl" --tokenizer FOLDER/tokenizer --out shards/machine --validation-fraction 0.02

Takes every file of `KINDS` once, by its hash, in an order that its hash decides, up to --characters. FOLDER/tokenizer is a
byte-level BPE of 50,257 words, trained on the first quarter, in a transformers folder whose --vocabulary is as large as a
model's: the loss head then has its size, however few words the text needs.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

KINDS = (".py", ".pyi", ".pyx", ".c", ".cpp", ".cuh", ".h", ".hpp", ".html", ".md", ".rst", ".txt")
SIZES = range(200, 1 << 20)  # bytes of a file: neither empty packages nor tables of data
PARTS = 32  # files, which `prepare` reads in parallel
WORDS, END = 50257, "<|endoftext|>"


def roots() -> list[str]:
    """This interpreter's library and packages, and the system's headers and documentation."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return [*sorted(own), "/usr/lib/python3", "/usr/local/lib", "/usr/include", "/usr/share/doc", "/usr/local/cuda/include"]


def texts_of(folders: list[str]) -> dict[bytes, str]:
    """The text of every file, by its hash."""
    texts = {}
    for path in (Path(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names):
        try:
            if path.suffix in KINDS and path.is_file() and path.stat().st_size in SIZES:
                content = path.read_bytes()
                texts[hashlib.sha256(content).digest()] = content.decode()
        except (OSError, UnicodeDecodeError):  # a broken link, or no text
            continue
    return texts


def up_to(texts: Iterator[str], characters: int) -> Iterator[str]:
    """The first texts, whole, that have at most so many characters together."""
    for text in texts:
        characters -= len(text)
        if characters < 0:
            return
        yield text


def write_tokenizer(folder: Path, texts: list[str], vocabulary: int) -> None:
    """A transformers folder with the tokenizer of these texts and with a model's size of vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "qwen2", "vocab_size": vocabulary, "eos_token_id": tokenizer.token_to_id(END)}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Text of this machine, as JSON lines, and a tokenizer of it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--characters", type=int, default=340_000_000)
    parser.add_argument("--roots", nargs="+", default=roots())
    parser.add_argument("--vocabulary", type=int, default=151936)
    asked = parser.parse_args()
    by_hash = texts_of(asked.roots)
    texts = list(up_to((by_hash[key] for key in sorted(by_hash)), asked.characters))
    (asked.folder / "text").mkdir(parents=True)
    for part in range(PARTS):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[part::PARTS])
        (asked.folder / "text" / f"part-{part:02}.jsonl").write_text("".join(lines))
    write_tokenizer(asked.folder / "tokenizer", texts[: len(texts) // 4], asked.vocabulary)
    print(f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.1f}M characters", file=sys.stderr)


if __name__ == "__main__":
    main()
