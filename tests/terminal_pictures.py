"""Pictures of a terminal while a command runs in it: what a user sees after so many seconds, at a width of so many columns.

python -m tests.terminal_pictures --columns 80 --seconds 20 --out FILE.png -- handgrad train tiny --data shards
python -m tests.terminal_pictures --columns 118 --out docs/terminal.png --demo       the recorded end of `make train`

It needs Chromium, and pyte (`pip install pyte`) as the terminal. The command is interrupted afterwards, as Ctrl-C does.
"""

import argparse
import contextlib
import fcntl
import hashlib
import html
import json
import os
import pty
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyte
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from handgrad.run.console import WordWrap
from tests.screenshots import browse

DEMO = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu-demo.json"
ROWS = 40
COLUMN_PIXELS, ROW_PIXELS, MARGIN = 8.43, 18, 12  # of DejaVu Sans Mono at 14 pixels
STYLE = """body {{ margin: {margin}px; background: #111; color: #ddd; }}
pre {{ margin: 0; font: 14px/{row}px "DejaVu Sans Mono", monospace; }}"""
COLORS = {"default": "#ddd", "brown": "#d7b65b", "blue": "#6ea3e8", "green": "#7cc47c", "red": "#e06c6c", "cyan": "#62c1c9"}


def seen(command: Sequence[str], columns: int, seconds: float) -> pyte.Screen:
    """The screen after `seconds`, or at the command's end."""
    screen = pyte.HistoryScreen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    os.close(theirs)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([ours], [], [], left)[0]:
            try:
                stream.feed(os.read(ours, 65536))
            except OSError:  # the other side is closed
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    os.close(ours)
    process.wait()
    return screen


def demo_lines() -> list[str]:
    """The end of `make train` in its record, from step 1100 on."""
    log = json.loads(DEMO.read_text())["log"]
    first = next(number for number, line in enumerate(log) if line.startswith("step 1100/"))
    return ["$ make train", "…", *log[first:]]


def digest(lines: Sequence[str]) -> str:
    """Identifies the lines; the picture carries it, so that a test sees an outdated one."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def shown(lines: Sequence[str], columns: int) -> pyte.Screen:
    """A screen with these lines, broken between words as a run's console breaks them."""
    screen, wrap = pyte.Screen(columns, ROWS), WordWrap(columns)
    pyte.Stream(screen).feed(wrap.feed("\n".join(lines), ends=True).replace("\n", "\r\n"))
    return screen


def markup(screen: pyte.Screen) -> str:
    """The screen as HTML, down to its last line that has something."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        lines.append("".join(cell_markup(cell) for cell in cells).rstrip())
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)


def cell_markup(cell: Any) -> str:
    if cell.fg == "default" and not cell.bold:
        return html.escape(cell.data)
    color = COLORS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else COLORS["default"])
    return f'<span style="color:{color};font-weight:{"bold" if cell.bold else "normal"}">{html.escape(cell.data)}</span>'


def picture(screen: pyte.Screen, out: Path) -> None:
    text = markup(screen)
    width = round(screen.columns * COLUMN_PIXELS) + 2 * MARGIN
    height = (text.count("\n") + 1) * ROW_PIXELS + 2 * MARGIN
    style = STYLE.format(margin=MARGIN, row=ROW_PIXELS)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><style>{style}</style><pre>{text}</pre>', encoding="utf-8")
        browse(page.as_uri(), f"--window-size={max(width, 500)},{height}", f"--screenshot={out.absolute()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("command", nargs="*")
    parsed = parser.parse_args()
    if parsed.demo:
        picture(shown(demo_lines(), parsed.columns), parsed.out)
        information = PngInfo()
        information.add_text("Lines", digest(demo_lines()))
        with Image.open(parsed.out) as drawn:
            drawn.convert("P", palette=Image.Palette.ADAPTIVE, colors=32).save(
                parsed.out, optimize=True, pnginfo=information
            )
        return
    picture(seen(parsed.command, parsed.columns, parsed.seconds), parsed.out)
    print(f"written    {parsed.out}")


if __name__ == "__main__":
    main()
