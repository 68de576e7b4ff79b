"""The steps of a lecture on this machine: GPT-2 in plain PyTorch, one improvement per row, up to handgrad's kernels.

Each row is a fresh process that makes optimizer steps of one micro-batch for a few seconds. A row that needs a CUDA GPU
is skipped elsewhere, and so is its improvement in later rows. The record is written after every row, so a climb that is cut
short keeps what it has, and `--rows` goes on in it.

    handgrad bench ladder --out ladder.json
    handgrad bench ladder --out ladder.json --rows 6-9
"""

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.contenders import HandgradRun, Settings, TwinRun, tokens_of
from benchmarks.record import continued, rounded, write_record
from benchmarks.turns import Peer, PeerFailed, Run, answers, contend, note
from benchmarks.twin_switches import Switches
from handgrad.errors import UsageError
from handgrad.machine import devices

WARM_UP_SECONDS = 1.0

BOTTOM = Switches(attention="plain", autocast=False, tf32=False, compiled=False, padded=False, fused=False)


@dataclass(frozen=True)
class Rung:
    """A row: its title (a template for the vocabulary's sizes) and its changes."""

    title: str
    changes: dict[str, Any] = field(default_factory=dict)  # of `Switches`; of `HandgradRun` where `handgrad`
    cuda: bool = False  # it needs a GPU
    handgrad: bool = False


RUNGS = (
    Rung("PyTorch eager, fp32, vocabulary {V}"),
    Rung("+ TF32", {"tf32": True}, cuda=True),
    Rung("+ bf16 autocast", {"autocast": True}),
    Rung("+ torch.compile", {"compiled": True}, cuda=True),
    Rung("+ flash attention", {"attention": "flash"}),
    Rung("+ vocabulary padded to {Vp}", {"padded": True}),
    Rung("+ fused AdamW", {"fused": True}),
    Rung("handgrad", {"graphs": False}, handgrad=True),
    Rung("handgrad in CUDA graphs", {"graphs": True}, cuda=True, handgrad=True),
)


def switches_of(rung: int, cuda: bool) -> Switches:
    """The twin at a row: the changes of all rows up to it that run here."""
    changes: dict[str, Any] = {}
    for below in RUNGS[: rung + 1]:
        if not below.handgrad and (cuda or not below.cuda):
            changes |= below.changes
    return dataclasses.replace(BOTTOM, **changes)


def make_run(rung: int, settings: Settings) -> Run:
    """A row's contender, in its own process."""
    config, tokens = settings.config(), tokens_of(settings)
    if RUNGS[rung].handgrad:
        return HandgradRun(config, tokens, **RUNGS[rung].changes)
    return TwinRun(config, tokens, switches_of(rung, config.device == "cuda"))


def climb(rung: int, settings: Settings, seconds: float) -> dict[str, Any]:
    """The figures of a row, or the reason for none."""
    peer = Peer(RUNGS[rung].title, [sys.executable, "-m", "benchmarks.ladder", str(rung), settings.to_json()])
    try:
        first = peer.answer()
        first_step_seconds = peer.elapsed_seconds()
        peer.ask(f"go {min(WARM_UP_SECONDS, seconds)}")
        turn = peer.ask(f"go {seconds}")
    except PeerFailed as failure:
        return {"failed": str(failure)}
    finally:
        peer.close()
    micro_batches = turn["steps"] * settings.micro_steps
    return {
        "milliseconds_per_micro_batch": 1e3 * turn["seconds"] / micro_batches,
        "tokens_per_second": micro_batches * settings.micro_batch * settings.sequence_length / turn["seconds"],
        "first_step_seconds": first_step_seconds,
        "reserved_bytes": turn["reserved_bytes"],
        "first_loss": first["loss"],
        "last_loss": turn["loss"],
    }


