"""Ranks the entries of the arena (arena/README.md has the rules), from the root of a clone:

    python -m arena.rank                  checks every entry by its record and prints the table
    python -m arena.rank --write          also writes the table into arena/README.md
    python -m arena.rank --replay NAME    trains an entry anew, compares every link, scores it on stories drawn now

A record is read, never believed: the budget follows from its settings by handgrad's own formula, data and code are known
by hash, and the score is the loss of the weights that this script has trained.
"""

import argparse
import hashlib
import io
import json
import math
import re
import secrets
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.stories import Story, story
from handgrad.errors import DataError, HandgradError
from handgrad.joins.audit.chain import Line, differing, links, numbers_text, read_chain
from handgrad.machine import threads
from handgrad.models import parameter_table
from handgrad.parsing import parse_record
from handgrad.run.checkpointing import SOURCES, sources_sha256
from handgrad.settings.config import FIELDS, RunConfig, check, to_dict
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.tools.record import RunRecord, config_of, open_record
from handgrad.tools.recorder import polar_flops

ROOT = Path(__file__).resolve().parents[1]
PAGE, ENTRIES = ROOT / "arena" / "README.md", ROOT / "arena" / "entries"
ABOUT, SCORE = "entry.toml", "score.json"
EQUAL, NOT_REPLAYED = "equal", "not replayed"  # in a score: its replay's links, compared with the entry's
FILES = {AUDIT_FILE, ABOUT, SCORE}
TEXTS = ("author", "commit", "instructions", "changed", "learnt")  # of entry.toml
BEGIN_TABLE, END_TABLE = "<!-- drawn by python -m arena.rank --write -->", "<!-- end of what is drawn -->"
# -log p of each story, from end-of-text to end-of-text, as the weights of the run sys.argv[1] give it: one a line.
MEASURE = """
import json, math, sys, handgrad
model, stories = handgrad.load(sys.argv[1], device="cpu"), json.load(open(sys.argv[2]))
for first in range(0, len(stories), 64):
    rows = [[*model.tokens(text), model.tokenizer.end_of_text] for text in stories[first : first + 64]]
    for row, losses in zip(rows, model.losses(rows).tolist()):
        print(math.fsum(losses[: len(row) - 1]).hex())
"""


@dataclass(frozen=True)
class Rules:
    """The limits of an entry, and the data that all entries train on."""

    flops: float = 4e13  # five minutes of two cores at the 146 GFLOP/s of benchmarks/results/cpu-demo.json
    most_steps: int = 20_000  # what a step costs beside its FLOPs has no other bound
    most_bytes: int = 2 << 20  # of an entry's files
    seed: int = RunConfig.seed
    documents: int = 200_000  # training stories: numbers 0 to 199,999 of corpus 0, a hundredth of them for validation
    tokenizer: str = "bpe:1024"
    vocab_size: int = 1024
    data_sha256: str = "4f9afe5e1e79c6dcf876b43527c5830d6636afc3126bdc82dcb2021cab6deb80"
    tokenizer_sha256: str = "1f8ee856f5acae9ffbcbff2058e759494cc703b1d11189905ad5b79abce2366d"
    held_out: int = 20_000  # stories of a score, of a corpus drawn after the entry


RULES = Rules()


@dataclass(frozen=True)
class Entry:
    """An entry whose record keeps the rules."""

    name: str
    record: RunRecord
    config: RunConfig
    about: dict[str, str]
    flops: float
    score: dict[str, Any] | None  # None: not replayed yet

    @property
    def excess(self) -> float:
        """Nats above the entropy of the same stories, as a fraction of it; infinite without a score."""
        return self.score["excess"] / self.score["entropy"] if self.score else math.inf


def training_flops(config: RunConfig, vocab_size: int) -> float:
    """FLOPs of all steps: forward and backward as the trainer counts them, and the polar factors of Muon."""
    shape, matrices = config.shape(vocab_size), 0
    if config.optimizer == "muon":
        rows = [row for row in parameter_table(shape) if row.group == "matrix"]
        matrices = sum(polar_flops({"update_to_polar_inout": torch.empty(1, *row.shape, device="meta")}) for row in rows)
    return config.batch.tokens_before(config.steps) * shape.flops_per_token + config.steps * matrices


