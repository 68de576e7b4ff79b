"""Rewards on a GPU: m12, pretrained on Python's own sources, taught questions until it answers half, then rewarded.

Accuracy is of held-out questions, answered greedily and sampled at temperature 1, before the rewards and after.

    HANDGRAD_COMMIT=COMMIT python -m benchmarks.reward_run --out FOLDER        within --seconds, on a GPU
    python -m benchmarks.reward_run --trial --out FOLDER                       every line of it, in minutes on a CPU
    python -m benchmarks.reward_run --cpu --machine cpu --out FOLDER           a small model of two cores, three seeds

On a CPU nothing is pretrained: for each seed a small model reads questions alone until it answers `share` of them, then has
rewards within `REWARD_SECONDS`.

Each phase has a time limit: a training that reaches it saves and the next phase goes on from there. The record is written
again after each phase. Last come two steps of `benchmarks.reward_speed` and, while time is left, further learning rates.
"""

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.chat_accuracy import Messages, accuracy, answers
from benchmarks.record import ROOT, keep_commit, rounded, run_main, write_record
from benchmarks.run_record import lines_of, losses, seconds_in_steps
from handgrad.api.model import load
from handgrad.data.prompts import MOST_CHARACTERS, longest_prompt, open_prompts
from handgrad.data.questions import conversation, kind_of
from handgrad.machine import devices
from handgrad.settings.config import read_toml

KINDS, SUFFIXES = ("plus", "compare", "count", "world"), {".py", ".md", ".rst", ".txt"}
PROMPTS_SEED, CHOICE_SEED, TEST_SEED = 1, 2, 3  # of questions that train, that choose where teaching stops, that measure
LONGEST_FILE, GRACE = 1 << 20, 20  # bytes of a source; seconds to save after a time limit
REWARD_SECONDS = 300  # of each seed on a CPU
RESERVE, LEAST_FOR_A_RATE = 130, 70  # seconds for both speeds, and for rewards at one more learning rate
SETTINGS: dict[str, Any] = {
    "text_bytes": 150 << 20,
    "tokenizer": "bpe:16384",
    "pretraining": "m12 --tokens-per-step 131072 --steps 520 --warmup-steps 20 --eval-every 260 --eval-tokens 524288",
    "conversations": 200_000,
    "teaching": "--sequence-length 256 --tokens-per-step 32768 --micro-batch 128 --steps 240 --save-every 20"
    " --warmup-steps 20 --schedule constant --learning-rate 3e-4 --eval-every 120 --eval-tokens 131072",
    "rewards": {"steps": 200, "prompts": 32, "rollouts": 16, "micro_batch": 256, "answer_tokens": 8, "eval_every": 25},
    "schedule": "constant",
    "optimizer": "",
    "rates": ["2e-5", "6e-5", "6e-6"],
    "asked": {"choice": 512, "test": 4000},
    "at_once": 256,
    "device": "cuda",
    "shapes": ["Qwen3-1.7B", "Llama-3.2-1B"],
    "speeds": "",
}
CPU = SETTINGS | {
    "tokenizer": "bpe:1024",
    "conversations": 100_000,
    "teaching": "--architecture modern --num-layers 2 --channels 128 --num-heads 4 --sequence-length 96 --micro-batch 16"
    " --tokens-per-step 3072 --steps 450 --save-every 150 --warmup-steps 100 --learning-rate 4e-3 --schedule linear"
    " --optimizer muon --matrix-learning-rate 1e-2 --final-learning-rate-fraction 0.5 --eval-every 150 --eval-tokens 16384"
    " --ranks 2",
    "share": 1 / 3,
    "prompts": 16_000,  # 25,600 are drawn, and the built-in ones are 2048
    "rewards": {"steps": 400, "prompts": 64, "rollouts": 4, "micro_batch": 4, "answer_tokens": 4, "eval_every": 100},
    "schedule": "linear --final-learning-rate-fraction 0 --ranks 2",
    "optimizer": " --optimizer muon --matrix-learning-rate 3e-3",
    "rates": ["2e-3"],
    "asked": {"choice": 512, "test": 2000},
    "seeds": [1, 2, 3],
    "at_once": 64,
    "device": "cpu",
}
TRIAL = SETTINGS | {
    "text_bytes": 300 << 10,
    "tokenizer": "bpe:512",
    "pretraining": "m4 --sequence-length 128 --tokens-per-step 1024 --micro-batch 8 --steps 8 --eval-tokens 1024",
    "conversations": 400,
    "teaching": "--sequence-length 128 --tokens-per-step 1024 --micro-batch 8 --steps 6 --save-every 2 --eval-tokens 1024",
    "rewards": {"steps": 4, "prompts": 2, "rollouts": 4, "micro_batch": 4, "answer_tokens": 4, "eval_every": 2},
    "rates": ["2e-5", "6e-5"],
    "asked": {"choice": 8, "test": 12},
    "at_once": 8,
    "device": "cpu",
    "shapes": ["tiny-llama"],
    "speeds": "--precision fp32 --rows 8 --micro-batch 4 --prompt-tokens 16 --answer-tokens 8 --steps 2",
}


