"""Whole training steps of handgrad and of the tuned twin on one GPU, alternating: speed, power, memory, time to step 1.

An H200 trains against its power limit, so a measurement needs sustained load: contenders alternate in slices of many
seconds until each has had its time. All contenders stay in memory and sleep while another works.

    handgrad bench step --device cuda
"""

import contextlib
import dataclasses
import importlib.util
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import HandgradRun, Settings, TwinRun, tokens_of
from benchmarks.peer_programs import ProgramRun
from benchmarks.record import rounded, version, write_record
from benchmarks.turns import Peer, PeerFailed, Run, answers, contend, note
from benchmarks.twin_switches import ATTENTIONS, OPTIONS, check_libraries, switches_of
from handgrad.errors import UsageError
from handgrad.machine import devices
from handgrad.names import nearest_name
from handgrad.settings.config import PRECISIONS, check

# "handgrad" computes in --precision, "handgrad-PRECISION" in another. Also with a precision behind it: "handgrad-gpt2" is
# GPT-2 of a modern network's sizes, "handgrad-adamw" the model itself with AdamW in the place of Muon.
SAME_SIZE, ADAMW = "handgrad-gpt2", "handgrad-adamw"
BASES = ("handgrad", SAME_SIZE, ADAMW)
LLMC = "llmc"  # the program, from its sources
FP8_BLOCKS = "handgrad-fp8-blocks"  # fp8, the loss head's GEMMs in bf16
HANDGRADS = (*(f"{base}{end}" for base in BASES for end in ("", *(f"-{p}" for p in PRECISIONS))), FP8_BLOCKS)
# The fastest twin of all sizes on one H200, with Liger's head where Liger is installed.
FASTEST_TWIN = "twin-cudnn+stream+regional"

WARM_UP_SECONDS = 3.0  # per contender, not counted: clocks fall within a second of load

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")

GIB = 2**30


def default_contenders() -> str:
    liger = "+liger" if importlib.util.find_spec("liger_kernel") else ""
    return f"handgrad,{FASTEST_TWIN}{liger}"


def precision_of(name: str, settings: Settings) -> str:
    """The precision of most of a contender's GEMMs."""
    if switches := switches_of(name):
        return switches.precision
    if name == LLMC:
        return "bf16"
    if name == FP8_BLOCKS:
        return "fp8"
    base = max((base for base in BASES if name.startswith(base)), key=len)
    return name.removeprefix(base).removeprefix("-") or settings.precision


def make_run(name: str, settings: Settings) -> Run:
    """A contender, in its own process."""
    config, tokens = settings.config(), tokens_of(settings)
    if switches := switches_of(name):
        return TwinRun(config, tokens, dataclasses.replace(switches, compiled=config.device == "cuda"))
    if name == LLMC:
        return ProgramRun(name, config, tokens)
    if name.startswith(SAME_SIZE):
        heads = max(1, config.channels // 64)
        config = dataclasses.replace(config, architecture="gpt2", optimizer="adamw", num_heads=heads)
    if name.startswith(ADAMW):
        config = dataclasses.replace(config, optimizer="adamw")
    if name == FP8_BLOCKS:
        config = dataclasses.replace(config, fp8_head="none")
    backend = "kernels" if config.device == "cuda" else "auto"
    return HandgradRun(check(dataclasses.replace(config, precision=precision_of(name, settings))), tokens, backend=backend)


def command(name: str, settings: Settings) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_step", name, settings.to_json()]


def check_contenders(text: str) -> list[str]:
    """The names in a comma-separated list; raises `UsageError` for an unknown one."""
    twins = [f"twin-{attention}" for attention in ATTENTIONS]
    known = f"{', '.join((*HANDGRADS, LLMC, *twins))}, and behind a twin's name +{' +'.join(OPTIONS)}"
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*HANDGRADS, LLMC) and switches_of(name) is None:
            nearest = nearest_name(name.split("+")[0], [*HANDGRADS, *twins])
            raise UsageError(f"unknown contender {name!r}{nearest}; known: {known}")
    if not names:
        raise UsageError(f"--contenders is empty; known: {known}")
    return names


