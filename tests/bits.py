"""Records what handgrad computes, bit by bit, so that two versions of its code can be held against each other.

    python tests/bits.py record FILE.json [--only PATTERN] [--device cpu|cuda] [--jobs N]
    python tests/bits.py compare A.json B.json

`record` makes the rows of bits_rows.txt, most of them short runs of a tiny model, and writes down digests: of the weights
and moments in the newest checkpoint, of all else that a run resumes from, of losses, norms, learning rates, validations,
samples and events, of the logits and texts of loaded models, of exported files. A row that ends by an error has its line.
`compare` prints the rows that differ, and in what, and exits with 1 if there are any. The code at work is the `handgrad`
that Python imports: `PYTHONPATH=CHECKOUT` chooses another one.

It takes the public functions, the commands and the files of a run, nothing below them, so it outlives changes there. Every
process computes with one thread. Two records can be compared if they were made on equal machines with the same torch.
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from bits_rows import Result, make_row, phases_of, settings_of, table  # pins the threads, before torch is loaded

import handgrad


def rows_of(device: str, only: str) -> list[str]:
    """The rows that this machine can make."""
    most = 4
    if device == "cuda":
        import torch

        most = torch.cuda.device_count()

    def can_be(name: str) -> bool:
        ranks = [settings_of(name).get("ranks", 1), *(ranks for ranks, _, _ in phases_of(name))]
        return max(ranks) <= most and (device == "cuda" or not name.startswith("cuda."))

    return [name for name in table() if not name.isupper() and re.search(only, name) and can_be(name)]


def record(path: Path, only: str, device: str, jobs: int) -> None:
    begun, names, rows, seconds = time.monotonic(), rows_of(device, only), dict[str, Result](), dict[str, float]()
    print(f"{len(names)} rows of {Path(handgrad.__file__).parent} on {device}", flush=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as shared, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in as_completed([pool.submit(make_row, name, device, Path(shared)) for name in names]):
            name, rows[name], seconds[name] = done.result()
    import torch

    kind = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    made = {"torch": torch.__version__, "device": f"{device}, {kind}", "only": only}
    path.write_text(json.dumps({"made": made, "rows": {name: rows[name] for name in names}}, indent=1) + "\n")
    for name in names:
        for line in rows[name].get("errors", []):
            print(f"{name}: {line}")
    slowest = ", ".join(f"{name} ({seconds[name]:.1f} s)" for name in sorted(names, key=lambda name: -seconds[name])[:5])
    print(f"{len(names)} rows in {time.monotonic() - begun:.0f} s, written to {path}; slowest: {slowest}")


def differences(one: Result, other: Result) -> Iterator[str]:
    for key in dict.fromkeys([*one, *other]):
        before, after = (json.dumps(row.get(key), ensure_ascii=False) for row in (one, other))
        if before != after:
            yield key if "sha256:" in before + after else f"{key} {before:.200} -> {after:.200}"


def compare(first: Path, second: Path) -> int:
    """Prints what differs between two records in the rows that both were asked for; 1 if anything does."""
    one, other = (json.loads(path.read_text()) for path in (first, second))
    for key in ("torch", "device"):
        if one["made"][key] != other["made"][key]:
            print(f"note: made with another {key}, {one['made'][key]} and {other['made'][key]}")
    asked = [made["made"]["only"] for made in (one, other)]
    names = dict.fromkeys([*one["rows"], *other["rows"]])
    names = [name for name in names if all(re.search(only, name) for only in asked)]
    different = 0
    for name in names:
        a, b = one["rows"].get(name), other["rows"].get(name)
        found = list(differences(a, b)) if a and b else [f"only in {first if a else second}"]
        if found:
            different += 1
            print(f"{name}: {'; '.join(found)}")
    print(f"{different} of {len(names)} rows differ")
    return int(different > 0 or not names)


def main() -> int:
    parser = argparse.ArgumentParser(description="Records what handgrad computes, and compares two records.")
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="make the rows")
    recording.add_argument("file", type=Path, metavar="FILE.json")
    recording.add_argument("--only", default="", metavar="PATTERN", help="a regular expression found in their names")
    recording.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    recording.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once (default: 1)")
    comparing = actions.add_parser("compare", help="hold two records against each other")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    given = parser.parse_args()
    if given.action == "compare":
        return compare(given.first, given.second)
    record(given.file, given.only, given.device, given.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