def check_entry(folder: Path, rules: Rules) -> Entry:
    """Checks all that needs no training. Raises `HandgradError` for the first rule that the record breaks."""
    files = {path.name: path for path in folder.iterdir()}
    if further := sorted(files.keys() - FILES):
        raise DataError(f"{folder}: expected {', '.join(sorted(FILES))}, found {further[0]}; take it out")
    if (size := sum(path.lstat().st_size for path in files.values())) > rules.most_bytes:
        remedy = "train with a larger --audit-every"
        raise DataError(f"{folder}: expected at most {rules.most_bytes} bytes, found {size}; {remedy}")
    record, about = open_record(folder), about_of(folder / ABOUT)
    begin, config = record.begins[0], check(config_of(record, 0, {}))
    if len(record.begins) > 1 or begin["step"] or record.last_step != config.steps:
        found = f"{len(record.begins)} beginnings, links from {begin['step']} to {record.last_step} of {config.steps}"
        raise DataError(f"{folder}: expected one run with a link at its last step, found {found}; train it in one go")
    if config.init_from or "init" in begin:
        found = config.init_from or "the hashes of weights"
        raise DataError(f"{folder}: expected weights drawn from the seed, found {found}; train without --init-from")
    if config.seed != rules.seed:
        raise DataError(f"{folder}: expected seed {rules.seed}, found {config.seed}; seeds are no lottery tickets here")
    known = {"tokenizer": rules.tokenizer_sha256, "data": rules.data_sha256}
    for name, expected in known.items():
        if (found := begin["identity"].get(name)) != expected:
            remedy = "train on the stories that the README prepares"
            raise DataError(f"{folder}: expected {name} {expected[:12]}, found {str(found)[:12]}; {remedy}")
    if not (found := begin["versions"].get("device", "")).startswith("cpu"):
        raise DataError(f"{folder}: expected a run on a CPU, found {found}; train with --device cpu")
    flops = training_flops(config, rules.vocab_size)
    if flops > rules.flops or config.steps > rules.most_steps:
        found = f"{flops:.4g} FLOP in {config.steps} steps"
        limits = f"{rules.flops:.4g} FLOP and {rules.most_steps} steps"
        raise DataError(f"{folder}: expected at most {limits}, found {found}; train fewer steps or a smaller network")
    if (expected := sources_at(about["commit"])) != (found := begin["versions"].get(SOURCES)):
        where = f"handgrad at commit {about['commit']}, sources {expected[:12]}"
        raise DataError(f"{folder}: expected {where}, found {str(found)[:12]}; train with the code of a commit of main")
    return Entry(folder.name, record, config, about, flops, score_of(folder / SCORE, last_link(record)))


def score_of(path: Path, link: str) -> dict[str, Any] | None:
    """The score of the run that ends in `link`; None before its replay."""
    if not path.is_file():
        return None
    score = parse_record(path.read_bytes(), str(path))
    numbers = {name: score.number(name) for name in ("excess", "error", "entropy")}
    if score.text("link") != link:
        raise DataError(f"{path} is of another run, ending in {score.text('link')[:12]}; remove it and replay the entry")
    return {"link": link, "seed": score.count("seed"), **numbers, "links": score.text("links")}


def about_of(path: Path) -> dict[str, str]:
    """The author's words. Raises `DataError` unless each is a line of text."""
    try:
        about = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; write {', '.join(TEXTS)} into it") from None
    for name in TEXTS:
        if not isinstance(about.get(name), str) or not about[name] or set("|<>\n") & set(about[name]):
            raise DataError(f"{path}: expected {name} as a line without | < >, found {about.get(name)!r:.60}; change it")
    return {name: about[name] for name in TEXTS}


def last_link(record: RunRecord) -> str:
    return record.steps[record.last_step]["link"]


def git(*words: str) -> bytes:
    """The output of a git command in this clone. Raises `DataError` if it fails."""
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if run.returncode:
        told = run.stderr.decode(errors="replace").strip() or "it is no ancestor of HEAD"
        raise DataError(f"git {' '.join(words[:4])} failed: {told}; name a commit of main")
    return run.stdout


def archive(commit: str) -> tarfile.TarFile:
    """The package at a commit of this branch."""
    if len(commit) != 40 or set(commit) - set("0123456789abcdef"):
        raise DataError(f"expected a commit as 40 hexadecimal digits, found {commit!r:.50}; `git rev-parse HEAD` prints it")
    git("merge-base", "--is-ancestor", commit, "HEAD")
    return tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit, "handgrad")))


def sources_at(commit: str) -> str:
    """The hash of the package's Python files at a commit, as a chain records it (`run.checkpointing.sources_sha256`)."""
    digest = hashlib.sha256()
    with archive(commit) as package:
        names = {member.name.removeprefix("handgrad/"): member for member in package if member.name.endswith(".py")}
        for name in sorted(names):
            file = package.extractfile(names[name])
            assert file is not None
            content = file.read()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# The replay.