def used_bytes(device: torch.device) -> int:
    """The driver's count of used bytes of the device, by all processes together; 0 without such a driver."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def started(name: str, line: list[str], folder: Path, row: dict[str, Any], *, twice: bool) -> Peer:
    """Starts a contender with empty kernel caches and, if `twice`, again with full ones; the last stays. Raises
    `PeerFailed`."""
    environment = {}
    for variable in CACHES:
        cache = folder / name / variable.lower()
        cache.mkdir(parents=True)
        environment[variable] = str(cache)
    for caches in ("cold", "warm") if twice else ("cold",):
        peer = Peer(name, line, environment)
        try:
            row["first_loss"] = peer.answer()["loss"]
        except PeerFailed:
            peer.close()
            raise
        row[f"first_step_{caches}_seconds"] = peer.elapsed_seconds()
        note(f"{name}: step 1 after {row[f'first_step_{caches}_seconds']:.1f} s, kernel caches {caches}")
        if twice and caches == "cold":
            peer.close()
    return peer


def measure(
    commands: dict[str, list[str]],
    seconds: float,
    turn_seconds: float,
    device: torch.device,
    *,
    twice: bool = True,
    single_steps: int = 0,
) -> dict[str, Any]:
    """Starts all contenders, alternates between them and returns a row of raw figures for each. A failing one leaves the
    field, with its reason in the row. `single_steps` behind the first come one by one, untimed, for their `losses`.

    While one starts or works, the others sleep, so the growth of the device's memory belongs to that one.
    """
    rows: dict[str, dict[str, Any]] = {name: {"turns": []} for name in commands}
    peers: dict[str, Peer] = {}
    rounds = math.ceil(seconds / turn_seconds)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        for name, line in commands.items():
            before = used_bytes(device)
            try:
                peers[name] = started(name, line, Path(folder), rows[name], twice=twice)
                if single_steps:
                    followed = [peers[name].ask("go 0")["loss"] for _ in range(single_steps)]
                    rows[name]["losses"] = [rows[name]["first_loss"], *followed]
            except PeerFailed as failure:
                rows[name]["failed"] = str(failure)
                note(f"{name}: {failure}")
                continue
            stack.callback(peers[name].close)
            rows[name]["driver_bytes"] = used_bytes(device) - before
        for turn in range(rounds + 1):  # the first is the warm-up
            length = turn_seconds if turn else min(WARM_UP_SECONDS, turn_seconds)
            for name in [name for name in peers if "failed" not in rows[name]]:
                before = used_bytes(device)
                try:
                    answer = peers[name].ask(f"go {length}")
                except PeerFailed as failure:
                    rows[name]["failed"] = str(failure)
                    note(f"{name}: {failure}")
                    peers[name].close()
                    continue
                rows[name]["driver_bytes"] += used_bytes(device) - before
                if turn:
                    rows[name]["turns"].append(answer)
                    note(f"turn {turn} of {rounds}: {name}, {answer['steps'] / answer['seconds']:.3f} steps/s")
    return rows


def figures(row: dict[str, Any], tokens_per_step: int, flops: float, peak: float | None) -> dict[str, Any]:
    """The figures of one contender from its turns; `flops` per token, `peak` in FLOP/s, bf16's for all."""
    turns, driver_bytes = row.pop("turns"), row.pop("driver_bytes", 0)
    if "failed" in row or not turns:
        return row
    seconds = sum(turn["seconds"] for turn in turns)
    tokens = tokens_per_step * sum(turn["steps"] for turn in turns)
    power = [turn["power"] for turn in turns if turn["power"] is not None]
    energies = [sample["joules"] for sample in power if sample["joules"] is not None]
    joules = sum(energies) if len(energies) == len(turns) else None
    clocks = [sample["sm_megahertz"]["mean"] for sample in power if sample["sm_megahertz"]]
    return {
        **row,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_by_turn": [tokens_per_step * turn["steps"] / turn["seconds"] for turn in turns],
        "milliseconds_per_step": 1e3 * seconds * tokens_per_step / tokens,
        "mfu": tokens / seconds * flops / peak if peak else None,
        "gflop_per_second": tokens / seconds * flops / 1e9,
        "seconds": seconds,
        "steps": tokens // tokens_per_step,
        "mean_watts": joules / seconds if joules is not None else None,
        "mean_sm_megahertz": sum(clocks) / len(clocks) if clocks else None,
        "millijoules_per_token": 1e3 * joules / tokens if joules is not None else None,
        "allocated_gib": in_gib(turns[-1]["allocated_bytes"]),
        "reserved_gib": in_gib(turns[-1]["reserved_bytes"]),
        "driver_gib": in_gib(driver_bytes or None),
        "last_loss": turns[-1]["loss"],
        "power_by_turn": power,
    }


