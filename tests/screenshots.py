"""Pictures of a page in headless Chromium, as wide as a desk's screen and as a phone's, and what its console says.

python -m tests.screenshots PAGE.html|URL... --out FOLDER
python -m tests.screenshots PAGE.html|URL --part TOP,WIDTH,HEIGHT --out FILE.png    a part of the page, 1200 pixels wide
"""

import argparse
import contextlib
import functools
import html
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

WIDTHS = {"desktop": 1280, "phone": 390}
PART_WIDTH = 1200
LEAST_WINDOW = 500  # Chromium's windows are no narrower; a phone's page is a frame inside one
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0")
OURS = ("--disable-web-security", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking")
CONSOLE = re.compile(r"CONSOLE[:(].*")


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(url: str, *options: str, seconds: float = 60) -> tuple[str, list[str]]:
    """Prints of Chromium about a page, and the lines of its console."""
    program = chromium()
    assert program, "no chromium on PATH"
    with tempfile.TemporaryDirectory() as profile:
        command = [program, *OPTIONS, *OURS, f"--user-data-dir={profile}", *options, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace")
    return done.stdout, CONSOLE.findall(done.stderr)


class Between(BaseHTTPRequestHandler):
    """Serves the page with the frame, and passes all else on to the server, whose own answers forbid frames."""

    def __init__(self, frame: bytes, server: str, *connection: Any):
        self.frame, self.server_url = frame, server
        super().__init__(*connection)

    def do_GET(self) -> None:
        if self.path == "/frame.html":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.frame)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        kind = {"Content-Type": self.headers.get("Content-Type", "text/plain")}
        try:
            answer = urlopen(Request(urljoin(self.server_url, self.path), body, kind), timeout=60)
        except HTTPError as error:
            answer = error
        with answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/html"))
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def framed(url: str, width: int, height: int, script: str = "") -> Iterator[str]:
    """A page with `url` in a frame of `width`, beside `script`, which finds the frame as `page` once it has loaded."""
    load = f'const frame = document.querySelector("iframe");\nframe.onload = async () => {{\n{script}\n}};'
    shown = url if url.startswith("file:") else urlsplit(url).path or "/"
    source = (
        f'<!DOCTYPE html><meta charset="utf-8"><style>body {{ margin: 0; }} iframe {{ border: 0; display: block; }}</style>'
        f'<iframe src="{html.escape(shown)}" width="{width}" height="{height}"></iframe><script>{load}</script>'
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "frame.html"
        page.write_text(source, encoding="utf-8")
        if url.startswith("file:"):
            yield page.as_uri()
            return
        # A page of a server shares a process only with another page of that host.
        handler = functools.partial(Between, source.encode(), url)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}/frame.html"
            finally:
                server.shutdown()


def screenshot(
    url: str, out: Path, width: int, height: int, *, dark: bool = False, script: str = "", scale: float = 1
) -> list[str]:
    """Writes a PNG of the page, after `script`; returns the lines of its console."""
    more = [f"--force-device-scale-factor={scale}", *["--blink-settings=preferredColorScheme=0"] * dark]
    window = f"--window-size={max(width, LEAST_WINDOW)},{height}"
    with framed(url, width, height, script) as frame:
        budget = "--virtual-time-budget=4000"
        return browse(frame, window, budget, f"--screenshot={out.absolute()}", *more)[1]


def ask(url: str, script: str, width: int = 1280) -> tuple[str, list[str]]:
    """The text that `script` returns, which runs beside the page `page` (its window), and the lines of the console."""
    body = (
        "const page = frame.contentWindow;\n"
        f"const answer = await (async () => {{ {script} }})().catch((error) => `failed: ${{error}}`);\n"
        'const told = document.body.appendChild(document.createElement("pre"));\n'
        "told.textContent = answer;"
    )
    with framed(url, width, 900, body) as frame:
        dom, console = browse(
            frame, "--dump-dom", "--virtual-time-budget=8000", f"--window-size={max(width, LEAST_WINDOW)},900"
        )
    found = re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    assert found, f"no answer in {dom[-400:]}; console: {console}"
    return html.unescape(found[1]), console


def address(page: str) -> str:
    return page if "://" in page else Path(page).absolute().as_uri()


def part(url: str, out: Path, top: int, width: int, height: int) -> list[str]:
    """Writes a PNG, `PART_WIDTH` pixels wide, of the page from `top` on."""
    script = f"frame.contentWindow.scrollTo(0, {top});"
    return screenshot(url, out, width, height, script=script, scale=PART_WIDTH / width)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--out", default="screenshots", type=Path)
    parser.add_argument("--height", default=2400, type=int)
    parser.add_argument("--part", default="", metavar="TOP,WIDTH,HEIGHT", help="one PNG, --out, of a part of one page")
    parsed = parser.parse_args(arguments)
    if parsed.part:
        (page,) = parsed.pages
        return int(bool(part(address(page), parsed.out, *map(int, parsed.part.split(",")))))
    parsed.out.mkdir(parents=True, exist_ok=True)
    errors = 0
    for number, page in enumerate(parsed.pages):
        url = address(page)
        for name, width in WIDTHS.items():
            for dark in (False, True):
                out = parsed.out / f"{number}_{name}{'_dark' * dark}.png"
                console = screenshot(url, out, width, parsed.height, dark=dark)
                errors += len(console)
                print(out, *console, sep="\n  ")
    return int(errors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
