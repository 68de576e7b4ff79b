r"""A run on several ranks that faults of all kinds hit until it is finished, compared bit by bit with an undisturbed one.

    python -m benchmarks.chaos --minutes 60 --ranks 2 --log benchmarks/results/cpu-chaos.log \
        --record benchmarks/results/cpu-chaos.json

The same command is started again after each fault, as by a scheduler. A seed gives the same kinds of faults at the same
steps, bytes and calls again. The number of steps follows from the minutes and from this machine's speed, measured first;
nothing else depends on time. Ends with 1 at the first thing that is not as it should be, and leaves the runs for a look.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import keep_commit, write_record
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import INTERRUPTED
from handgrad.storage import checkpoint
from tests.conftest import write_text
from tests.distributed.runs import Launcher, Started, arguments, same_run
from tests.faults import moments

SETTINGS = {
    "lanes": 2,
    "tokens_per_step": 128,
    "save_every": 10,
    "keep_checkpoints": 4,
    "eval_every": 50,
    "eval_tokens": 256,
    "sample_every": 100,
    "sample_tokens": 8,
    "check_ranks_every": 10,
    "silence_seconds": 20,
    "stall_seconds": 60,
    "join_seconds": 120,
    "log_every": 1000,
}
MEASURED_STEPS = (50, 500)
SECONDS_BETWEEN = 8.0  # of work between two faults, about
SECONDS_OF_FAULT = 6.0  # to notice it, to end and to start again, about
MOST_FAULTS = 240  # so that the log can be read
LIMIT_SECONDS = 900.0  # without a step: something hangs
POLL_SECONDS = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
RELAUNCH, KILLED = 75, -signal.SIGKILL


class Failed(Exception):
    """The run is not as it should be."""


@dataclass
class Chaos:
    """The run and its faults so far."""

    launcher: Launcher
    run: Path
    data: Path
    command: list[str]
    ranks: int
    seed: int
    gap: int  # steps between two faults, on average
    say: Callable[[str], None]
    starts: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    size_bytes: int = 1 << 20  # of a checkpoint

    def start(self, fault: str = "none") -> Started:
        self.starts += 1
        return self.launcher.start(self.ranks, self.command, fault)

    @property
    def step(self) -> int:
        """The last one in the record."""
        with contextlib.suppress(OSError), (self.run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            for line in reversed(file.read().split(b"\n")):
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and record.get("kind") == "step":
                        return record["step"]
        return 0

    def wait_for(self, started: Started, step: int) -> None:
        """Until the record has this step, or all have ended."""
        last, since = self.step, time.monotonic()
        while (now := self.step) < step and any(rank.code is None for rank in started.ranks):
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > LIMIT_SECONDS:
                raise Failed(f"no step for {LIMIT_SECONDS:.0f} s\n{started.errors}")
            time.sleep(POLL_SECONDS)

    # Faults of files, while nobody trains.

    def checkpoints(self) -> list[Path]:
        return checkpoint.folders(self.run / "checkpoints")

    def damage(self, dice: random.Random) -> str:
        """Damages a file and returns a line about it; with few checkpoints, which it could lose all, does nothing: ""."""
        kind = dice.choice(["", "", "flip", "flip", "remove", "cut record", "cut record", "flip data"])
        if kind == "flip data":
            return self.flip_data(dice)
        if kind == "cut record":
            return self.cut_record(dice)
        if not kind or len(self.checkpoints()) < 3:
            return ""
        path = dice.choice(sorted(self.checkpoints()[0].iterdir()))
        where = path.relative_to(self.run / "checkpoints")
        if kind == "remove":
            path.unlink()
            return f"removed {where}"
        place = flip(path, dice)
        return f"flipped bit {place} of {where}"

    def flip_data(self, dice: random.Random) -> str:
        """A damaged shard ends the next start; then it is restored."""
        path = self.data / "train_000000.bin"
        whole = path.read_bytes()
        place = flip(path, dice)
        started = self.start()
        codes = started.wait(LIMIT_SECONDS)
        path.write_bytes(whole)
        if codes != [65] * self.ranks or not any(path.name in line for rank in started.ranks for line in rank.told):
            raise Failed(f"a flipped bit in {path.name}: {codes}\n{started.errors}")
        return f"flipped bit {place} of {path.name}: refused with 65, then restored"

    def cut_record(self, dice: random.Random) -> str:
        """As a power cut leaves it: lines after the newest checkpoint may not have reached the disk."""
        newest, path = self.checkpoints()[:1], self.run / "metrics.jsonl"
        content = path.read_bytes() if path.exists() else b""
        mark = b'{"kind": "save", "step": %d,' % checkpoint.step_of(newest[0]) if newest else b"{"
        if mark not in content:
            return ""
        kept = content.index(b"\n", content.rindex(mark)) + 1
        size = dice.randint(kept, len(content))
        os.truncate(path, size)
        return f"cut {len(content) - size} bytes of metrics.jsonl" if size < len(content) else ""

    # Faults while it trains: each returns the text for the log and the exit codes that may follow.

    def strike(self, number: int, dice: random.Random) -> tuple[str, Started, str, set[int]]:
        """(kind, the start that was hit, where, exit codes that may follow). The start may have come to its end before."""
        turn = random.Random(f"{self.seed} round {number // len(KINDS)}").sample(list(KINDS), len(KINDS))
        kind = turn[number % len(KINDS)]  # each once before any comes again
        step = self.step + dice.randint(1, 2 * self.gap)
        saves = dice.randint(1, max(1, self.gap // SETTINGS["save_every"]))
        fault, codes = KINDS[kind](dice, self, saves)
        if fault:
            started = self.start(fault)
            while not any(started.fired) and any(rank.code is None for rank in started.ranks):
                self.wait_for(started, self.step + 1)
            self.wait_for(started, self.step + 2 * self.gap)  # one that does not end the run: a removal that failed
            if any(rank.code is None for rank in started.ranks):
                self.send(started, signal.SIGTERM, range(self.ranks))
            return kind, started, fault, codes
        started = self.start()
        self.wait_for(started, step)
        return kind, started, self.hit(kind, started, dice), codes

    def hit(self, kind: str, started: Started, dice: random.Random) -> str:
        """A fault from outside."""
        rank = dice.randrange(self.ranks)
        if kind == "two trainers":
            second = self.start()
            codes = second.wait(LIMIT_SECONDS)
            if codes != [78] * self.ranks and any(rank.code is None for rank in started.ranks):
                raise Failed(f"a second trainer: {codes}\n{second.errors}")
            self.wait_for(started, self.step + self.gap)
            self.send(started, signal.SIGKILL, range(self.ranks))
            return f"the second: exit codes {codes}; then all were killed"
        number = dice.choice(SIGNALS)
        if kind == "signal":
            to = dice.choice([range(self.ranks), [rank]])
            self.send(started, number, to)
            return f"{number.name} to {'all' if len(to) > 1 else f'rank {rank}'}"
        if kind == "stop":
            self.send(started, signal.SIGSTOP, [rank])
            self.wait_without(started, rank)
            self.send(started, signal.SIGKILL, [rank])
            return f"SIGSTOP to rank {rank}, SIGKILL once the others had ended"
        whom = [rank] if kind == "kill" else range(self.ranks)
        self.send(started, signal.SIGKILL, whom)
        return f"SIGKILL to {'all' if len(whom) > 1 else f'rank {rank}'}"

    def wait_without(self, started: Started, stopped: int) -> None:
        begun = time.monotonic()
        while any(one.code is None for rank, one in enumerate(started.ranks) if rank != stopped):
            if time.monotonic() - begun > LIMIT_SECONDS:
                raise Failed(f"nobody noticed that rank {stopped} was stopped\n{started.errors}")
            time.sleep(POLL_SECONDS)

    def send(self, started: Started, number: int, ranks: Any) -> None:
        for rank in ranks:
            if started.ranks[rank].code is None and (pid := started.ranks[rank].number("pid")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def leg(self, number: int) -> bool:
        """A fault and a start. Returns True once the run is finished."""
        dice = random.Random(f"{self.seed} {number}")
        if done := self.damage(dice):
            self.counts["file"] += 1
            self.say(f"{number:>4}  step {self.step:>6}  file: {done}")
        kind, started, where, expected = self.strike(number, dice)
        codes = started.wait(LIMIT_SECONDS)
        told = [line.removeprefix("handgrad: ") for rank in started.ranks for line in rank.told]
        finished = codes == [0] * self.ranks
        # A busy machine may be taken for a lost rank: the run says so, and goes on. At the very end a rank may be done (0).
        if not finished and not set(codes) <= {*expected, RELAUNCH, 0}:
            raise Failed(f"{kind}, {where}: exit codes {codes}, expected {sorted(expected)}\n{started.errors}")
        if any("Traceback" in rank.errors for rank in started.ranks):
            raise Failed(f"{kind}, {where}: a traceback\n{started.errors}")
        if finished:
            self.say(f"{number:>4}  step {self.step:>6}  finished before the next fault ({kind}, {where})")
        else:
            self.counts[kind] += 1
            said = told[0] if told else "nothing"
            self.say(f"{number:>4}  step {self.step:>6}  {kind}: {where}; exit codes {codes}; said: {said}"[:400])
        return finished


def flip(path: Path, dice: random.Random) -> int:
    """Flips a random bit; returns its number."""
    content = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def in_saves(kind: str, *codes: int) -> Callable[..., tuple[str, set[int]]]:
    """A fault at a random moment of the next few saves."""

    def fault(dice: random.Random, chaos: Chaos, saves: int) -> tuple[str, set[int]]:
        byte = dice.randrange(chaos.size_bytes * saves)
        at_operation = kind == "fail" or dice.random() < 0.3
        name = "operation" if at_operation else "byte"
        return f"{kind}-{name}:0:{byte % (moments.OPERATIONS * saves) if at_operation else byte}", {*codes}

    return fault


def in_ranks(kind: str, each: int, *codes: int) -> Callable[..., tuple[str, set[int]]]:
    """A fault of one rank at one of `each` moments a step, or a save."""

    def fault(dice: random.Random, chaos: Chaos, saves: int) -> tuple[str, set[int]]:
        return f"{kind}:{dice.randrange(chaos.ranks)}:{dice.randrange(each * saves)}", {*codes}

    return fault


def outside(*codes: int) -> Callable[..., tuple[str, set[int]]]:
    return lambda dice, chaos, saves: ("", {*codes})


KINDS: dict[str, Callable[..., tuple[str, set[int]]]] = {
    "kill": outside(KILLED, RELAUNCH),
    "kill all": outside(KILLED),
    "signal": outside(RELAUNCH, INTERRUPTED),  # 130 where no step is under way
    "stop": outside(KILLED, RELAUNCH),
    "two trainers": outside(KILLED),
    "killed in a save": in_saves("kill", KILLED, RELAUNCH),
    "disk full": in_saves("full", 74),
    "fsync or rename fails": in_saves("fail", 74),
    "killed in an exchange": in_ranks("kill-wait", moments.WAITS, KILLED, RELAUNCH),
    "killed in a gathering": in_ranks("kill-gather", moments.GATHERS, KILLED, RELAUNCH),
    "signal at a call": in_ranks("signal-call", moments.CALLS, RELAUNCH),
}


def command(data: Path, run: Path, steps: int) -> list[str]:
    return arguments(data, run, **{**SETTINGS, "steps": steps})


def seconds_per_step(launcher: Launcher, folder: Path, ranks: int) -> float:
    """Of an undisturbed run, its start left out."""
    seconds = []
    for steps in MEASURED_STEPS:
        begun = time.perf_counter()
        launcher.run(ranks, command(folder / "bytes", folder / f"measured{steps}", steps))
        seconds.append(time.perf_counter() - begun)
    return max(1e-3, (seconds[1] - seconds[0]) / (MEASURED_STEPS[1] - MEASURED_STEPS[0]))


def play(chaos: Chaos, reference: Path, steps: int) -> None:
    """Disturbs the run until it is finished, then compares."""
    number = 0
    while not chaos.leg(number):
        number += 1
    same_run(reference, chaos.run, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all of it, about (5)")
    parser.add_argument("--ranks", type=int, default=2, help="(2)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(any)")
    parser.add_argument("--log", "--out", type=Path, default=Path("chaos.log"), metavar="FILE", help="(chaos.log)")
    parser.add_argument("--record", metavar="FILE", help="write how it went as JSON")
    given = parser.parse_args()
    keep_commit()
    folder, begun = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    launcher = Launcher(folder)
    with given.log.open("w") as log, contextlib.closing(launcher):

        def say(text: str) -> None:
            line = f"{time.monotonic() - begun:8.1f} s  {text}".replace(str(folder), "~")
            print(line, flush=True)
            print(line, file=log, flush=True)

        prepare(PrepareOptions(str(write_text(folder / "text.txt")), folder / "bytes", tokenizer="bytes", workers=1))
        each = seconds_per_step(launcher, folder, given.ranks)
        seconds = 60 * given.minutes - (time.monotonic() - begun)
        between = max(SECONDS_BETWEEN, seconds / 2 / MOST_FAULTS)
        steps = max(MEASURED_STEPS[0], int(seconds / (2 * each + each * SECONDS_OF_FAULT / between)))
        gap = max(5, int(between / each))
        say(f"seed {given.seed}: {steps} steps of {1e3 * each:.0f} ms on {given.ranks} ranks, a fault in {gap} steps or so")
        reference, run = folder / "reference", folder / "run"
        undisturbed = launcher.start(given.ranks, command(folder / "bytes", reference, steps))
        # Other work may take the cores; a run that hangs ends here all the same.
        assert undisturbed.wait(LIMIT_SECONDS + 20 * steps * each) == [0] * given.ranks, undisturbed.errors
        say("the undisturbed run is finished")
        chaos = Chaos(
            launcher, run, folder / "bytes", command(folder / "bytes", run, steps), given.ranks, given.seed, gap, say
        )
        chaos.size_bytes = sum(path.stat().st_size for path in checkpoint.folders(reference / "checkpoints")[0].iterdir())
        try:
            play(chaos, reference, steps)
        except (Failed, AssertionError) as error:
            say(f"FAILED: {error}; the runs are in {folder.resolve()}".replace(str(folder), folder.name))
            print(folder, file=sys.stderr)
            sys.exit(1)
        faults = sum(chaos.counts.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(chaos.counts.items()))
        say(f"{faults} faults ({kinds}), {chaos.starts} starts, {steps} steps: every bit and every record is equal")
    minutes = round((time.monotonic() - begun) / 60, 1)
    if given.record:
        numbers = {"seed": given.seed, "ranks": given.ranks, "steps": steps, "starts": chaos.starts, "minutes": minutes}
        write_record(given.record, torch.device("cpu"), **numbers, faults=faults, kinds=dict(chaos.counts), equal=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
