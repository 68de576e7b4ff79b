"""Two source trees of handgrad on one GPU, alternating: training steps, generation, the time to step 1.

    python -m benchmarks.two_trees --trees OLD . --old-commit 62c5d08 --cases d12-bf16,d48-fp8,text

Each tree runs in its own process, which keeps its model on the GPU. The processes take turns of `SLICE_SECONDS` until each
has had `SECONDS`; while one works, the other waits. Both use the public Python API alone, the same data and settings.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SLICE_SECONDS, SECONDS = 8.0, 32.0
CASES: dict[str, dict[str, Any]] = {
    f"{model}-{precision}": {
        "model": model,
        "precision": precision,
        "micro_batch": micro_batch,
        "tokens_per_step": micro_batch * 1024 * micro_steps,
    }
    for model, micro_batch, micro_steps in (("d12", 64, 2), ("d24", 32, 2), ("d36", 32, 1), ("d48", 16, 1))
    for precision in ("bf16", "fp8")
}
TEXT = "text"  # tokens per second of one text from a 124M model


def worker(case: str, data: str, out: str) -> None:
    """Sets a case up, says so, then does a turn for every line on stdin: the seconds to work."""
    started = time.time()
    import handgrad

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    if case == TEXT:
        settings = {
            **CASES["d12-bf16"],
            "steps": 1,
            "eval_every": 0,
            "sample_tokens": 0,
            "micro_batch": 8,
            "tokens_per_step": 8192,
        }
        if not Path(out).exists():
            with handgrad.Training(data=data, out=out, quiet=True, **settings) as run:
                run.steps()
        model = handgrad.load(out, precision="bf16")
        model.generate("The", max_tokens=64)
        say(ready=time.time() - started, package=handgrad.__file__)
        for line in sys.stdin:
            begun, tokens, seed = time.perf_counter(), 0, 0
            while time.perf_counter() - begun < float(line):
                seed += 1
                tokens += sum(1 for _ in model.stream("The", max_tokens=800, seed=seed, temperature=0))
            say(rate=tokens / (time.perf_counter() - begun))
        return
    never = dict.fromkeys(("eval_every", "save_every", "gpu_every", "sample_tokens"), 0)
    settings: dict[str, Any] = {**CASES[case], **never, "steps": 100_000}
    run = handgrad.Training(data=data, out=out, quiet=True, warmup_steps=700, learning_rate=6e-4, **settings)
    run.steps(1)
    say(ready=time.time() - started, package=handgrad.__file__)
    run.steps(3)  # captures
    for line in sys.stdin:
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < float(line):
            steps += len(run.steps(4))
        say(rate=steps * CASES[case]["tokens_per_step"] / (time.perf_counter() - begun))


def compare(case: str, trees: list[str], data: str, folder: Path) -> dict[str, Any]:
    """The rates of each tree in its turns, and the seconds from the start of its process to step 1."""
    processes, ready = [], []
    for number, tree in enumerate(trees):
        command = [sys.executable, str(Path(__file__).absolute()), "--worker", case, "--data", data]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])}
        out = str(folder / f"{case}_{number}")
        process = subprocess.Popen(
            [*command, "--out", out], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        processes.append(process)
        first = reply(process)
        assert Path(first["package"]).is_relative_to(Path(tree)), f"{first['package']} is not of {tree}"
        ready.append(first["ready"])
    rates: list[list[float]] = [[] for _ in trees]
    for turn in range(round(SECONDS / SLICE_SECONDS) + 1):
        order = range(len(trees)) if turn % 2 == 0 else reversed(range(len(trees)))
        for number in order:
            stdin = processes[number].stdin
            assert stdin is not None
            stdin.write(f"{SLICE_SECONDS if turn else 3.0}\n")
            stdin.flush()
            rate = reply(processes[number])["rate"]
            if turn:  # the first turn warms up
                rates[number].append(rate)
    for process in processes:
        process.kill()
        process.wait()
    means = [statistics.fmean(found) for found in rates]
    return {
        "case": case,
        "unit": "tokens/s",
        "rates": rates,
        "means": means,
        "ratio": means[-1] / means[0],
        "seconds_to_step_1": ready,
    }


def reply(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a worker ended with {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--old-commit", default="", help="the commit of OLD, for the record")
    parser.add_argument("--cases", default=",".join([*CASES, TEXT]))
    parser.add_argument("--data", default="shards")
    parser.add_argument("--record", metavar="FILE", help="write the figures, with machine and versions, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.worker:
        worker(parsed.worker, parsed.data, parsed.out)
        return
    import tempfile

    import torch

    from benchmarks.record import write_record

    trees = [str(Path(tree).absolute()) for tree in parsed.trees]
    rows = []
    for case in parsed.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(case, trees, str(Path(parsed.data).absolute()), Path(folder)))
        row = rows[-1]
        old, new = row["means"]
        begun = " and ".join(f"{seconds:.1f}" for seconds in row["seconds_to_step_1"])
        print(f"{case:<10} {old:12.0f} {new:12.0f} tokens/s  {row['ratio']:.4f}   to step 1: {begun} s", flush=True)
    if parsed.record:
        write_record(parsed.record, torch.device("cuda"), old_commit=parsed.old_commit, rows=rows)


if __name__ == "__main__":
    main()