def add_gains(rows: list[dict[str, Any]], titles: list[str]) -> None:
    """Each measured row against the measured row before it, and against the first. `titles`: of all rows; one that is still
    to come leaves the row after it without a gain."""
    made = {row["title"]: row for row in rows}
    measured = [row for row in rows if "tokens_per_second" in row]
    for row in rows:
        row.pop("gain", None)
        row.pop("gain_from_the_bottom", None)
    for row, before in zip(measured[1:], measured, strict=False):
        between = titles[titles.index(before["title"]) : titles.index(row["title"])]
        if all(title in made for title in between):
            row["gain"] = row["tokens_per_second"] / before["tokens_per_second"]
        if titles[0] in made:
            row["gain_from_the_bottom"] = row["tokens_per_second"] / measured[0]["tokens_per_second"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines to print."""
    lines = [f"{'':<40}{'ms':>10}{'tok/s':>12}{'gain':>8}{'in all':>9}{'GiB':>8}{'step 1, s':>11}"]
    for row in rows:
        if "tokens_per_second" not in row:
            lines.append(f"{row['title']:<40}  {'skipped: ' + row['skipped'] if 'skipped' in row else row['failed']}")
            continue
        gains = "".join(
            f"{f'x {row[key]:.2f}' if key in row else '':>{width}}"
            for key, width in (("gain", 8), ("gain_from_the_bottom", 9))
        )
        size = "-" if row["reserved_bytes"] is None else f"{row['reserved_bytes'] / 2**30:.1f}"
        lines.append(
            f"{row['title']:<40}{row['milliseconds_per_micro_batch']:>10.2f}{row['tokens_per_second']:>12.0f}{gains}"
            f"{size:>8}{row['first_step_seconds']:>11.1f}"
        )
    return lines


def rungs_of(text: str) -> list[int]:
    """The places in `RUNGS` of rows as people count them: `6-9` or `1,8,9`. Raises `UsageError`."""
    found: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
        if not 1 <= first <= last <= len(RUNGS):
            raise UsageError(f"rows are numbers from 1 to {len(RUNGS)} like 6-9 or 1,8,9, found {text!r}")
        found += range(first - 1, last)
    return sorted(set(found))


def compare(settings: Settings, seconds: float, out: str, rungs: list[int] | None = None) -> list[dict[str, Any]]:
    """Climbs: all rungs, or those at the places given, beside which the rows stay that `out` has already. Prints the table,
    and writes it to `out`, if that is not empty, after every row."""
    device = devices.resolve_device(settings.device)
    tokens = tokens_of(settings)
    shape = settings.config().shape(tokens.vocab_size)
    described = {"settings": {**dataclasses.asdict(settings), "seconds": seconds}, "tokens": tokens.words}
    before = continued(out, device, described) if out and rungs is not None else None
    done: dict[str, dict[str, Any]] = {row["title"]: row for row in before or ()}
    titles = [rung.title.format(V=shape.vocab_size, Vp=shape.padded_vocab_size) for rung in RUNGS]
    rows: list[dict[str, Any]] = []
    for rung in range(len(RUNGS)) if rungs is None else rungs:
        row: dict[str, Any] = {"title": titles[rung]}
        if RUNGS[rung].cuda and device.type != "cuda":
            row["skipped"] = "needs a CUDA GPU"
        else:
            row |= climb(rung, settings, seconds)
            note(f"{row['title']}: {row.get('failed') or round(row['tokens_per_second'])}")
        done[row["title"]] = row
        rows = [done[title] for title in titles if title in done]
        add_gains(rows, titles)
        if out:
            write_record(out, device, **described, figures=rounded(rows))
    print(
        f"\n{settings.model}, micro-batches of {settings.micro_batch} x {settings.sequence_length} tokens ({tokens.words}),"
        f" an optimizer step after every {settings.micro_steps}, {devices.describe(device)}, {seconds:g} s a row\n"
    )
    print("\n".join(table(rows)))
    return rows


if __name__ == "__main__":
    _settings = Settings.from_json(sys.argv[2])
    _pipe = answers()
    contend(lambda: make_run(int(sys.argv[1]), _settings), torch.device(_settings.device), sys.stdin, _pipe)
