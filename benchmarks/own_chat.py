"""A chat model of your own: the commands of docs/own_chat_model.md, with their seconds and output.

    python -m benchmarks.own_chat laptop --work EMPTY_FOLDER     on a CPU, offline, in minutes
    python -m benchmarks.own_chat gpu --work EMPTY_FOLDER --books FOLDER --dialogues FOLDER
    python -m benchmarks.own_chat page                           writes the page from the records
    python -m benchmarks.own_chat talks FOLDER > talks.jsonl     Schema-Guided Dialogue as rows of messages
    python -m benchmarks.own_chat books FOLDER MEGABYTES         names the books with the most talk, up to so many megabytes

The records are benchmarks/results/cpu-own-chat.json and gpu-own-chat.json, or --out. --steps shortens both trainings.
"""

import argparse
import contextlib
import json
import os
import pty
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import handgrad
from benchmarks.first_minutes import shortened, without_noise
from benchmarks.record import ROOT, keep_commit, run_main, write_record
from benchmarks.run_record import lines_of, losses
from handgrad.data.stories import BOYS, GIRLS
from handgrad.errors import DataError
from handgrad.format import human_count
from handgrad.machine import devices
from handgrad.machine.gpus import GPUS
from handgrad.memory.rows import count_parameters
from handgrad.settings.config import GPT2_VOCABULARY
from handgrad.settings.presets import preset
from handgrad.tools.forecast import forecast, resolve_for, resolved_on
from handgrad.tools.plan import duration

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "own_chat_model.md"
RECORDS = {"laptop": RESULTS / "cpu-own-chat.json", "gpu": RESULTS / "gpu-own-chat.json"}
EXAMPLE = ROOT / "examples" / "6_story_talks.py"
STORIES_OF_EACH = 2  # of the twenty heroes, whose stories and answers are checked
SHOWN = 40  # lines of a command's output in the record, first and last

LAPTOP = (
    "handgrad demo --data shards/stories --out runs/demo",
    "python examples/6_story_talks.py",
    "handgrad prepare --chat talks.jsonl --tokenizer runs/demo --out shards/talks",
    "handgrad train --init-from runs/demo --data shards/talks --out runs/talks --tokens-per-step 1024 --steps 5000",
    "handgrad chat runs/talks --temperature 0.5 --seed 1",
)
# m12 for as many steps as take some minutes. Its batch is smaller than the preset's, for more steps.
GPU = (
    "handgrad prepare books --tokenizer bpe:16384 --out shards/books",
    "handgrad train m12 --data shards/books --out runs/books --tokens-per-step 131072 --steps 750 --warmup-steps 20"
    " --eval-every 250 --eval-tokens 1048576 --save-every 0 --sample-every 0",
    "python -m benchmarks.own_chat talks dialogues > talks.jsonl",
    "handgrad prepare --chat talks.jsonl --tokenizer runs/books --out shards/talks",
    "handgrad train --init-from runs/books --data shards/talks --out runs/talks --tokens-per-step 65536 --steps 300"
    " --warmup-steps 20 --sequence-length 1024 --learning-rate 3e-4 --eval-every 100",
    "handgrad chat runs/talks --temperature 0.5 --seed 1",
)
COMMANDS = {"laptop": LAPTOP, "gpu": GPU}
LINES = {  # that the user types, by size
    "laptop": (
        *("Hello!", "Tell me a story about Ruby.", "Who helps?", "When does it happen?", "How does it end?", "/new"),
        *(
            "A story with a golden ring, please.",
            "Who is the story about?",
            "What colour is the ring?",
            "Thank you!",
            "/quit",
        ),
    ),
    "gpu": (
        *("I am looking for a place to eat in San Jose.", "Italian food, please.", "What is their address?"),
        *("Please book a table for two.", "At 7 pm tomorrow.", "Yes, that is right.", "Thank you, that is all.", "/new"),
        *("I want to watch a movie tonight.", "I am in San Jose.", "Something funny, please.", "/quit"),
    ),
}
PLANNED, PRICE = "m32", 2.50  # dollars per GPU and hour
TRIAL = re.compile(r" --(steps|warmup-steps|tokens-per-step|sequence-length|eval-tokens) [0-9]+")
TRIAL_SIZE = "m4 --sequence-length 128 --tokens-per-step 1024 --micro-batch 8 --eval-tokens 4096"


