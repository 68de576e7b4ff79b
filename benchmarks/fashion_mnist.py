"""Fashion-MNIST: a model of grey pixels, autoencoders with FSQ and with a learned codebook, a model of FSQ's codes.

    python -m benchmarks.fashion_mnist FOLDER_OF_IDX_FILES --out benchmarks/results/h200-fashion-mnist.json

The pictures are Debian's package dataset-fashion-mnist (Xiao et al. 2017, https://arxiv.org/abs/1708.07747): 70,000 of
28 x 28, of which prepare holds out one in twenty. Sheets of samples lie beside the record.
"""

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, keep_commit, rounded, run_main, write_record
from benchmarks.run_record import lines_of, seconds_in_steps
from handgrad.machine import devices

PIXELS, CODES, BYTES = 28 * 28 + 1, 7 * 7 + 1, 3 * 28 * 28  # tokens of a row
RUNS = {  # data and settings
    "pixels": ("pixels", f"m6 --sequence-length {PIXELS} --micro-batch 64 --tokens-per-step {64 * PIXELS} --steps 5000"),
    "fsq": ("bytes", "vqvae --vqvae size=28x28"),
    "codebook": ("bytes", "vqvae --vqvae size=28x28,codebook=1000"),
    "codes": ("codes", f"m6 --sequence-length {CODES} --micro-batch 512 --tokens-per-step {512 * CODES} --steps 1500"),
}
AUTOENCODER = (
    f" --sequence-length {BYTES} --micro-batch 64 --tokens-per-step {64 * BYTES} --steps 3000 --learning-rate 1e-3"
)
TRIAL = " --micro-batch 4 --steps 3"  # every line, in minutes on a CPU
LINE = re.compile(r"^(pictures|squared error|codes|loss|pixels|classes) +(.*)$", re.MULTILINE)  # of `evaluate`
NUMBER = re.compile(r"(?<![\w-])\d+(?:\.\d+)?")  # without a sign


class Commands:
    def __init__(self, work: Path, log: Path):
        self.work, self.log = work, log

    def run(self, command: str) -> str:
        """The output of `handgrad COMMAND`; raises `SystemExit` if it fails."""
        print(f"handgrad {command}", flush=True)
        words = [sys.executable, "-m", "handgrad", *shlex.split(command)]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with self.log.open("a") as log:
            log.write(f"\n$ {command}\n{done.stdout}")
        if done.returncode:
            raise SystemExit(f"handgrad {command} ended with {done.returncode}: {done.stdout[-2000:]}")
        return done.stdout

    def figures(self, name: str) -> dict[str, Any]:
        """The figures that `evaluate` prints for a run, and its speed."""
        lines = lines_of(self.work / name)
        told = self.run(f"evaluate {self.work}/{name} --micro-batch 64")
        return {
            "parameters": lines["run"][0]["parameters"],
            "steps": len(lines["step"]),
            "seconds_in_steps": seconds_in_steps(lines),
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines["step"]),
            "evaluated": {label: [*map(float, NUMBER.findall(rest))] for label, rest in LINE.findall(told)},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", help="folder of the .gz files")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "fashion", metavar="FOLDER", help="a new one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--documents", type=int, default=0, help="at most so many pictures (0: all)")
    parser.add_argument("--only", choices=("pixels", "fsq", "codebook"), help="one of the runs")
    parser.add_argument("--steps", type=int, metavar="N", help="of each run (other numbers by default)")
    parser.add_argument("--trial", action="store_true", help="three steps of each run")
    options = parser.parse_args()
    keep_commit()
    options.work.mkdir(parents=True)
    commands, figures, work = Commands(options.work, options.out.with_suffix(".log")), dict[str, Any](), options.work
    rest = f"--size 28 --documents {options.documents}"
    runs = {name: run for name, run in RUNS.items() if options.only in (None, name)}
    for data, codes in (("pixels", "palette:32"), ("bytes", "rgb"), ("codes", f"{work}/fsq")):
        if data not in (of for of, _ in runs.values()):
            continue
        began = time.monotonic()
        commands.run(f"prepare --images {options.pictures} --codes {codes} {rest} --out {work}/shards-{data}")
        figures[f"prepare {data}"] = {"seconds": round(time.monotonic() - began, 1)}
        for name, (of, settings) in runs.items():
            if of != data:
                continue
            settings += AUTOENCODER if of == "bytes" else ""
            settings += f" --steps {options.steps}" if options.steps else ""
            short = (
                f"{TRIAL} --tokens-per-step {4 * {'pixels': PIXELS, 'bytes': BYTES, 'codes': CODES}[of]}" * options.trial
            )
            few = "--eval-every 500 --eval-tokens 300000 --save-every 0 --sample-every 0"
            commands.run(
                f"train {settings}{short} {few} --device {options.device} --data {work}/shards-{of} --out {work}/{name}"
            )
            figures[name] = commands.figures(name)
            sheet = options.out.with_name(f"{options.out.stem}-{name}.png")
            if of == "bytes":
                drawn = max((work / name / "samples").glob("*.png"))
                sheet.write_bytes(drawn.read_bytes())
            else:
                commands.run(f"sample {work}/{name} --samples 40 --batch 40 --temperature 1 --image-out {sheet}")
            device = devices.resolve_device(options.device)
            write_record(options.out, device, what=__doc__.split("\n")[0], figures=rounded(figures))


if __name__ == "__main__":
    run_main(main)