def gather(most_bytes: int, folder: Path) -> int:
    """Joins the sources and texts of the installed packages into a .txt file each; returns the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    texts, total = dict[str, list[str]](), 0
    for root in (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")):
        for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            size, inner = path.stat().st_size, path.relative_to(root).parts
            if not 0 < size <= LONGEST_FILE or total + size > most_bytes or inner[0] == "site-packages":
                continue
            try:
                texts.setdefault(inner[0], []).append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
            total += size
    for name, pieces in texts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(pieces), encoding="utf-8")
    return total


def questions(seed: int, number: int, *, held_out: bool) -> list[Messages]:
    """Questions of `KINDS` as the built-in prompts of a run on rewards have them, but of another seed."""
    talks = (conversation(seed, place, held_out=held_out)[:-1] for place in count())
    short = (talk for talk in talks if sum(len(content) for _, content in talk) <= MOST_CHARACTERS)
    asked = ([{"role": role, "content": content} for role, content in talk] for talk in short)
    return [*islice((messages for messages in asked if kind_of(messages) in KINDS), number)]


def shares(
    model: Path, seed: int, settings: dict[str, Any], temperatures: tuple[float, ...] = (0.0, 1.0)
) -> dict[str, dict[str, list[int]]]:
    """[right, asked] by kind, for each temperature; 0 is greedy."""
    asked = questions(seed, settings["asked"]["choice" if seed == CHOICE_SEED else "test"], held_out=True)
    loaded, figures = load(str(model), device=settings["device"]), {}
    for temperature in temperatures:
        counted = accuracy(asked, answers(loaded, asked, temperature, settings["at_once"]))
        figures[f"temperature {temperature:g}"] = {kind: counted[kind] for kind in (*KINDS, "all")}
    return figures


def half_taught(models: list[Path], settings: dict[str, Any], out: Path) -> None:
    """Writes the accuracies of checkpoints, up to the first that answers a share (half) at temperature 1, and the one
    closest to it. After each, so that a time limit leaves a choice."""
    figures, distances, share = dict[str, Any](), dict[str, float](), settings.get("share", 0.5)
    for model in models:
        figures[model.name] = shares(model, CHOICE_SEED, settings, (1.0,))
        right, asked = figures[model.name]["temperature 1"]["all"]
        distances[model.name] = abs(right / asked - share)
        chosen = min(distances, key=distances.__getitem__)
        out.write_text(json.dumps({"checkpoints": figures, "chosen": chosen}), encoding="utf-8")
        if right >= share * asked:
            break


def curves(folder: Path) -> dict[str, Any]:
    """The curves of a run on rewards, and medians of its speeds without the first tenth of the steps."""
    lines, config = lines_of(folder), read_toml(str(folder / "config.toml"))
    rollouts, seconds = lines["rollouts"], {line["step"]: line["step_ms"] / 1e3 for line in lines["step"]}
    answered = config["tokens_per_step"] // config["sequence_length"]
    speeds = [
        {
            "answers_per_second": answered / line["sampling_seconds"],
            "answer_tokens_per_second": answered * line["answer_tokens"] / line["sampling_seconds"],
            "update_tokens_per_second": config["tokens_per_step"] / (seconds[line["step"]] - line["seconds"]),
            "share_sampling": line["sampling_seconds"] / seconds[line["step"]],
            "seconds_of_a_step": seconds[line["step"]],
            "passes": line["passes"],
        }
        for line in rollouts[len(rollouts) // 10 :]
    ]
    names = ("step", "reward", "answer_tokens", "entropy", "unended", "equal_groups")
    return {
        "completed": rollouts[-1]["step"],
        "config": {name: config[name] for name in ("steps", "tokens_per_step", "sequence_length", "rollouts", "precision")},
        "seconds_in_steps": sum(seconds.values()),
        "largest_difference": max(line["difference"] for line in rollouts),
        "medians": {name: statistics.median(speed[name] for speed in speeds) for name in speeds[0]},
        "validation_of": ["step", "reward", "stderr", "kl"],
        "validation": [[line.get(name) for name in ("step", "reward", "stderr", "kl")] for line in lines["validation"]],
        "curve_of": list(names),
        "curve": [[line[name] for name in names] for line in rollouts[:: max(1, len(rollouts) // 50)]],
    }


def training(folder: Path) -> dict[str, Any]:
    """The losses and the speed of a training."""
    lines = lines_of(folder)
    return {
        "parameters": lines["run"][0]["parameters"],
        "steps": len(lines["step"]),
        "tokens": lines["step"][-1]["tokens"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines["step"]),
        "seconds_in_steps": seconds_in_steps(lines),
        "validation": losses(lines["validation"]),
    }


class Phases:
    """Runs commands within a time for all of them, logs their output, and writes the record after each phase."""

    def __init__(self, settings: dict[str, Any], work: Path, out: Path, machine: str, seconds: float):
        self.settings, self.work, self.out, self.machine = settings, work, out, machine
        self.deadline, self.reserve = time.monotonic() + seconds, RESERVE  # seconds kept for the speeds
        self.figures: dict[str, Any] = {"phases": {}}

    def left(self) -> float:
        return self.deadline - time.monotonic() - self.reserve

    def run(self, name: str, command: str, most_seconds: float) -> None:
        """Runs `python -m COMMAND`, stopped by SIGTERM at its limit, which a training answers with a save."""
        began, limit = time.monotonic(), max(1.0, min(most_seconds, self.left()))
        words = [sys.executable, "-m", *shlex.split(command)]
        print(f"{name}: {command}", flush=True)
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n$ {shlex.join(words)}\n")
            log.flush()
            with subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process:
                try:
                    process.wait(limit)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    try:
                        process.wait(GRACE)
                    except subprocess.TimeoutExpired:
                        process.kill()
        ended = {"seconds": round(time.monotonic() - began, 1), "exit_code": process.returncode}
        self.figures["phases"][name] = {"command": command.replace(str(self.out), "OUT"), **ended}
        print(f"{name}: {ended}", flush=True)
        self.write()

    def add(self, name: str, figures: Any) -> None:
        """Adds what `figures()` returns, or the error that it raises: later phases go on."""
        try:
            self.figures[name] = figures()
        except Exception as error:  # a phase cut short may leave any file half written; the record names what it raised
            self.figures[name] = {"error": f"{error!r:.300}"}
        print(f"{name}: {json.dumps(rounded(self.figures[name], 4))[:1500]}", flush=True)
        self.write()

    def write(self) -> None:
        device = devices.resolve_device(self.settings["device"])
        small = "seeds" in self.settings
        what = "Rewards on a CPU: small models, taught questions until they answer about 0.3 of them, then rewarded."
        path = self.out / f"{self.machine}-reward{'' if small else '-m12'}.json"
        write_record(path, device, what=what if small else __doc__.split("\n")[0], figures=rounded(self.figures))

    def ask(self, name: str, models: list[Path], what: str, most_seconds: float) -> None:
        """Adds the accuracies of models, from a process of its own."""
        file = self.work / f"{name.replace(' ', '-')}.json"
        trial = "--trial " if self.settings is TRIAL else "--cpu " if "seeds" in self.settings else ""
        paths = " ".join(map(str, models))
        self.run(f"{name}, asked", f"benchmarks.reward_run {trial}--out {file} --{what} {paths}", most_seconds)
        self.add(name, lambda: json.loads(file.read_text()))

    def teach(self) -> Path:
        """Text, pretraining, questions; returns the checkpoint that answers half of them."""
        work, settings, trainer = self.work, self.settings, f"handgrad train --device {self.settings['device']}"
        self.add("text_bytes", lambda: gather(settings["text_bytes"], work / "text"))
        self.run("text", f"handgrad prepare {work}/text --tokenizer {settings['tokenizer']} --out {work}/books", 60)
        rest = "--save-every 0 --sample-tokens 0"
        self.run("pretraining", f"{trainer} {settings['pretraining']} --data {work}/books --out {work}/base {rest}", 170)
        self.add("pretrained", lambda: training(work / "base"))
        asked = f"--documents {settings['conversations']} --tokenizer {work}/base --out {work}/questions"
        self.run("questions", f"handgrad prepare questions {asked}", 30)
        rest = f"--init-from {work}/base --data {work}/questions --out {work}/taught --keep-checkpoints 0 --sample-tokens 0"
        self.run("teaching", f"{trainer} {rest} {settings['teaching']}", 75)
        self.add("taught", lambda: training(work / "taught"))
        return self.half_taught("taught", "half_taught", 75)

    def half_taught(self, taught: str, name: str, most_seconds: float) -> Path:
        """The checkpoint of a teaching to start from."""
        models = sorted((self.work / taught / "checkpoints").glob("step_*"))
        if not models:
            raise SystemExit(f"expected checkpoints of the teaching, found none; see {self.out}/log.txt")
        self.ask(name, [model for model in models if int(model.name[5:])], "choose", most_seconds)
        return self.work / taught / "checkpoints" / self.figures[name].get("chosen", models[-1].name)

    def reward(self, model: Path, rate: str, most_seconds: float = 120, seed: int = 0) -> None:
        """A run on rewards from `model`, and what it answers afterwards. `seed`: of a run on a CPU."""
        numbers, device = self.settings["rewards"], self.settings["device"]
        name, more = (f"seed {seed}", f" --seed {seed}") if seed else (rate, "")
        out = self.work / f"rewarded-{name.replace(' ', '-')}"
        data = str(self.work / "prompts.jsonl") if seed else f"questions:{'+'.join(KINDS)}"
        longest = longest_prompt(open_prompts(data, str(model))) + numbers["answer_tokens"]
        length = longest - 1 if seed else -(-longest // 32) * 32
        command = (
            f"handgrad train --reward questions --data {data} --init-from {model} --out {out} --steps {numbers['steps']}"
            f" --learning-rate {rate} --schedule {self.settings['schedule']}{self.settings['optimizer']} --weight-decay 0"
            f" --warmup-steps {min(10, numbers['steps'] // 2)}"
            f" --rollouts {numbers['rollouts']} --answer-tokens {numbers['answer_tokens']} --sequence-length {length}"
            f" --tokens-per-step {numbers['prompts'] * numbers['rollouts'] * length} --micro-batch {numbers['micro_batch']}"
            f" --eval-every {numbers['eval_every']} --save-every 0 --device {device}{more}"
        )
        self.run(f"rewards at {name}", command, min(most_seconds, self.left() - 25))
        self.add(f"rewarded at {name}", lambda: curves(out))
        shutil.copy(out / "metrics.jsonl", self.out / f"metrics-{out.name.partition('-')[2]}.jsonl")
        self.ask(f"after rewards at {name}", [out], "measure", 240 if seed else 40)

    def seeds(self) -> None:
        """Questions and rewards on a CPU, for each seed a model of its own."""
        work, settings = self.work, self.settings
        asked = f"--tokenizer {settings['tokenizer']} --documents {settings['conversations']} --out {work}/questions"
        self.run("questions", f"handgrad prepare questions {asked}", 120)
        prompts = questions(PROMPTS_SEED, settings["prompts"], held_out=False)
        (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        for seed in settings["seeds"]:
            taught, rest = f"taught-{seed}", f"--keep-checkpoints 0 --sample-tokens 0 --device cpu --seed {seed}"
            command = f"handgrad train {settings['teaching']} --data {work}/questions --out {work}/{taught} {rest}"
            self.run(f"teaching of seed {seed}", command, 1800)
            self.add(f"taught by seed {seed}", lambda taught=taught: training(work / taught))
            model = self.half_taught(taught, f"chosen of seed {seed}", 300)
            self.ask(f"before rewards at seed {seed}", [model], "measure", 240)
            self.reward(model, settings["rates"][0], REWARD_SECONDS, seed)

    def speeds(self) -> None:
        self.reserve = 0.0
        for shape in self.settings["shapes"]:
            file = f"{self.out}/{self.machine}-reward-speed-{shape.lower().replace('.', '_')}.json"
            options = f"--device {self.settings['device']} --folder {self.work}/speed {self.settings['speeds']}"
            self.run(f"speed of {shape}", f"benchmarks.reward_speed --shape {shape} --out {file} {options}", 90)

    def all(self) -> None:
        try:
            model = self.teach()
            self.ask("before rewards", [model], "measure", 40)
            self.reward(model, self.settings["rates"][0])
        finally:  # the speeds need no model
            self.speeds()
        for rate in self.settings["rates"][1:]:
            if self.left() > LEAST_FOR_A_RATE:
                self.reward(model, rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for records and log.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reward-run", metavar="FOLDER", help="a new one")
    parser.add_argument("--machine", default="h200", help="the first word of the records' names")
    parser.add_argument("--seconds", type=float, default=545, help="for all phases")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--cpu", action="store_true", help="a small model on a CPU, three seeds, about half an hour")
    parser.add_argument("--choose", nargs="+", type=Path, metavar="MODEL", help="writes the half taught one into --out")
    parser.add_argument("--measure", type=Path, metavar="MODEL", help="writes its accuracies into --out")
    options = parser.parse_args()
    settings = TRIAL if options.trial else CPU if options.cpu else SETTINGS
    if options.choose or options.measure:
        if options.choose:
            half_taught(options.choose, settings, options.out)
        else:
            options.out.write_text(json.dumps(shares(options.measure, TEST_SEED, settings)), encoding="utf-8")
        return
    keep_commit()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True)
    phases = Phases(settings, options.work.absolute(), options.out.absolute(), options.machine, options.seconds)
    if options.cpu:
        phases.deadline, phases.reserve = float("inf"), 0.0
        phases.seeds()
    else:
        phases.all()


if __name__ == "__main__":
    run_main(main)