def replay(entry: Entry, rules: Rules, data: Path, scratch: Path) -> tuple[Path, Path]:
    """Trains the entry's settings by the code of its commit; returns the package's folder and the run."""
    begin, tree = entry.record.begins[0], Path(handgrad.__file__).parents[1]
    if sources_sha256() != begin["versions"][SOURCES]:
        tree = scratch / "tree"
        with archive(entry.about["commit"]) as package:
            package.extractall(tree, filter="data")
    if (found := training_data(rules, data)) != rules.data_sha256:
        raise DataError(f"expected the stories {rules.data_sha256[:12]} at {data}, found {found[:12]}; name another --data")
    recipe, run, every = scratch / "recipe.toml", scratch / "run", min(entry.record.steps)
    settings = {name: value for name, value in to_dict(entry.config).items() if not FIELDS[name].metadata["free"]}
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    quiet = f"--audit-every {every} --eval-every 0 --eval-tokens 1 --sample-tokens 0 --save-every 0 --log-every 500".split()
    paths = ["--config", str(recipe), "--data", str(data.absolute()), "--out", str(run)]
    python(tree, "-m", "handgrad", "train", *paths, *quiet)
    return tree, run


def machine_of(begin: Line) -> dict[str, str]:
    """The versions that may change bits, without the number of threads, which changes none."""
    return {name: re.sub(r", \d+ threads$", "", text) for name, text in begin["versions"].items()}


def measured(tree: Path, run: Path, stories: list[Story], scratch: Path) -> dict[str, float]:
    """The entropy, and by how much the run's -log p of the stories is above the grammar's: the mean in nats per story, an
    estimate of the Kullback-Leibler divergence, with its standard error."""
    texts = scratch / "stories.json"
    texts.write_text(json.dumps([story.text for story in stories]))
    told = python(tree, "-c", MEASURE, str(run.absolute()), str(texts), shown=False)
    losses = map(float.fromhex, told.split())
    above = [loss - story.nats for loss, story in zip(losses, stories, strict=True)]
    error = statistics.stdev(above) / math.sqrt(len(above))
    return {"excess": statistics.fmean(above), "error": error, "entropy": statistics.fmean(story.nats for story in stories)}


def compare(entry: Entry, mine: list[Line]) -> str:
    """`EQUAL`, or where this machine's links begin to differ. Raises `DataError` if they differ on a machine like the
    entry's."""
    recorded = links(entry.record.lines)
    for link, own in zip(recorded, mine, strict=True):
        fields = [name for name in differing(own, link) if not name.startswith("versions.")]
        if not fields:
            continue
        numbers = numbers_text(fields, link, own, ", replayed ")
        told = f"{', '.join(fields)} differ from step {link['step']} on{f' ({numbers})' if numbers else ''}"
        then, now = machine_of(recorded[0]), machine_of(mine[0])
        others = [f"{now.get(name)} for {was}" for name, was in then.items() if now.get(name) != was]
        if (own_set := torch.backends.cpu.get_cpu_capability()) != entry.about["instructions"]:
            others.append(f"{own_set} for {entry.about['instructions']}")
        if not others:
            raise DataError(f"{entry.record.path}: {told}; these settings did not make this record")
        return f"{told}, as may be: {', '.join(others)} are others"
    return EQUAL


def training_data(rules: Rules, data: Path) -> str:
    """Prepares the training stories and returns their identity."""
    options = PrepareOptions("stories", data, tokenizer=rules.tokenizer, documents=rules.documents)
    return prepare(options).dataset.identity


def fresh_stories(rules: Rules, seed: int) -> list[Story]:
    """The first stories of the corpus `seed`. Raises `DataError` if a training story is among them."""
    stories = [story(seed, index) for index in range(rules.held_out)]
    known = {hash(story(0, index).text) for index in range(rules.documents)}
    if any(hash(one.text) in known for one in stories):
        raise DataError(f"corpus {seed} has a training story among its first {len(stories)}; draw another --seed")
    return stories


