"""Mutants of the core, and the share that the tests kill: `python -m tests.mutants [--module PART] [--record FILE]`.

A mutant is a small mistake: an exact text of a module and what it becomes. Each is planted in a copy of the tree, where the
tests that hold the module's promises must fail. One that survives is a promise without a test, unless nothing that can be
seen depends on it: then the table says why, and it does not count. Each core takes a module at a time; a
mutant takes some seconds. No part of CI.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TRITON_INTERPRET": "1"}  # as tests/conftest.py has it

import pytest
import torch

from benchmarks.record import ROOT, keep_commit, write_record

# Imported once; a fork for each mutant then has them, and imports the copy of the package and its tests anew.
PRELOADED = ("torch._dynamo", "transformers", "hypothesis.strategies", "tokenizers", "tiktoken", "pyarrow.parquet")
FORKS = multiprocessing.get_context("fork")

LIMIT_SECONDS = 600.0  # a mutant whose tests hang until then counts as killed
KILLED, SURVIVED, EQUIVALENT = OUTCOMES = "killed", "survived", "equivalent"
FAILED = 1  # pytest's exit code when a test fails; 2 and above: it could not run them

# "= module of handgrad: the tests, below tests/, that should kill its mutants", then "source ==> replacement" and, of an
# equivalent one, "## the reason". \n is the end of a line.
TABLE = Path(__file__).with_name("mutants.txt")


@dataclass(frozen=True)
class Mutant:
    source: str
    replacement: str
    equivalent: str  # the reason, if it is


@dataclass(frozen=True)
class Target:
    """A module, the tests of its promises (arguments of pytest), and its mutants."""

    module: str
    tests: list[str]
    mutants: list[Mutant]


def read_table(table: str) -> list[Target]:
    targets: list[Target] = []
    for line in filter(None, table.splitlines()):
        if line.startswith("= "):
            module, _, tests = line.removeprefix("= ").partition(": ")
            words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
            targets.append(Target(module, words, []))
        else:
            change, _, reason = line.partition("  ## ")
            source, _, replacement = (part.strip().replace(r"\n", "\n") for part in change.partition("==>"))
            targets[-1].mutants.append(Mutant(source, replacement, reason))
    return targets


def copy_tree(folder: Path) -> None:
    """Copies the files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    # Some tests ask git for the tree's files.
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


def run_tests(folder: Path, tests: list[str]) -> None:
    """Runs the tests of the copy until the first that fails; a process of its own, whose exit code is pytest's."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("handgrad", "tests", "benchmarks")]:
        del sys.modules[name]
    with Path("output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--nightly", *tests])))


def tests_pass(folder: Path, tests: list[str]) -> bool:
    process = FORKS.Process(target=run_tests, args=(folder, tests))
    process.start()
    process.join(LIMIT_SECONDS)
    process.kill()
    process.join()
    if process.exitcode not in (0, FAILED, -signal.SIGKILL):
        raise SystemExit(f"pytest could not run {shlex.join(tests)}:\n{(folder / 'output').read_text()[-3000:]}")
    return process.exitcode == 0


def plant(path: Path, text: str) -> None:
    """Writes a module; what Python compiled of it before goes, since it may be as old and as long as the new one."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(text, encoding="utf-8")


def outcomes_of(targets: list[Target], copies: Path) -> list[dict[str, str]]:
    """The outcome of each mutant of a module, in this process's copy of the tree below `copies`."""
    folder = copies / str(os.getpid())
    if not folder.exists():
        copy_tree(folder)
    return [entry for target in targets for entry in outcomes(target, folder)]


def outcomes(target: Target, folder: Path) -> list[dict[str, str]]:
    """The outcome of each mutant that these tests should kill."""
    path, found = folder / "handgrad" / target.module, []
    original = path.read_text(encoding="utf-8")
    if not tests_pass(folder, target.tests):
        raise SystemExit(f"the tests of {target.module} fail without a mutant: {shlex.join(target.tests)}")
    for mutant in target.mutants:
        outcome = EQUIVALENT
        if not mutant.equivalent:
            plant(path, original.replace(mutant.source, mutant.replacement))
            outcome = SURVIVED if tests_pass(folder, target.tests) else KILLED
            plant(path, original)
        entry = {"source": mutant.source, "replacement": mutant.replacement, "outcome": outcome}
        found.append(entry | ({"reason": mutant.equivalent} if mutant.equivalent else {}))
        print(f"{outcome:<10} {target.module}: {mutant.source!r} -> {mutant.replacement!r}", flush=True)
    return found


def check(targets: list[Target]) -> None:
    """Raises `SystemExit` for a mutant whose source text is not in its module exactly once."""
    for target in targets:
        text = (ROOT / "handgrad" / target.module).read_text(encoding="utf-8")
        for mutant in target.mutants:
            count = text.count(mutant.source)
            if count != 1 or mutant.source == mutant.replacement:
                raise SystemExit(
                    f"expected a text that stands once in handgrad/{target.module} and changes, found it {count} times:"
                    f" {mutant.source!r} -> {mutant.replacement!r}"
                )


def finished(part: Path, commit: str) -> dict[str, list[dict[str, str]]]:
    """The outcomes by module that an earlier run of this commit has left in `part`."""
    if not commit or not part.exists():
        return {}
    lines = (json.loads(line) for line in part.read_text(encoding="utf-8").splitlines())
    return {module: each for at, module, each in lines if at == commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", metavar="PART", default="", help="only modules whose path contains this")
    parser.add_argument(
        "--record", metavar="FILE", help="write the outcomes as JSON with their provenance; an interrupted run goes on"
    )
    arguments = parser.parse_args()
    targets = read_table(TABLE.read_text(encoding="utf-8"))
    check(targets)
    for name in PRELOADED:
        importlib.import_module(name)
    keep_commit()
    commit, part = os.environ.get("HANDGRAD_COMMIT", ""), Path(f"{arguments.record}.part")
    found = finished(part, commit) if arguments.record else {}
    targets_of = {target.module: list[Target]() for target in targets}  # which may have tests for each of its promises
    for target in targets:
        targets_of[target.module].append(target)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with tempfile.TemporaryDirectory() as copies, ProcessPoolExecutor(cores, mp_context=FORKS) as pool:
        waiting = {
            pool.submit(outcomes_of, own, Path(copies)): module
            for module, own in targets_of.items()
            if arguments.module in module and module not in found
        }
        for done in as_completed(waiting):
            module = waiting[done]
            found[module] = done.result()
            if arguments.record:
                with part.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps([commit, module, found[module]]) + "\n")
    found = {module: found[module] for module in targets_of if module in found}
    entries = {**found, "total": [entry for entries in found.values() for entry in entries]}
    counts = {
        module: {outcome: sum(entry["outcome"] == outcome for entry in each) for outcome in OUTCOMES}
        for module, each in entries.items()
    }
    print(f"{'module':<32}{''.join(f'{outcome:>12}' for outcome in OUTCOMES)}")
    for module, count in counts.items():
        print(f"{module:<32}{''.join(f'{number:>12}' for number in count.values())}")
    if arguments.record:
        write_record(arguments.record, torch.device("cpu"), counts=counts, mutants=found)
        part.unlink(missing_ok=True)
    sys.exit(bool(counts["total"][SURVIVED]))


if __name__ == "__main__":
    main()