def play(command: str, folder: Path, said: Sequence[str] = ()) -> dict[str, Any]:
    """Runs a command in `folder` with this checkout's handgrad, in a terminal where someone types the lines `said`; returns
    its text, seconds and lines of output."""
    print(f"$ {command}", flush=True)
    programs = f'handgrad() {{ "{sys.executable}" -m handgrad "$@"; }}; python() {{ "{sys.executable}" "$@"; }}; '
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120", "TERM": "dumb"}
    start, output, left = time.monotonic(), b"", list(said)
    own, theirs = pty.openpty() if said else os.pipe()
    pipes: dict[str, Any] = {"stdout": theirs, "stderr": theirs, "stdin": theirs if said else subprocess.DEVNULL}
    with subprocess.Popen(["bash", "-c", programs + command], cwd=folder, env=environment, **pipes) as run:
        os.close(theirs)
        with contextlib.suppress(OSError):  # a terminal's end is an error
            while piece := os.read(own, 1 << 16):
                output += piece
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
                if left and output.endswith(b"> "):
                    os.write(own, f"{left.pop(0)}\n".encode())
    os.close(own)
    if run.returncode:
        raise DataError(f"{command}: exit code {run.returncode}")
    lines = without_noise(output.decode().replace("\r", "").splitlines(), folder)
    return {"command": command, "seconds": round(time.monotonic() - start, 1), "output": shortened(lines, SHOWN, SHOWN)}


def with_steps(command: str, steps: int) -> str:
    """A small training of so many steps, for a trial; 0: the command as it is."""
    is_training = command.startswith(("handgrad train", "handgrad demo"))
    return f"{TRIAL.sub('', command).replace('m12', TRIAL_SIZE)} --steps {steps}" if steps and is_training else command


def told(folder: Path) -> dict[str, list[int]]:
    """[right, asked]: stories that are about the hero asked for, and answers about them that the story gives."""
    with contextlib.chdir(folder):
        facts = runpy.run_path(str(EXAMPLE))["facts"]  # writes the same talks.jsonl again
        model = handgrad.load("runs/talks")
    heroes, answers = [0, 0], [0, 0]
    for seed, hero in enumerate(STORIES_OF_EACH * (*GIRLS, *BOYS)):
        messages = [{"role": "user", "content": f"Tell me a story about {hero}."}]
        story = "".join(model.chat(messages, temperature=0.5, seed=seed, max_tokens=120)).strip()
        known = facts(story)
        heroes = [heroes[0] + (known.get("Who is the story about?") == f"{hero}."), heroes[1] + 1]
        messages.append({"role": "assistant", "content": story})
        for question, answer in known.items():
            said = "".join(model.chat([*messages, {"role": "user", "content": question}], temperature=0, max_tokens=30))
            answers = [answers[0] + (said.strip() == answer), answers[1] + 1]
    return {"stories about the hero asked for": heroes, "answers about these stories": answers}


def dialogues(folder: Path) -> Iterator[str]:
    """The training dialogues of Schema-Guided Dialogue, each as a row of messages."""
    roles = {"USER": "user", "SYSTEM": "assistant"}
    for path in sorted((folder / "train").glob("dialogues_*.json")):
        for dialogue in json.loads(path.read_text(encoding="utf-8")):
            turns = [{"role": roles[turn["speaker"]], "content": turn["utterance"]} for turn in dialogue["turns"]]
            yield json.dumps({"messages": turns})


def talkative(folder: Path, megabytes: float) -> list[Path]:
    """The books with the largest share of the words you and I, up to so many megabytes."""

    def share(path: Path) -> float:
        words = path.read_text(encoding="utf-8").split()
        return sum(word in ("you", "I", "You") for word in words) / max(1, len(words))

    taken, left = [], megabytes * 1e6
    for path in sorted(folder.glob("*/*.md"), key=share, reverse=True):
        if path.stat().st_size <= left:
            taken.append(path)
            left -= path.stat().st_size
    return sorted(taken)