def python(tree: Path, *words: str, shown: bool = True) -> str:
    """Runs Python with the package in `tree` and returns its output, `shown` on this terminal as it comes. Raises
    `DataError` if it fails."""
    environment, output = {**threads.environment_before(), "PYTHONPATH": str(tree)}, ""
    with subprocess.Popen([sys.executable, *words], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output += line
            if shown:
                print(line, end="", flush=True)
    if run.returncode:
        raise DataError(f"`{shlex.join(words[:3])}` ended with exit code {run.returncode}; its last lines say why")
    return output


# The table.


def ranked(rules: Rules, folder: Path) -> list[Entry]:
    """The entries, the best first; entries without a score last."""
    entries = [check_entry(path, rules) for path in sorted(folder.iterdir()) if path.is_dir()]
    return sorted(entries, key=lambda entry: entry.excess)


def table(entries: Sequence[Entry], rules: Rules) -> str:
    """The ranking in Markdown, and what each entry learnt."""
    head = ("", "entry", "above the entropy", "network", "steps", "tokens", "of the budget", "by", "changed")
    rows = [head, ("---",) * len(head)]
    for place, entry in enumerate(entries, 1):
        config, shape = entry.config, entry.config.shape(rules.vocab_size)
        score = NOT_REPLAYED if not entry.score else score_text(entry.score)
        score += f", {NOT_REPLAYED}" if entry.score and entry.score["links"] == NOT_REPLAYED else ""
        network = f"{shape.network.title}, {config.num_layers} x {config.channels}, {config.optimizer}"
        tokens = f"{config.batch.tokens_before(config.steps) / 1e6:.1f}M"
        cells = (str(place), f"[{entry.name}](entries/{entry.name})", score, network, str(config.steps), tokens)
        rows.append((*cells, f"{entry.flops / rules.flops:.1%}", entry.about["author"], entry.about["changed"]))
    learnt = [f"- **{entry.name}**: {entry.about['learnt']}" for entry in entries]
    return "\n".join([*("| " + " | ".join(row) + " |" for row in rows), "", *learnt])


def score_text(score: dict[str, Any]) -> str:
    """'0.771 % ± 0.008': of the entropy, with the standard error."""
    return f"{100 * score['excess'] / score['entropy']:.3f} % ± {100 * score['error'] / score['entropy']:.3f}"


def with_table(page: str, drawn: str) -> str:
    """The page with the table between its two marks replaced."""
    before, _, rest = page.partition(BEGIN_TABLE)
    return f"{before}{BEGIN_TABLE}\n\n{drawn}\n\n{END_TABLE}{rest.partition(END_TABLE)[2]}"


def score_entry(entry: Entry, rules: Rules, data: Path, run: Path | None, seed: int | None) -> None:
    """Scores an entry and prints it: by a replay, or by its own `run`. Records the first score, on stories drawn now, and
    the first of a replay; raises `DataError` if a later one on the same stories and an equal machine is another."""
    recorded, file = entry.score, entry.record.path / SCORE
    if seed is None:
        seed = recorded["seed"] if recorded else secrets.randbelow(1 << 31) + 1
    stories = fresh_stories(rules, seed)
    with tempfile.TemporaryDirectory(prefix="arena-") as folder:
        scratch = Path(folder)
        tree, trained = (ROOT, run) if run else replay(entry, rules, data, scratch)
        compared = compare(entry, links(read_chain(trained / AUDIT_FILE)))
        numbers = measured(tree, trained, stories, scratch)
    told = NOT_REPLAYED if run else compared
    score = {"link": last_link(entry.record), "seed": seed, **numbers, "links": told}
    print(f"{entry.name}: {score_text(score)} above the entropy of {len(stories)} stories of corpus {seed}; links {told}")
    same = recorded is not None and seed == recorded["seed"]
    if same and compared == EQUAL and score["excess"] != recorded["excess"]:
        found = f"{recorded['excess']} nats above the entropy, these weights are {score['excess']}"
        raise DataError(f"{file} has {found}; one was edited")
    if recorded is None or (same and recorded["links"] == NOT_REPLAYED):
        file.write_text(json.dumps(score, indent=1) + "\n")


def main(words: Sequence[str] | None = None, rules: Rules = RULES, entries: Path = ENTRIES) -> int:
    parser = argparse.ArgumentParser(prog="python -m arena.rank", description="Ranks the entries of arena/README.md.")
    parser.add_argument("--write", action="store_true", help="write the table into arena/README.md")
    parser.add_argument("--replay", metavar="NAME", help="train an entry anew, compare its links, score it")
    parser.add_argument("--run", type=Path, help="with --replay: the entry's run, whose weights are scored as they are")
    parser.add_argument("--seed", type=int, help="corpus that scores the replay (default: as recorded, else drawn now)")
    parser.add_argument("--data", type=Path, default=ROOT / "shards" / "arena", help="training stories, made if missing")
    asked = parser.parse_args(words)
    try:
        if asked.replay:
            score_entry(check_entry(entries / asked.replay, rules), rules, asked.data, asked.run, asked.seed)
            return 0
        drawn = table(ranked(rules, entries), rules)
    except HandgradError as error:
        print(f"refused: {error}", file=sys.stderr)
        return error.exit_code
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text(), drawn))
    print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
