"""Two source trees of handgrad on one GPU, alternating: training steps, generation, the time to step 1.

    python -m benchmarks.two_trees --trees OLD . --old-commit 62c5d08 --cases d12-bf16,d48-fp8,text

Each tree runs in its own process, which keeps its model on the GPU. The processes take turns of `SLICE_SECONDS` until each
has had `SECONDS`; while one works, the other waits. Both use the public Python API alone, the same data and settings.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SLICE_SECONDS, SECONDS = 8.0, 32.0
CASES: dict[str, dict[str, Any]] = {
    f"{model}-{precision}": {
        "model": model,
        "precision": precision,
        "sequence_length": 1024,
        "micro_batch": micro_batch,
        "tokens_per_step": micro_batch * 1024 * micro_steps,
    }
    for model, micro_batch, micro_steps in (("d12", 64, 2), ("d24", 32, 2), ("d36", 32, 1), ("d48", 16, 1))
    for precision in ("bf16", "fp8")
}
TEXT = "text"  # tokens per second of one text from a 124M model
NEVER = dict.fromkeys(("eval_every", "save_every", "gpu_every", "sample_tokens"), 0)


def text_rates(data: str, out: str) -> Iterator[float]:
    """Tokens per second of one text, for each line on stdin, which has seconds; a first value says that it is set up."""
    import handgrad

    if not Path(out).exists():
        settings = {**CASES["d12-bf16"], "micro_batch": 8, "tokens_per_step": 8192, "steps": 1, **NEVER}
        with handgrad.Training(data=data, out=out, quiet=True, **settings) as run:
            run.steps()
    model = handgrad.load(out, precision="bf16")
    model.generate("The", max_tokens=64)
    yield 0.0
    for seconds in map(float, sys.stdin):
        begun, tokens, seed = time.perf_counter(), 0, 0
        while time.perf_counter() - begun < seconds:
            seed += 1
            tokens += sum(1 for _ in model.stream("The", max_tokens=800, seed=seed, temperature=0))
        yield tokens / (time.perf_counter() - begun)


def step_rates(case: str, data: str, out: str) -> Iterator[float]:
    """The same of training steps."""
    import handgrad

    settings: dict[str, Any] = {**CASES[case], **NEVER, "steps": 100_000, "warmup_steps": 700, "learning_rate": 6e-4}
    run = handgrad.Training(data=data, out=out, quiet=True, **settings)
    run.steps(1)
    yield 0.0
    run.steps(3)  # captures
    for seconds in map(float, sys.stdin):
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            steps += len(run.steps(4))
        yield steps * CASES[case]["tokens_per_step"] / (time.perf_counter() - begun)


def worker(case: str, data: str, out: str) -> None:
    """A tree's process, which may import nothing from this one: answers when it is ready, then each line with a rate."""
    started, pipe = time.time(), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import handgrad

    rates = text_rates(data, out) if case == TEXT else step_rates(case, data, out)
    next(rates)
    print(json.dumps({"ready": time.time() - started, "package": handgrad.__file__}), file=pipe)
    for rate in rates:
        print(json.dumps({"rate": rate}), file=pipe)


def compare(case: str, trees: list[str], data: str, folder: Path) -> dict[str, Any]:
    """The rates of each tree in its turns, and the seconds from the start of its process to step 1."""
    from benchmarks.turns import Peer

    peers, ready = list[Peer](), []
    for number, tree in enumerate(trees):
        command = [sys.executable, str(Path(__file__).absolute()), "--worker", case, "--data", data]
        paths = os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])
        peers.append(Peer(tree, [*command, "--out", str(folder / f"{case}_{number}")], {"PYTHONPATH": paths}))
        first = peers[-1].answer()
        assert Path(first["package"]).is_relative_to(Path(tree)), f"{first['package']} is not of {tree}"
        ready.append(first["ready"])
    rates: list[list[float]] = [[] for _ in trees]
    for turn in range(round(SECONDS / SLICE_SECONDS) + 1):
        order = range(len(trees)) if turn % 2 == 0 else reversed(range(len(trees)))
        for number in order:
            rate = peers[number].ask(str(SLICE_SECONDS if turn else 3.0))["rate"]
            if turn:  # the first turn warms up
                rates[number].append(rate)
    for peer in peers:
        peer.end()
    means = [statistics.fmean(found) for found in rates]
    figures = {"case": case, "unit": "tokens/s", "rates": rates, "means": means, "ratio": means[-1] / means[0]}
    return {**figures, "seconds_to_step_1": ready}


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
        if parsed.record:  # after each case: a lent machine may go before the last
            write_record(parsed.record, torch.device("cuda"), old_commit=parsed.old_commit, rows=rows)


if __name__ == "__main__":
    main()
