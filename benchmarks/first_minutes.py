"""The first minutes of a new user on a CPU, from a clone in an empty folder: each command, its seconds and its output.

    python -m benchmarks.first_minutes --work EMPTY_FOLDER     plays them, writes the record, and the page from it
    python -m benchmarks.first_minutes                         writes the page from the record

The record is benchmarks/results/cpu-first-minutes.json, the page docs/first_ten_minutes.md between its markers. The clone
has the committed files only.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, write_record

RECORD = ROOT / "benchmarks" / "results" / "cpu-first-minutes.json"
PAGE = ROOT / "docs" / "first_ten_minutes.md"
BEGIN, END = "<!-- the transcript: begin -->", "<!-- the transcript: end -->"
TEXT = r"""python -c 'from pydoc_data.topics import topics; print("\n\n".join(topics.values())[:300_000])' > my_text.txt"""
NEXT = "the command that prepare recommends"
# (what the user wants, command, lines of output shown at the beginning and at the end)
COMMANDS = (
    ("Set up, and train on the built-in stories", "make train", 6, 14),
    ("", "source .venv/bin/activate", 0, 0),
    ("Let it write", 'handgrad sample runs/demo --prompt "Once upon a time" --max-tokens 80 --seed 1', 12, 4),
    ("A text of your own: here 300 kB of the reference that comes with Python", TEXT, 0, 0),
    ("", "handgrad prepare my_text.txt --out shards/mine", 8, 8),
    ("", NEXT, 6, 2),
    ("", "handgrad sample runs/a --prompt \"The statement\" --max-tokens 150 --seed 1", 24, 4),
    ("Look at the runs", "handgrad report runs/demo runs/a --out both.html", 8, 8),
    ("", "handgrad runs", 8, 8),
    ("", "handgrad watch runs", 4, 4),
    ("Plan a larger one", "handgrad plan d12", 10, 2),
)  # fmt: skip
CLIPPED = 150  # characters of a line


def play(folder: Path) -> list[dict[str, Any]]:
    """The commands' titles, texts, seconds and output, in a clone in `folder`."""
    clone = folder / "handgrad"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)], check=True)
    played, recommended = [], ""
    for title, command, first, last in COMMANDS:
        command = recommended if command is NEXT else command
        lines, seconds = act(command, clone)
        recommended = next((line.removeprefix("next").strip() for line in lines if line.startswith("next")), recommended)
        said = without_noise(lines, folder)
        played.append(
            {"title": title, "command": command, "seconds": round(seconds, 1), "output": shortened(said, first, last)}
        )
    return played


def act(command: str, clone: Path) -> tuple[list[str], float]:
    """The output of a command, and its seconds."""
    print(f"$ {command}", flush=True)
    binaries = clone / ".venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHON"))}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "VIRTUAL_ENV": str(binaries.parent), "COLUMNS": "120"}
    return (watch if command.startswith("handgrad watch") else run)(command, clone, environment)


def without_noise(lines: Sequence[str], folder: Path) -> list[str]:
    """The lines without the folder's name and without pip's warnings, which are about its own settings."""
    return [line.replace(str(folder), "~")[:CLIPPED] for line in lines if not line.startswith("WARNING: ")]


def run(command: str, folder: Path, environment: dict[str, str]) -> tuple[list[str], float]:
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - start
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout.splitlines(), seconds


def watch(command: str, folder: Path, environment: dict[str, str]) -> tuple[list[str], float]:
    """Starts the server, reads its page once as a browser does, and ends it as Ctrl-C does; the seconds up to the page."""
    start = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(shlex.split(command), cwd=folder, env=environment, **pipes) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line.rstrip())
            if found := re.search(r"http://\S+", line):
                with urllib.request.urlopen(found[0], timeout=60) as answer:
                    page = answer.read()
                break
        seconds = time.monotonic() - start
        server.send_signal(signal.SIGINT)
        rest = server.stdout.read().splitlines()
    return [*lines, f"(its page: {len(page):,} bytes; then Ctrl-C)", *rest], seconds


def shortened(lines: Sequence[str], first: int, last: int) -> list[str]:
    """The first and the last lines, an ellipsis for the others."""
    return [*lines] if len(lines) <= first + last + 1 else [*lines[:first], "…", *lines[len(lines) - last :]]


def clipped(line: str) -> str:
    return f"{line}…" if len(line) == CLIPPED else line


def transcript(record: dict[str, Any]) -> list[str]:
    """The lines of the page between its markers."""
    load = f"mean load of the fifteen minutes before its end: {record['load']:.1f}, these commands among it"
    lines = [BEGIN, f"Recorded on {record['machine']} ({load}).", ""]
    for entry, (*_, first, last) in zip(record["commands"], COMMANDS, strict=True):  # a record may have more lines
        if entry["title"]:
            lines += [f"## {entry['title']}", ""]
        output = shortened(entry["output"], first, last)
        seconds = [f"({entry['seconds']:.1f} s)"] if entry["seconds"] >= 0.05 else []
        lines += ["```console", f"$ {entry['command']}", *map(clipped, output), *seconds, "```", ""]
    return [*lines, END]


def write_page(record: dict[str, Any]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + "\n".join(transcript(record)) + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="an empty folder to play in")
    parsed = parser.parse_args()
    if parsed.work:
        parsed.work.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would the server
        folder = parsed.work.absolute()
        commands = play(folder)
        total = round(sum(entry["seconds"] for entry in commands), 1)
        load = round(os.getloadavg()[2], 1)  # of the last fifteen minutes
        write_record(RECORD, torch.device("cpu"), load=load, total_seconds=total, commands=commands)
    write_page(json.loads(RECORD.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
