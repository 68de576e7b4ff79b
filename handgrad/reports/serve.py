"""Serves a live report of runs in progress: a browser polls every two seconds, and changed files are drawn again.

Drawing takes at most a tenth of one core, because the run may need the same cores.
"""

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from handgrad.errors import DataError
from handgrad.reports.page import Live, document, page
from handgrad.reports.plots import choose_plots
from handgrad.reports.reading import read_readable, runs_in
from handgrad.reports.results import Run, steps_done
from handgrad.reports.sections import faint
from handgrad.serving.local_server import LocalHandler
from handgrad.storage.run_files import METRICS_FILE, missing_run

REST = 9  # times the seconds that drawing the page took: the pause before it is drawn again


class Watched:
    """The runs to watch, and the page about them. Safe to call from several threads."""

    def __init__(self, named: Sequence[Path]):
        """`named`: run folders, folders of runs, main.logs, which may appear later. Raises `DataError` if none exists."""
        self.named, self.lock = named, threading.Lock()
        self.version, self.html, self.rested = "", "", 0.0
        if not any(path.exists() for path in named):
            raise DataError(missing_run(named[0]))
        if texts := [path for path in named if path.is_file() and path.suffix != ".log"]:
            raise DataError(f"expected run folders, found the file {texts[0]}; name the folder of a run, or a main.log")

    def waiting(self) -> list[str]:
        return [f"{path} does not exist yet" for path in self.named if not path.exists()]

    def state(self, folders: Sequence[Path]) -> str:
        """A version of the runs: it changes with their files."""
        marks = []
        for folder in folders:
            with contextlib.suppress(OSError):
                stat = (folder if folder.is_file() else folder / METRICS_FILE).stat()
                marks.append((str(folder), stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]

    def page(self, after: str) -> str | None:
        """The page; None if the browser has it already (version `after`), or if it is too early to draw it again."""
        with self.lock:
            folders = runs_in(self.named)
            if (version := self.state(folders)) != self.version and time.monotonic() >= self.rested:
                began = time.monotonic()
                self.html, self.version = draw(folders, version), version
                self.rested = time.monotonic() + REST * (time.monotonic() - began)
            return None if after == self.version else self.html


def draw(folders: Sequence[Path], version: str) -> str:
    """The page of the readable runs in `folders`, with a line about each unreadable one."""
    runs, left_out = read_readable(folders)
    notes = [f"Left out: {error}" for error in left_out]
    if not runs:
        live = Live(version, "Waiting for a first step.", False)
        return document("Waiting", ["<h1>Waiting</h1>", *map(faint, notes)], live)
    # The last line of a run in progress may be half written; it is not lost.
    runs = [dataclasses.replace(run, last_line_cut=False) for run in runs]
    ended = all(has_ended(run) for run in runs)
    status = "; ".join(map(progress, runs))
    if len(runs) > 3:
        ours = [run for run in runs if not run.is_log]
        status = f"{sum(map(has_ended, ours))} of {len(ours)} runs complete"
    live = Live(version, f"{status}.", ended)
    return page(runs, choose_plots(runs), live, notes)


def has_ended(run: Run) -> bool:
    return run.is_log or steps_done(run) >= run.start.steps


def progress(run: Run) -> str:
    if run.is_log:
        return f"{run.name}: {steps_done(run):,} steps"
    return f"{run.name}: {'complete' if has_ended(run) else f'step {steps_done(run):,} of {run.start.steps:,}'}"


class Handler(LocalHandler):
    """Answers GET / with the page, and GET /?after=VERSION with no content while that version is the newest."""

    def __init__(self, watched: Watched, *connection: Any):
        self.watched = watched
        super().__init__(*connection)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/favicon.ico":
            self.answer(HTTPStatus.NO_CONTENT)
        elif path != "/":
            self.refuse(HTTPStatus.NOT_FOUND, "the page is at /")
        else:
            if (page := self.watched.page(parse_qs(query).get("after", [""])[0])) is None:
                self.answer(HTTPStatus.NO_CONTENT)
            else:
                self.answer(HTTPStatus.OK, page.encode("utf-8", errors="replace"))
