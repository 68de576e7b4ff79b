"""Finetuning beside training from scratch: python -m benchmarks.finetune TEXT.txt --out results/NAME.json

A model of the preset `demo` trains on the built-in stories, then on another text; the same model starts on that text from
random weights, with the same tokens. Both use several learning rates, and the best of each counts. Then the model of the
stories overfits a short excerpt of the text, once whole and once with its lower half frozen. --folder keeps the runs and a
report page with both curves.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from benchmarks.run_record import lines_of, losses, seconds_in_steps
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.reports.page import write_report
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.settings.presets import demo

STORIES, STORY_STEPS, STEPS = 30_000, 1500, 500
LEARNING_RATES = (2e-3, 4e-3)
EXCERPT_CHARACTERS, EXCERPT_VALIDATION, EXCERPT_LEARNING_RATE = 40_000, 0.25, 1e-3
LOWER_HALF = "wte,wpe,blocks.0-1"


def finetune(text: Path, folder: Path, out: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    excerpt = folder / "excerpt.txt"
    if not excerpt.exists():  # the command resumes
        excerpt.write_text(text.read_text(encoding="utf-8")[:EXCERPT_CHARACTERS], encoding="utf-8")
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "stories": ("stories", {"documents": STORIES}),
        "text": (str(text), {}),
        "excerpt": (str(excerpt), {"validation_fraction": EXCERPT_VALIDATION}),
    }
    data = {}
    for name, (source, options) in sources.items():
        prepared = prepare(PrepareOptions(source, folder / name, tokenizer="bytes", **options)).dataset
        data[name] = {split: prepared.tokens(split) for split in ("train", "validation")}

    base = replace(demo(), device="cpu", sample_every=0, sample_tokens=0, eval_tokens=1 << 16, eval_stride=0)
    stories = replace(base, data=str(folder / "stories"), out=str(folder / "stories-run"), steps=STORY_STEPS)
    train(stories)
    short = replace(base, steps=STEPS, eval_every=50, save_every=0, keep_checkpoints=1)
    on_text = replace(short, data=str(folder / "text"))
    tuned, scratch = [], []
    for rate in LEARNING_RATES:
        started = replace(on_text, learning_rate=rate, init_from=stories.out, keep_best=True)
        tuned.append(trained(replace(started, out=str(folder / f"finetuned-{rate:g}"))))
        scratch.append(trained(replace(on_text, learning_rate=rate, out=str(folder / f"scratch-{rate:g}"))))
    on_excerpt = replace(short, data=str(folder / "excerpt"), learning_rate=EXCERPT_LEARNING_RATE)
    on_excerpt = replace(on_excerpt, init_from=stories.out, keep_best=True)
    excerpts = [
        trained(replace(on_excerpt, out=str(folder / "excerpt-all"))),
        trained(replace(on_excerpt, out=str(folder / "excerpt-upper-half"), freeze=LOWER_HALF)),
    ]
    best = [min(runs, key=lambda run: run["validation"][-1][1]) for runs in (tuned, scratch)]
    page = write_report([folder / run["run"] for run in best], folder / "report.html")
    print(f"report     {page}")
    write_record(
        out,
        torch.device("cpu"),
        what="a model of the built-in stories finetuned on another text, beside one trained on it from scratch; bytes",
        preset="demo",
        tokens=data,
        stories=described(stories),
        finetuned=tuned,
        scratch=scratch,
        excerpt=excerpts,
    )


def trained(config: RunConfig) -> dict[str, Any]:
    train(config)
    return described(config)


def described(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from run to run, and the results."""
    lines = lines_of(Path(config.out))
    validation, started = losses(lines["validation"]), lines["run"][0]
    return {
        "run": Path(config.out).name,
        "learning_rate": config.learning_rate,
        "steps": config.steps,
        "tokens_per_step": config.tokens_per_step,
        "parameters": started["parameters"],
        "trained_parameters": started["trained_parameters"],
        "validation": validation,
        "lowest_validation": min(validation, key=lambda pair: pair[1]),
        "training": losses([line for line in lines["step"] if line["step"] in (1, 10) or line["step"] % 50 == 0]),
        "seconds_in_steps": round(seconds_in_steps(lines), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Finetuning beside training from scratch.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a text file")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"), metavar="DIR", help="for data and runs")
    parser.add_argument("--out", default="finetune.json", metavar="FILE", help="the results file")
    given = parser.parse_args()
    finetune(given.text, given.folder, given.out)