def in_gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def best_twin(rows: dict[str, Any]) -> str | None:
    """The fastest contender that is not handgrad."""
    done = {name: row["tokens_per_second"] for name, row in rows.items() if "tokens_per_second" in row}
    twins = {name: speed for name, speed in done.items() if not name.startswith("handgrad")}
    return max(twins, key=lambda name: twins[name]) if twins else None


def add_times_best_twin(rows: dict[str, Any]) -> str | None:
    """Adds to each row its speed over that of the fastest twin, and returns that."""
    twin = best_twin(rows)
    for row in rows.values():
        if twin and "tokens_per_second" in row:
            row["times_best_twin"] = row["tokens_per_second"] / rows[twin]["tokens_per_second"]
    return twin


NAME_WIDTH = 35

# Heading, width, key, format.
COLUMNS = (
    ("tok/s", 9, "tokens_per_second", ".0f"),
    ("MFU", 7, "mfu", ".1%"),
    ("ms/step", 9, "milliseconds_per_step", ".2f"),
    ("W", 6, "mean_watts", ".0f"),
    ("MHz", 6, "mean_sm_megahertz", ".0f"),
    ("mJ/tok", 8, "millijoules_per_token", ".3f"),
    ("alloc", 7, "allocated_gib", ".1f"),
    ("reserv", 7, "reserved_gib", ".1f"),
    ("driver", 7, "driver_gib", ".1f"),
    ("cold s", 7, "first_step_cold_seconds", ".1f"),
    ("warm s", 7, "first_step_warm_seconds", ".1f"),
    ("x twin", 7, "times_best_twin", ".3f"),
)


def table(rows: dict[str, Any]) -> list[str]:
    """The lines to print; memory in GiB, '-' for a missing figure."""
    lines = [f"{'':<{NAME_WIDTH}}" + "".join(f"{heading:>{width}}" for heading, width, _, _ in COLUMNS)]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"{name:<{NAME_WIDTH}} failed: {row['failed']}")
            continue
        cells = (f"{'-' if row.get(key) is None else format(row[key], shape):>{width}}" for _, width, key, shape in COLUMNS)
        lines.append(f"{name:<{NAME_WIDTH}}" + "".join(cells))
    return lines


def libraries() -> dict[str, Any]:
    """Versions of the libraries beside torch."""
    installed = {name: version(name) for name in ("triton", "torchao", "liger-kernel")}
    return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), **installed}


def compare(
    settings: Settings, contenders: str, seconds: float, turn_seconds: float, out: str, *, starts: int = 2
) -> dict[str, Any]:
    """Measures, prints the table, writes the record to `out` if that is not empty; returns the figures by contender."""
    names = check_contenders(contenders)
    for switches in map(switches_of, names):
        if switches is not None:
            check_libraries(switches)
    device = devices.resolve_device(settings.device)
    config, tokens = settings.config(), tokens_of(settings)
    raw = measure({name: command(name, settings) for name in names}, seconds, turn_seconds, device, twice=starts > 1)
    shape = config.shape(tokens.vocab_size)
    flops, peak = shape.flops_per_token, devices.peak_flops(device)
    rows = {
        name: {"precision": precision_of(name, settings), **figures(row, config.tokens_per_step, flops, peak)}
        for name, row in raw.items()
    }
    twin = add_times_best_twin(rows)
    print(
        f"\n{settings.model}, steps of {settings.micro_steps} x {settings.micro_batch} x {settings.sequence_length} tokens"
        f" ({tokens.words}), {devices.describe(device)}, {seconds:g} s each in slices of {turn_seconds:g} s; GiB\n"
    )
    print("\n".join(table(rows)))
    for name in (name for name in rows if twin and name in HANDGRADS and "times_best_twin" in rows[name]):
        print(f"\n{name} / best twin ({twin}): {rows[name]['times_best_twin']:.3f}")
    if out:
        described = {**dataclasses.asdict(settings), "seconds": seconds, "turn_seconds": turn_seconds}
        counted = {"flops_per_token": flops, "peak_flop_per_second": peak}
        write_record(
            out, device, settings=described, tokens=tokens.words, libraries=libraries(), **counted, figures=rounded(rows)
        )
    return rows


if __name__ == "__main__":
    _name, _settings = sys.argv[1], Settings.from_json(sys.argv[2])
    _pipe = answers()
    contend(lambda: make_run(_name, _settings), devices.resolve_device(_settings.device), sys.stdin, _pipe)
