"""The table of whole training steps beside their peers, a row for each record; `--run` measures rows first.

    python -m benchmarks.peers_table                                              what benchmarks/results says of an H200
    LLMQ=... LLMC=... python -m benchmarks.peers_table --run all --folder FOLDER  (needs a GPU; TRL: `pip install trl`)

A row that ends with an error or outlasts its limit is named, and the others go on.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.record import keep_commit, run_main
from handgrad.errors import UsageError
from handgrad.machine.gpus import short_name

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = 200  # of a row: its contenders compile, then take a few turns


class Row(NamedTuple):
    """A record, by its name after the GPU's, and the arguments of the module that measures it."""

    record: str
    module: str
    arguments: str


TURNS = "--seconds 8 --turn-seconds 4"
LLMQ, TWIN = "--contenders handgrad,llmq --sequence-length 1024", "--contenders handgrad,twin-cudnn+stream+regional"
CHATS, ADAPTERS = "--chats --contenders handgrad,trl+varlen", "--chats --contenders handgrad-lora,trl+lora+varlen"
FP8 = "--sequence-length 1024 --precision fp8 --contenders handgrad"
ROWS = {
    "Qwen2.5-1.5B on chats": ("chats-qwen2_5-1_5b", f"--shapes Qwen2.5-1.5B {CHATS}"),
    "Llama-3.2-1B adapters on chats": ("lora-chats-llama-3_2-1b", f"--shapes Llama-3.2-1B {ADAPTERS}"),
    "Qwen3-4B adapters on chats": ("lora-chats-qwen3-4b", f"--shapes Qwen3-4B --micro-batch 2 {ADAPTERS}"),
    "Qwen2.5-0.5B": ("qwen2_5-0_5b", f"--shapes Qwen2.5-0.5B --micro-batch 32 {LLMQ}"),
    "Qwen2.5-1.5B": ("qwen2_5-1_5b", f"--shapes Qwen2.5-1.5B --micro-batch 32 {LLMQ}"),
    "Qwen2.5-3B": ("qwen2_5-3b", f"--shapes Qwen2.5-3B --micro-batch 16 {LLMQ}"),
    "Qwen2.5-0.5B in fp8": ("fp8-1024-qwen2_5-0_5b", f"--shapes Qwen2.5-0.5B --micro-batch 32 {FP8}"),
    "Qwen2.5-1.5B in fp8": ("fp8-1024-qwen2_5-1_5b", f"--shapes Qwen2.5-1.5B --micro-batch 32 {FP8}"),
    "SmolLM2-135M": ("smollm2-135m", f"--shapes SmolLM2-135M {TWIN}"),
    "Llama-3.2-1B": ("llama-3_2-1b", f"--shapes Llama-3.2-1B {TWIN}"),
    "Qwen3-0.6B": ("qwen3-0_6b", f"--shapes Qwen3-0.6B {TWIN}"),
}
STEP = "bench step --device cuda --micro-steps 8 --starts 1"
NETWORKS = {
    "GPT-2 124M": ("124m-llmc", "--contenders handgrad,handgrad-fp8,llmc"),
    "GPT-2 350M": ("350m-llmc", "--model d24 --micro-batch 32 --contenders handgrad,llmc"),
    "GPT-2 774M": ("774m-llmc", "--model d36 --micro-batch 32 --contenders handgrad,llmc"),
    "GPT-2 1558M": ("1558m-llmc", "--model d48 --micro-batch 16 --contenders handgrad,llmc"),
    "m12 beside GPT-2's sizes": ("m12", "--model m12 --contenders handgrad,handgrad-adamw,handgrad-fp8,handgrad-gpt2-fp8"),
}
STEPS = {
    name: Row(f"llama-speed-{end}", "benchmarks.llama_speed", f"{given} {TURNS}") for name, (end, given) in ROWS.items()
} | {name: Row(f"step-{end}", "handgrad", f"{STEP} {given} {TURNS}") for name, (end, given) in NETWORKS.items()}


def measure(name: str, folder: Path, kind: str) -> None:
    """Runs the module of a row, and keeps its record in `folder` by the row's name."""
    row = STEPS[name]
    with TemporaryDirectory() as made:
        out = ("--out-folder", made) if row.module == "benchmarks.llama_speed" else ("--out", f"{made}/record.json")
        command = [sys.executable, "-m", row.module, *row.arguments.split(), *out]
        try:
            code: int | str = subprocess.run(command, timeout=LIMIT_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = f"more than {LIMIT_SECONDS} s"
        if code:
            print(f"{name}: ended with {code}", file=sys.stderr)
        for record in Path(made).glob("*.json"):
            shutil.copyfile(record, folder / f"{kind}-{row.record}.json")


def lines_of(name: str, record: dict[str, Any]) -> list[str]:
    """A line for each contender: its tokens per second, and handgrad's speed over a peer's."""
    figures = {key: row for key, row in record["figures"].items() if "tokens_per_second" in row}
    ours = {key: row["tokens_per_second"] for key, row in figures.items() if key.startswith("handgrad")}
    lines = []
    for key, row in figures.items():
        ratios = "" if key in ours else ", ".join(f"{speed / row['tokens_per_second']:.3f}x" for speed in ours.values())
        lines.append(
            f"{name:<32} {key:<28} {row['tokens_per_second'] / 1e3:>7.1f}k {ratios:<16} {record['commit']}".rstrip()
        )
    return lines


def table(folder: Path, kind: str) -> list[str]:
    lines = [f"{'':<32} {'contender':<28} {'tok/s':>8} {'handgrad / it':<16} commit"]
    for name, row in STEPS.items():
        path = folder / f"{kind}-{row.record}.json"
        lines += lines_of(name, json.loads(path.read_text())) if path.is_file() else [f"{name:<32} no record"]
    return lines


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="", help="rows to measure, by commas, or all")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the records")
    parser.add_argument("--kind", default="", help="GPU of the records; else this machine's, without one h200")
    options = parser.parse_args(given)
    names = list(STEPS) if options.run == "all" else [name for name in options.run.split(",") if name]
    if unknown := [name for name in names if name not in STEPS]:
        raise UsageError(f"unknown rows {', '.join(unknown)}; known: {'; '.join(STEPS)}")
    import torch

    here = short_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else "h200"
    kind = options.kind or here
    if names:
        keep_commit()
        options.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        measure(name, options.folder, here)
    print("\n".join(table(options.folder, kind)))


if __name__ == "__main__":
    run_main(main)
