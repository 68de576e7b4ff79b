"""The faults that a run must survive, and the page about them.

    python -m benchmarks.faults --run    the tests of all rows, into benchmarks/results/cpu-faults.json, and the page
    python -m benchmarks.faults          the page alone: docs/faults.md between its markers

The page comes from tests/faults/rows.toml and the records: of these tests, and of `tests.faults.guards`,
`benchmarks.gpu_faults`, `benchmarks.soak`, `benchmarks.chaos` and `benchmarks.checkpoint_peers`. One that is not there
leaves its place empty.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.record import ROOT
from tests.faults.rows import Row, all_passed, marked, read_rows

PAGE = ROOT / "docs" / "faults.md"
RESULTS = ROOT / "benchmarks" / "results"
NONE = "–"


def record(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def heading(*texts: str) -> list[str]:
    return [cells(*texts), cells(*["---"] * len(texts))]


def tests_of(row: Row, cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The number of its tests that passed on a CPU, and "GPU" where it passed there."""
    tests, played = cpu.get("rows", {}).get(str(row.number)), gpu.get("rows", {}).get(str(row.number))
    found = []
    if "cpu" in row.runs_on and tests is not None:
        found.append(str(tests["passed"]) if all_passed(tests) else "fails")
    if "gpu" in row.runs_on and played is not None:
        found.append("GPU" if played["outcome"] == "passed" else "fails on a GPU")
    return ", ".join(found) or NONE


def without_guards(found: dict[str, Any]) -> str:
    """The number of rows that fail without their guard, and the rows that still pass."""
    outcomes = {number: row["tests"] for number, row in found["rows"].items()}
    others = [number for number, tests in outcomes.items() if tests != "fails"]
    noticed = f"Without its guard the tests of {len(outcomes) - len(others)} rows fail"
    return f"{noticed}; rows {', '.join(others)} still pass." if others else f"{noticed}; the other rows have none."


def rows_table() -> list[str]:
    """The lines of the page's table of faults."""
    cpu, gpu, guards = record("cpu-faults"), record("h200-faults"), record("cpu-fault-guards")
    lines = heading("#", "fault", "required outcome", "passed tests")
    for row in read_rows().values():
        lines.append(cells(str(row.number), row.fault, row.then, tests_of(row, cpu, gpu)))
    lines.append("")
    if cpu:
        found = f"{cpu['passed']} tests passed in {cpu['seconds']:.0f} s on {cpu['date']}"
        lines.append(f"On a CPU: {found}; {cpu['machine'].removeprefix('cpu: ')}; commit {cpu['commit']}.")
    if gpu:
        lines.append(f"On a GPU: {gpu['date']}; {gpu['machine']}; commit {gpu['commit']}.")
    if guards:
        lines.append(without_guards(guards))
    return lines


def peers_table() -> list[str]:
    """The lines of the page's table of other formats."""
    peers = record("cpu-checkpoint-peers")
    if not peers:
        return []
    kills, flips = ("killed in saves", "then the old or the new state", "neither"), ("a bit flipped", "refused")
    lines = heading("saved by", *kills, *flips, "ms a save")
    for name, row in peers["rows"].items():
        kills, flips = row["kills"], row["flips"]
        found = kills["tries"], kills["old"] + kills["new"], kills["lost"], flips["tries"], flips["refused"]
        lines.append(cells(name, *map(str, found), f"{kills['save_ms']:.0f}"))
    versions = ", ".join(f"{name} {version}" for name, version in {**peers["versions"], **peers["libraries"]}.items())
    size = f"{peers['state_bytes'] / 1e6:.1f} MB a state"
    machine = peers["machine"].removeprefix("cpu: ")
    return [*lines, "", f"{size}; {versions}; {machine}; commit {peers['commit']}."]


def soak_line() -> list[str]:
    soak = record("cpu-soak")
    if not soak:
        return []
    seeds = f"seeds {soak['first_seed']} to {soak['first_seed'] + soak['seeds'] - 1}"
    found = f"{soak['passed']} groups passed, {soak['not_passed']} did not, in {soak['minutes']:.0f} minutes"
    return [f"The last one: {found} ({soak['date']}, {seeds}, commit {soak['commit']})."]


def chaos_line() -> list[str]:
    chaos = record("cpu-chaos")
    if not chaos:
        return []
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(chaos["kinds"].items(), key=lambda entry: -entry[1]))
    found = f"{chaos['faults']} faults on {chaos['ranks']} ranks in {chaos['minutes']:.0f} minutes, {chaos['steps']} steps"
    source = f"{chaos['date']}, seed {chaos['seed']}, commit {chaos['commit']}"
    log = "[log](../benchmarks/results/cpu-chaos.log)"
    return [f"The last one ({log}): {found}, every bit equal ({source}): {kinds}."]


BLOCKS = {"rows": rows_table, "soak": soak_line, "chaos": chaos_line, "peers": peers_table}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, made in BLOCKS.items():
        begin, end = marks(name)
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = "\n".join([before + begin, "", *made(), "", end + after])
    return text


def files() -> list[str]:
    """Those with tests of rows: pytest would have to import all others to find that out."""
    return sorted({str(path.relative_to(ROOT)) for paths in marked().values() for path in paths})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the tests first")
    if parser.parse_args().run:
        workers = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", *workers, "--nightly", "-m", "fault"]
        command += ["--fault-record", str(RESULTS / "cpu-faults.json")]
        if code := subprocess.run([*command, *files()], cwd=ROOT).returncode:
            sys.exit(code)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
