"""DRAM and L2 traffic and instructions of every kernel type, counted on the GPU by NVIDIA's Nsight Compute.

    python -m benchmarks.nsight d12 --micro-batch 64       (the arguments of `handgrad profile`)

`ncu` runs the same command again for one micro-step and its update, whose operations lie in NVTX ranges, and renames each
kernel after the innermost range around its launch.
https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html
"""

import csv
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from handgrad.commands.arguments import parse as parse_arguments
from handgrad.commands.profile import tokens_of
from handgrad.errors import HandgradError, UsageError
from handgrad.machine import devices
from handgrad.run.assemble import allocate, bind
from handgrad.settings.config import RunConfig, check
from handgrad.tools.profile import set_up
from handgrad.tools.recorder import OTHER, PREFIX, Recorder
from handgrad.training.feed import Source

# Sums over the launches of a kernel type: bytes, warp instructions, and "launches".
Traffic = Counter[str]
# Column of the raw page: its sum in `Traffic`.
METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "lts__t_bytes.sum": "l2",
    "smsp__inst_executed.sum": "instructions",
}
FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # of units like Kbyte and Minst
DEFAULT_PATH = Path("/usr/local/cuda/bin/ncu")
INSIDE = "--inside-ncu"  # the command that ncu starts


def find_ncu() -> str:
    found = shutil.which("ncu") or (str(DEFAULT_PATH) if DEFAULT_PATH.exists() else None)
    if found is None:
        raise UsageError("ncu is not installed; it comes with the CUDA toolkit (nsight-compute)")
    return found


def run_ncu(arguments: Sequence[str]) -> list[str]:
    """Runs one micro-step of `handgrad profile ARGUMENTS` under ncu; returns the lines of the table."""
    command = [find_ncu(), "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--nvtx", "--print-nvtx-rename", "kernel", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.nsight", INSIDE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    try:
        return table(parse(done.stdout))
    except UsageError as error:
        output = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in output if "==ERROR==" in line or line.startswith("handgrad: ")] or output or ["nothing"]
        raise UsageError(f"{error}; it printed: {errors[0].removeprefix('handgrad: ')}") from None


def parse(text: str) -> dict[str, Traffic]:
    """The kernels of a raw page in CSV by type: a line of names, a line of units, a line per kernel.

    ncu's own lines (`==PROF== ...`) and the program's output may precede them. A kernel's type is the last of our range
    names on its line, where the innermost range comes last; without one it is "other".
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise UsageError("ncu counted no kernel")
    names, units, *kernels = csv.reader(line for line in lines[start:] if line.startswith('"'))
    missing = [name for name in METRICS if name not in names]
    if missing:
        raise UsageError(f"ncu did not count {', '.join(missing)}")
    columns = {names.index(name): field for name, field in METRICS.items()}
    found: dict[str, Traffic] = defaultdict(Traffic)
    for cells in kernels:
        kinds = re.findall(rf"{PREFIX}([\w ,]+)", "\n".join(cells[: min(columns)]))
        row = found[kinds[-1].strip() if kinds else OTHER]
        row["launches"] += 1
        for column, field in columns.items():
            factor = FACTORS[re.sub(r"(byte|inst)$", "", units[column])]
            row[field] += round(float(cells[column].replace(",", "")) * factor)
    return dict(found)


def table(found: dict[str, Traffic]) -> list[str]:
    """A row per kernel type in means per launch, the largest total DRAM traffic first, and a row of sums."""
    head = f"{'per launch':<32}{'launches':>9}{'DRAM MB read':>14}{'written':>10}{'L2 MB':>10}{'instructions':>14}"
    largest_first = sorted(found.items(), key=lambda item: -item[1]["dram_read"] - item[1]["dram_written"])
    rows = [line(kind, row, row["launches"]) for kind, row in largest_first]
    return [head, *rows, line("sum of all launches", sum(found.values(), Traffic()), 1)]


def line(kind: str, row: Traffic, launches: int) -> str:
    read, written, l2, instructions = (row[name] / launches / 1e6 for name in METRICS.values())
    return f"{kind:<32}{row['launches']:>9}{read:>14.2f}{written:>10.2f}{l2:>10.2f}{f'{instructions:.3f}M':>14}"


def one_micro_step(config: RunConfig, vocab_size: int, source: Source) -> None:
    """The step for `ncu`: after one that loads everything, a single micro-batch, its operations in ranges."""
    config = replace(config, tokens_per_step=config.micro_batch * config.sequence_length, batch_schedule="", lanes=1)
    design = set_up(config, vocab_size)
    device, (state, scaling) = design.device, allocate(design)
    recorder = Recorder(design, state.plain_weights.head, torch.cuda.nvtx.range)
    stepper = bind(state, scaling, source, graphs=False).stepper
    with recorder.recording():
        stepper.step(0)
        devices.synchronize(device)
        torch.cuda.profiler.start()
        stepper.step(1)
        devices.synchronize(device)
        torch.cuda.profiler.stop()


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] != [INSIDE]:
            print("\n".join(run_ncu(arguments)))
            return 0
        parsed = parse_arguments("profile", arguments[1:])
        config = check(parsed.run_config)
        config, source, vocab_size, _ = tokens_of(config, parsed.vocab_size, wanted=parsed.data is not None)
        one_micro_step(config, vocab_size, source)
    except HandgradError as error:
        print(f"handgrad: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
