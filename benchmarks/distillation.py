"""A student of half the depth on the built-in stories, with a teacher and without: the same tokens, three seeds.

    python -m benchmarks.distillation --work FOLDER --out benchmarks/results/cpu-distillation.json

The teacher is the demo's model. Every student begins with the weights of its seed and reads the same tokens in the same
order: with the loss of the next token, and with each divergence. Runs of FOLDER that are finished are not made again.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import keep_commit, rounded, write_record
from benchmarks.run_record import lines_of
from handgrad.data.prepare import prepare
from handgrad.data.recipe import PrepareOptions
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, to_dict
from handgrad.settings.objective import DISTILL, DIVERGENCES, TOKENS
from handgrad.settings.presets import demo

DOCUMENTS = 20_000
TEACHER_STEPS, STEPS = 1500, 400
SEEDS = (1, 2, 3)


def shared(work: Path, steps: int) -> RunConfig:
    often = {"eval_every": 0, "sample_every": 0, "sample_tokens": 0, "save_every": 0, "log_every": 100}
    return replace(demo(), data=str(work / "shards"), steps=steps, warmup_steps=50, device="cpu", **often)


def student(work: Path, seed: int, divergence: str) -> RunConfig:
    """`divergence`: from the teacher, or "" for the loss of the next token."""
    config = replace(shared(work, STEPS), num_layers=demo().num_layers // 2, seed=seed, objective=TOKENS)
    if divergence:
        config = replace(config, objective=DISTILL, teacher=str(work / "teacher"), teacher_divergence=divergence)
    return replace(config, out=str(work / f"{divergence or TOKENS}-{seed}"))


def result(config: RunConfig) -> dict[str, Any]:
    """The last validation loss of a run (nats per token), and its excess over the floor. Makes the run, unless it is
    finished."""
    train(config)
    lines = lines_of(Path(config.out))
    loss, floor = lines["validation"][-1]["loss"], lines["run"][0]["floor_nats_per_token"]
    return {"loss": loss, "above_floor": loss / floor - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    keep_commit()
    work: Path = parsed.work
    options = {"tokenizer": "bpe:1024", "documents": DOCUMENTS, "validation_fraction": 0.02}
    prepare(PrepareOptions("stories", work / "shards", **options))
    teacher = result(replace(shared(work, TEACHER_STEPS), out=str(work / "teacher")))
    students = {name or TOKENS: [result(student(work, seed, name)) for seed in SEEDS] for name in ("", *DIVERGENCES)}
    means = {name: fmean(run["above_floor"] for run in runs) for name, runs in students.items()}
    print("\n".join(f"{name:<10} {mean:.2%} above the floor" for name, mean in means.items()))
    floor = lines_of(work / "teacher")["run"][0]["floor_nats_per_token"]
    settings = {name: value for name, value in to_dict(student(work, SEEDS[0], "")).items() if name not in ("data", "out")}
    figures = {"floor_nats_per_token": floor, "teacher": teacher, "students": students, "mean_above_floor": means}
    sizes = {
        "teacher_steps": TEACHER_STEPS,
        "documents": DOCUMENTS,
        "seeds": list(SEEDS),
        "threads": torch.get_num_threads(),
    }
    write_record(parsed.out, torch.device("cpu"), **sizes, settings=settings, **rounded(figures, 5))


if __name__ == "__main__":
    main()
