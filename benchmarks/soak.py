"""Faults at random moments, in numbers: the tests that are marked `soak`, with other seeds.

    python -m benchmarks.soak [--count 200] [--seed NUMBER] [--log soak.log] [--record FILE]

Each test takes its seeds in groups, and a group is a line of the log. `--seed` and `--count` of one repeat it. Ends with
pytest's exit code.
"""

import argparse
import itertools
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.faults import files
from benchmarks.record import ROOT, keep_commit, write_record

OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR)\b .*::")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="random moments of each row (200)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="the first one (any)")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), metavar="FILE", help="(soak.log)")
    parser.add_argument("--record", metavar="FILE", help="write how it ended as JSON")
    parser.add_argument("--workers", default="auto", help="processes at the same time (auto)")
    given = parser.parse_args()
    keep_commit()
    start, counts = time.monotonic(), {"PASSED": 0, "FAILED": 0, "ERROR": 0}
    seeds = ["--seeds", str(given.count), "--first-seed", str(given.seed)]
    command = [sys.executable, "-m", "pytest", "-vv", "-n", given.workers, "--nightly", "-m", "soak", *seeds, *files()]
    with given.log.open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in itertools.chain([f"seeds {given.seed} to {given.seed + given.count - 1}\n"], tests.stdout):
            print(line, end="", flush=True)
            print(line, end="", file=log, flush=True)
            if found := OUTCOME.search(line):
                counts[found[1]] += 1
    if given.record:
        bad, minutes = counts["FAILED"] + counts["ERROR"], round((time.monotonic() - start) / 60, 1)
        numbers = {"first_seed": given.seed, "seeds": given.count, "minutes": minutes}
        write_record(given.record, torch.device("cpu"), **numbers, passed=counts["PASSED"], not_passed=bad)
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
