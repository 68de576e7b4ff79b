"""Tokenizers for a small text: the bare `handgrad train --data` on a CPU with each, and bits per byte of held-out text.

    python -m benchmarks.small_text my_text.txt --work FOLDER --out benchmarks/results/cpu-small-text.json

Runs of FOLDER that are finished are not made again.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from benchmarks.run_record import lines_of, seconds_in_steps

TOKENIZERS = ("bytes", "bpe:512", "bpe:1024", "bpe:2048", "bpe:4096", "gpt2")


def handgrad(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "handgrad", *words], check=True, text=True, capture_output=True).stdout


def measure(text: Path, tokenizer: str, work: Path) -> dict[str, Any]:
    name = tokenizer.replace(":", "")
    shards, run = str(work / "shards" / name), work / "runs" / name
    handgrad("prepare", str(text), "--tokenizer", tokenizer, "--out", shards)
    handgrad("train", "--data", shards, "--out", str(run), "--device", "cpu")
    lines = lines_of(run)
    bits = [line["bits_per_byte"] for line in lines["validation"]]
    written = handgrad("sample", str(run), "--prompt", "The statement", "--max-tokens", "120", "--seed", "1")
    return {
        "parameters": lines["run"][0]["parameters"],
        "steps": len(lines["step"]),
        "seconds_in_steps": round(seconds_in_steps(lines), 1),
        "bits_per_byte": round(bits[-1], 4),
        "least_bits_per_byte": round(min(bits), 4),
        "text": written,
    }


def rows(record: dict[str, Any]) -> list[str]:
    """The lines of docs/data.md's table."""
    return [
        f"| `{tokenizer}` | {row['parameters'] / 1e6:.2f} M | {row['steps']} | {row['bits_per_byte']:.2f} |"
        for tokenizer, row in record["figures"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    figures = {tokenizer: measure(parsed.text, tokenizer, parsed.work) for tokenizer in TOKENIZERS}
    write_record(parsed.out, torch.device("cpu"), text_bytes=parsed.text.stat().st_size, figures=figures)


if __name__ == "__main__":
    main()
