"""Training beside other work: steps on a CPU by how its threads wait, on an idle machine and beside three busy processes.

    python -m benchmarks.busy benchmarks/results/cpu-busy.json

Contenders are processes that work by turns while the others sleep. A turn counts only if processes that are not ours took
less than a tenth of a core; otherwise it is repeated, and after some attempts the quietest counts.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_record
from benchmarks.same_batch import assemble_on_one_batch
from benchmarks.step import CPU, VOCABULARY, config_of
from benchmarks.turns import Peer, answers, note, say
from handgrad.machine import processor, threads
from handgrad.machine.devices import keep_freed_memory
from handgrad.run.resolve import resolve
from handgrad.settings import presets

TURNS, SECONDS, BUSY = 5, 1.5, 3
STRANGERS = 0.1  # cores
ATTEMPTS = 3
SETTINGS = {
    "torch's default": {},
    "handgrad's choice": threads.waiting(intel=processor.is_intel()),
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (1000, 3000, 10000)},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
MODELS = {"demo": list(SETTINGS), "d12": list(SETTINGS)[:3]}  # all contenders of a model stay in memory


def contend(model: str) -> None:
    """A contender's process: for each line on stdin, steps of that many seconds."""
    keep_freed_memory(CPU)
    pipe, done = answers(), 0
    config, vocabulary = (presets.demo(), 1024) if model == "demo" else (config_of(model, 4, 64, "fp32"), VOCABULARY)
    step = assemble_on_one_batch(resolve(config, vocabulary, device=CPU), vocabulary).stepper
    for line in sys.stdin:
        start, first = time.perf_counter(), done
        while done == first or time.perf_counter() - start < float(line):
            step.step(done)
            done += 1
        say(pipe, {"steps": done - first, "seconds": time.perf_counter() - start})


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """CPU time of the machine so far."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def quiet_turn(peer: Peer, ours: list[int]) -> tuple[float, float]:
    """Seconds per step, and cores that strangers took: of a turn without strangers, or of the quietest attempt."""
    attempts = []
    for _ in range(ATTEMPTS):
        start, before = time.perf_counter(), machine_seconds() - sum(map(cpu_seconds, ours))
        answer = peer.ask(str(SECONDS))
        strangers = machine_seconds() - sum(map(cpu_seconds, ours)) - before
        cores = max(0.0, strangers / (time.perf_counter() - start))
        attempts.append((cores, answer["seconds"] / answer["steps"]))
        if cores < STRANGERS:
            break
    cores, seconds = min(attempts)
    return seconds, cores


def measure(model: str, busy: int) -> dict[str, Any]:
    """Milliseconds per step of each setting, beside so many busy processes."""
    command = [sys.executable, "-m", "benchmarks.busy", "--contend", model]
    peers = {name: Peer(name, command, SETTINGS[name]) for name in MODELS[model]}
    for peer in peers.values():
        peer.ask("0.5")
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for turn in range(TURNS):
        for name, peer in peers.items():
            turns[name].append(quiet_turn(peer, [peer.process.pid, *(other.pid for other in others)]))
        note(f"{model} beside {busy}: turn {turn + 1} of {TURNS}")
    for other in others:
        other.kill()
        other.wait()
    for peer in peers.values():
        peer.close()
    rows = {}
    for name, found in turns.items():
        milliseconds = [1e3 * seconds for seconds, _ in found]
        rows[name] = {
            "step_ms": round(median(milliseconds), 1),
            "fastest_ms": round(min(milliseconds), 1),
            "slowest_ms": round(max(milliseconds), 1),
            "strangers_cores": round(median(cores for _, cores in found), 2),
        }
    return rows


def main(out: str) -> None:
    figures = {"demo": {"idle": measure("demo", 0), "busy": measure("demo", BUSY)}, "d12": {"idle": measure("d12", 0)}}
    print(json.dumps(figures, indent=1))
    settings = {"turns": TURNS, "seconds": SECONDS, "busy_processes": BUSY, "strangers": STRANGERS, "variables": SETTINGS}
    write_record(out, CPU, settings=settings, figures=figures)


if __name__ == "__main__":
    if sys.argv[1] == "--contend":
        contend(sys.argv[2])
    else:
        for name in (*threads.NUMBER, *threads.POLICY):
            os.environ.pop(name, None)
        main(sys.argv[1])