def record(size: str, folder: Path, steps: int, out: str) -> None:
    """Plays the commands of a size in `folder`, and writes their record."""
    keep_commit()
    *before, last = (with_steps(command, steps) for command in COMMANDS[size])
    commands = [*(play(command, folder) for command in before), play(last, folder, LINES[size])]
    figures: dict[str, Any] = {"total_seconds": round(sum(entry["seconds"] for entry in commands), 1), "commands": commands}
    if size == "laptop":
        figures["told"] = told(folder)
    figures["losses"] = {run.name: losses(lines_of(run)["validation"]) for run in sorted((folder / "runs").iterdir())}
    write_record(out or RECORDS[size], devices.resolve_device("auto"), figures=figures)


def transcript(size: str) -> list[str]:
    """The lines of the page between the markers of a size: its commands, and from its record their seconds and the talk."""
    record = json.loads(RECORDS[size].read_text(encoding="utf-8")) if RECORDS[size].exists() else None
    played = record["figures"]["commands"] if record else [{"command": command} for command in COMMANDS[size]]
    recorded = "Not recorded yet"
    if record:
        seconds = record["figures"]["total_seconds"]
        cost = f", {PRICE * seconds / 3600:.2f} dollars at {PRICE:.2f} an hour" if size == "gpu" else ""
        recorded = f"Recorded on {record['machine']}, in {seconds / 60:.1f} minutes{cost}"
    lines = [f"<!-- {size}: begin -->", f"{recorded}:", "", "```console"]
    for entry in played:
        seconds = f"   # {entry['seconds']:.0f} s" if "seconds" in entry else ""
        lines.append(f"$ {entry['command']}{seconds}")
    counted = [
        f"{name}: {right} of {asked} right"
        for name, (right, asked) in (record or {}).get("figures", {}).get("told", {}).items()
    ]
    lines += [*(played[-1]["output"] if record else []), "```"]
    return [*lines, *(["", "; ".join(counted) + "."] if counted else []), f"<!-- {size}: end -->"]


def planned() -> list[str]:
    """The lines of the page about the plan of a day."""
    config = preset(PLANNED)
    run = forecast(config, GPT2_VOCABULARY, "h100", ranks=8, price=PRICE)
    design = resolve_for(GPUS["h100"], resolved_on(config, GPUS["h100"], 8), GPT2_VOCABULARY, 8)
    parameters, tokens = human_count(count_parameters(design.all_parameters)), config.batch.tokens_before(config.steps)
    return [
        "<!-- planned: begin -->",
        "| parameters | tokens | GiB of each GPU | tokens/s | time | dollars, at 2.50 per GPU and hour |",
        "|---|---|---|---|---|---|",
        f"| {parameters} | {human_count(tokens)} | {run.memory_bytes / 2**30:.1f} | {human_count(run.tokens_per_second)} |"
        f" {duration(run.seconds)} | {run.dollars:.0f} |",
        "<!-- planned: end -->",
    ]


def write_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for begin, *lines, end in (*map(transcript, COMMANDS), planned()):
        before, rest = page.split(begin)
        page = before + "\n".join([begin, *lines, end]) + rest.split(end)[1]
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for size in COMMANDS:
        action = actions.add_parser(size)
        action.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="an empty folder")
        action.add_argument("--steps", type=int, default=0, help="of both trainings, for a trial")
        action.add_argument("--out", default="", metavar="FILE", help="the record")
    actions.choices["gpu"].add_argument("--books", type=Path, required=True, metavar="FOLDER")
    actions.choices["gpu"].add_argument("--dialogues", type=Path, required=True, metavar="FOLDER")
    actions.add_parser("page")
    actions.add_parser("talks").add_argument("folder", type=Path)
    books = actions.add_parser("books")
    books.add_argument("folder", type=Path)
    books.add_argument("megabytes", type=float)
    parsed = parser.parse_args()
    if parsed.action == "talks":
        sys.stdout.writelines(f"{row}\n" for row in dialogues(parsed.folder))
    elif parsed.action == "books":
        sys.stdout.writelines(f"{path}\n" for path in talkative(parsed.folder, parsed.megabytes))
    elif parsed.action == "page":
        write_page()
    else:
        parsed.work.mkdir(parents=True, exist_ok=True)
        places = {"examples": ROOT / "examples"} if parsed.action == "laptop" else {}
        places |= {"books": parsed.books, "dialogues": parsed.dialogues} if parsed.action == "gpu" else {}
        for name, place in places.items():
            (parsed.work / name).symlink_to(place.absolute())
        record(parsed.action, parsed.work.absolute(), parsed.steps, parsed.out)


if __name__ == "__main__":
    run_main(main)
