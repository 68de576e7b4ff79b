"""The cost in loss of fp8, by several seeds: blocks alone, with the head's forward and input gradient, with all three of
its GEMMs; with gradients in either format, or current scales. `bf16` is the same run without fp8.

    python -m benchmarks.fp8_head OUT.json --data shards/sources --work FOLDER [--seeds 1,2,3] [--set steps=300 ...]
        [--heads none,all] [--shared]
    python -m benchmarks.fp8_head OUT.json --data shards/sources --work FOLDER --heads bf16,all
    python -m benchmarks.fp8_head OUT.json --data shards/machine --work FOLDER --model Qwen2.5-0.5B --heads bf16,e4m3,e5m2

Every run is GPT-2 124M, or `--model` of `benchmarks.llama_twin`, for 200 steps of 131,072 tokens; `--set` changes a setting
of all, the network included. `benchmarks.machine_text` makes data.
Runs of FOLDER that are finished are not made again. `--shared`: other work ran beside them, so the record has no seconds.
Means and standard errors by `benchmarks.tokens_to_loss`, whose first group is the measure.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import tokens_to_loss
from benchmarks.llama_twin import SHAPES, sizes as llama_sizes

HEADS = {
    "none": {"precision": "fp8", "fp8_head": "none"},
    "forward and dgrad": {"precision": "fp8", "fp8_head": "forward,dgrad"},
    "all": {"precision": "fp8", "fp8_head": "forward,dgrad,wgrad"},
    "bf16": {"precision": "bf16"},
    "e4m3": {"precision": "fp8", "fp8_gradients": "e4m3"},
    "e5m2": {"precision": "fp8", "fp8_gradients": "e5m2"},
    "current scales": {"precision": "fp8", "fp8_gradients": "e4m3", "fp8_scaling": "current"},
}
FP8 = ("none", "forward and dgrad", "all")
SETTINGS = {
    "sequence_length": "1024",
    "steps": "200",
    "tokens_per_step": "131072",
    "micro_batch": "64",
    "learning_rate": "6e-4",
    "warmup_steps": "30",
    "eval_every": "100",
    "eval_tokens": "2097152",
    "sample_every": "0",
    "sample_tokens": "0",
    "save_every": "0",
    "log_every": "100",
}


def train(data: str, folder: Path, model: str, head: dict[str, str], seed: int, changes: dict[str, str]) -> None:
    """Makes one run, or goes on with it."""
    preset, sizes = ([], llama_sizes(model)) if model in SHAPES else ([model], {})
    settings = SETTINGS | sizes | head | {"data": data, "out": str(folder), "seed": str(seed)} | changes
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, "-m", "handgrad", "train", *preset, *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost in loss of fp8 and of its head's GEMMs.")
    parser.add_argument("out", help="the results file")
    parser.add_argument("--data", required=True, metavar="DIR", help="shards of real text, made by `handgrad prepare`")
    parser.add_argument("--work", required=True, metavar="FOLDER", help="folder of the runs")
    parser.add_argument("--model", default="d12", help=f"a preset, or one of {', '.join(SHAPES)}")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the runs, with commas")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings that differ from these here")
    parser.add_argument(
        "--heads", default=",".join(FP8), help=f"those to compare, the measure first (of {', '.join(HEADS)})"
    )
    parser.add_argument("--shared", action="store_true", help="the machine is busy: leave the seconds out")
    given = parser.parse_args()
    heads = {name: HEADS[name] for name in given.heads.split(",")}
    changes = dict(text.split("=", 1) for text in given.set)
    groups: dict[str, list[Path]] = {name: [] for name in heads}
    for seed in map(int, given.seeds.split(",")):  # by seed: where time runs out, whole rows of the table are there
        for name, head in heads.items():
            folder = Path(given.work) / f"{name.replace(' ', '-')}-{seed}"
            train(given.data, folder, given.model, head, seed, changes)
            groups[name].append(folder)
    named = [f"{name}={','.join(map(str, folders))}" for name, folders in groups.items()]
    tokens_to_loss.main(given.out, [*named, *["--shared"] * given.shared])


if __name__ == "__main__":
    main()
