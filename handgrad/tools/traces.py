"""Launches and times of our named ranges in a trace of torch's profiler.

The trace is Chrome's JSON. A kernel carries the number (`correlation`) of the call on the host that launched it; it belongs
to the innermost of our ranges around that call. Nothing depends on the names of kernels.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "handgrad/"  # of the ranges' names; the rest is the kernel type
COPIES, OTHER = "copies and zeroing", "other"
COPYING = {"aten::copy_", "aten::zero_", "aten::fill_"}  # outside our operations

Event = dict[str, Any]


@dataclass
class Spent:
    """Launches of a kernel type and their time. On a CPU each operation is a launch."""

    launches: int = 0
    microseconds: float = 0.0


@dataclass
class Range:
    kind: str
    start: float  # microseconds
    end: float


def read_trace(path: Path) -> list[Event]:
    """The complete events of a trace, which may be compressed."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "cat" in event]


def ranges_of(events: Sequence[Event], category: str) -> list[Range]:
    """Our ranges of this category, and torch's copies outside them, by start; an outer range before an inner."""
    found: list[Range] = []
    open_until = 0.0
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        ours = event["cat"] == category and event["name"].startswith(PREFIX)
        if ours or (event["cat"] == "cpu_op" and event["name"] in COPYING and event["ts"] >= open_until):
            found.append(Range(event["name"].removeprefix(PREFIX) if ours else COPIES, event["ts"], end))
            open_until = max(open_until, end)
    return found


def innermost(ranges: Sequence[Range], moments: Sequence[float]) -> list[str | None]:
    """For each moment, in order, the kind of the innermost range around it."""
    kinds: list[str | None] = []
    around: list[Range] = []
    following = 0
    for moment in moments:
        while following < len(ranges) and ranges[following].start <= moment:
            around = [*(r for r in around if r.end >= ranges[following].start), ranges[following]]
            following += 1
        around = [r for r in around if r.end >= moment]
        kinds.append(around[-1].kind if around else None)
    return kinds


def spent_on_gpu(events: Sequence[Event]) -> dict[str, Spent]:
    """Kernels, copies and fills of a GPU by type. One whose launch is not in the trace belongs to the range that the
    profiler shows on the device at its time."""
    calls = {e.get("args", {}).get("correlation"): e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    by_call: list[tuple[float, Event]] = []
    by_time: list[tuple[float, Event]] = []
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = calls.get(event["args"]["correlation"])
            if call is None:
                by_time.append((event["ts"], event))
            else:
                by_call.append((call, event))
    spent: dict[str, Spent] = defaultdict(Spent)
    on_device = [e for e in events if e["cat"] == "gpu_user_annotation"]
    for chosen, ranges in (
        (by_call, ranges_of(events, "user_annotation")),
        (by_time, ranges_of(on_device, "gpu_user_annotation")),
    ):
        chosen.sort(key=lambda pair: pair[0])
        kinds = innermost(ranges, [moment for moment, _ in chosen])
        for kind, (_, event) in zip(kinds, chosen, strict=True):
            row = spent[kind or (OTHER if event["cat"] == "kernel" else COPIES)]
            row.launches += 1
            row.microseconds += event["dur"]
    return dict(spent)


def spent_on_cpu(events: Sequence[Event]) -> dict[str, Spent]:
    """Ranges by type, each without the ranges inside it."""
    spent: dict[str, Spent] = defaultdict(Spent)
    around: list[Range] = []
    for found in ranges_of(events, "user_annotation"):
        around = [r for r in around if r.end > found.start]
        if around:
            spent[around[-1].kind].microseconds -= found.end - found.start
        spent[found.kind].launches += 1
        spent[found.kind].microseconds += found.end - found.start
        around.append(found)
    return dict(spent)
