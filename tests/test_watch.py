"""`handgrad watch` serves what the report shows, renews it, and outlives the faults of the runs; the page's script in a
browser, where there is one."""

import functools
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.errors import DataError, UsageError
from handgrad.reports import serve
from handgrad.reports.page import write_report
from handgrad.reports.serve import Handler, Watched
from handgrad.serving.local_server import LocalServer, listen
from tests.screenshots import LEAST_WINDOW, WIDTHS, ask, chromium, screenshot
from tests.test_interrupts import start
from tests.test_report import make_run, run_lines, start_line, step_line

browser = pytest.mark.skipif(chromium() is None, reason="no chromium on PATH")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is drawn again without a rest."""
    monkeypatch.setattr(serve, "REST", 0)


@contextmanager
def serving(watched: Watched) -> Iterator[str]:
    with listen(functools.partial(Handler, watched), "127.0.0.1", 0, may_move=False) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read().decode()


def extend(run: Path, *lines: dict, tail: str = "") -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + tail)


def version(page: str) -> str:
    found = re.search(r'data-version="(\w+)"', page)
    assert found
    return found[1]


def status(page: str) -> str:
    found = re.search(r'<p class="live"[^>]*>(.*?)</p>', page)
    assert found
    return found[1]


def test_the_page_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer per state; a torn last line is waited for; the end is told."""
    monkeypatch.setattr(serve, "choose_plots", lambda runs: [])
    run = make_run(tmp_path / "run", [start_line(), step_line(1)], tail='{"kind": "st')
    with serving(Watched([run])) as url:
        code, page = get(url)
        assert code == 200 and status(page) == "run: step 1 of 60." and "cut in half" not in page
        assert "connect-src 'self'" in page
        assert get(f"{url}?after={version(page)}") == (204, "")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run_lines()))
        code, renewed = get(f"{url}?after={version(page)}")
        assert code == 200 and status(renewed) == "run: complete." and 'data-ended="1"' in renewed
        assert get(f"{url}favicon.ico")[0] == 204
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}metrics.jsonl")


def test_runs_that_appear_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is named, and one in a folder of runs; one without a step is named as left out, and so is a broken one."""
    monkeypatch.setattr(serve, "choose_plots", lambda runs: [])
    (tmp_path / "runs").mkdir()
    watched = Watched([tmp_path / "runs", tmp_path / "later"])
    assert watched.waiting() == [f"{tmp_path / 'later'} does not exist yet"]
    empty = watched.page("")
    assert empty and "Waiting" in empty and "there is no run" in empty
    run = make_run(tmp_path / "runs" / "a", [start_line()])
    waiting = watched.page(version(empty))
    assert waiting and "no finished step yet" in waiting
    extend(run, step_line(1))
    make_run(tmp_path / "later")
    broken = make_run(tmp_path / "runs" / "broken", tail="[1]\n")
    page = watched.page(version(waiting))
    assert page and status(page) == "a: step 1 of 60; later: complete." and f"of {broken}" in page
    assert watched.page(version(page)) is None


def test_drawing_leaves_the_cores_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that takes long is drawn seldom: until then a browser keeps its own."""
    monkeypatch.setattr(serve, "REST", 1e6)
    drawn: list[str] = []
    monkeypatch.setattr(serve, "draw", lambda folders, state: drawn.append(state) or state)
    run = make_run(tmp_path / "run")
    watched = Watched([run])
    first = watched.page("")
    extend(run, step_line(61))
    assert watched.page(first or "") is None and watched.page("") == first and drawn == [first]


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(DataError, match=r"there is no run .*nowhere; `handgrad runs"):
        Watched([tmp_path / "nowhere"])
    watched = Watched([make_run(tmp_path / "run")])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port}: .* in use; name another --port"):
            listen(functools.partial(Handler, watched), "127.0.0.1", port, may_move=False)
        with listen(functools.partial(Handler, watched), "127.0.0.1", port, may_move=True) as moved:
            assert isinstance(moved, LocalServer) and moved.server_address[1] not in (0, port)
        assert main(["watch", str(tmp_path / "run"), "--port", str(port)]) == 64
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["watch", str(tmp_path / "run"), "--port", "0"]) == 64


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    process = start(["-m", "handgrad", "watch", str(make_run(tmp_path / "run"))])
    assert process.stdout and process.stdout.readline().startswith("watching   http://127.0.0.1:")
    process.send_signal(2)
    assert process.communicate(timeout=20) == ("", "handgrad: interrupted\n") and process.returncode == 130


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs that take 1 and 2 s a step, the second one with the higher loss."""
    folder = tmp_path_factory.mktemp("compared")
    for name, seconds in (("fast", 1), ("slow", 2)):
        lines = [start_line(time=1000.0, tokens_per_step=8192 * seconds)]
        lines += [step_line(s, time=1000.0 + seconds * s, loss=seconds + 1 / s) for s in range(1, 61)]
        make_run(folder / name, [*lines, {"kind": "validation", "step": 60, "loss": float(seconds)}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("handgrad.reports.page.png", lambda plot, runs: b"")
        return write_report([folder / "fast", folder / "slow"], folder / "page.html")


HOVER = """
    const svg = page.document.querySelector("figure svg.large"), box = svg.getBoundingClientRect();
    svg.scrollIntoView();
    const at = svg.getBoundingClientRect();
    const where = { clientX: at.left + 0.4 * at.width, clientY: at.top + 0.5 * at.height };
    const hover = () => {
        page.dispatchEvent(new page.PointerEvent("pointermove", where));
        return page.document.querySelector(".hover").innerText;
    };
"""


@browser
def test_values_under_the_pointer_on_every_axis(compared: Path) -> None:
    choose = "page.document.querySelector('[data-axis={}]').click();"
    shown, console = ask(
        compared.as_uri(),
        f"{HOVER} const steps = hover(); {choose.format('tokens')} const tokens = hover(); {choose.format('time')}"
        "const label = svg.querySelector('.xlabel text').textContent, ticks = svg.querySelectorAll('.own').length;"
        f"const time = hover(); {choose.format('steps')}"
        "return JSON.stringify([steps, tokens, time, label, ticks, hover()]);",
    )
    assert console == []
    steps, tokens, time, label, ticks, again = json.loads(shown)
    first, *rows = steps.split("\n")
    step = int(first.removeprefix("step "))
    assert 25 <= step <= 35 and again == steps
    named = [re.fullmatch(r"(fast|slow) ([\d.]+) \((\d+)\)", row) for row in rows]
    assert [found and found[1] for found in named] == ["fast", "slow"]
    assert all(
        found and float(found[2]) == pytest.approx(base + 1 / step, abs=0.02)
        for found, base in zip(named, (1, 2), strict=True)
    )
    assert tokens.startswith(("tokens 4", "tokens 5"))  # half of 983,040
    assert label == "minutes" and ticks >= 5
    found = {name: int(step) for name, step in re.findall(r"(fast|slow) [\d.]+ \((\d+)\)", time)}
    assert found["fast"] == pytest.approx(2 * found["slow"], abs=3)  # in the same time


@browser
def test_a_click_on_a_heading_sorts(compared: Path) -> None:
    names = "[...page.document.querySelectorAll('.sortable')[0].tBodies[0].rows].map((row) => row.cells[0].innerText)"
    click = "page.document.querySelectorAll('.sortable')[0].querySelectorAll('thead button')[1].click();"
    shown, console = ask(compared.as_uri(), f"{click} const up = {names}; {click} return JSON.stringify([up, {names}]);")
    assert (json.loads(shown), console) == ([["fast", "slow"], ["slow", "fast"]], [])


@browser
def test_a_live_page_renews_itself(tmp_path: Path) -> None:
    """Without losing the chosen axis, the sorting and open details."""
    run = make_run(tmp_path / "run", run_lines()[:20])

    class Growing(Watched):
        def page(self, after: str) -> str | None:
            if after:
                extend(run, step_line(len((run / "metrics.jsonl").read_text().splitlines())))
            return super().page(after)

    with serving(Growing([run])) as url:
        shown, console = ask(
            url,
            "page.document.querySelector('[data-axis=tokens]').click(); page.document.querySelector('details').open = true;"
            "const before = page.document.querySelector('.live').textContent;"
            "for (let i = 0; i < 60 && page.document.querySelector('.live').textContent === before; i++)"
            "  await new Promise((resolve) => setTimeout(resolve, 100));"
            "const label = page.document.querySelector('figure .xlabel text').textContent;"
            "const after = page.document.querySelector('.live').textContent;"
            "return JSON.stringify([before, after, label, page.document.querySelector('details').open]);",
        )
    before, after, label, still_open = json.loads(shown)
    assert re.match(r"run: step \d+ of 60", before) and before != after
    assert (label, still_open, console) == ("tokens", True, [])


@browser
@pytest.mark.parametrize("width", WIDTHS.values())
def test_a_page_fits_its_screen(compared: Path, tmp_path: Path, width: int) -> None:
    shown, console = ask(compared.as_uri(), "return page.document.documentElement.scrollWidth;", width)
    assert (int(shown), console) == (width, [])
    assert screenshot(compared.as_uri(), tmp_path / "page.png", width, 800) == []
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20]) == max(width, LEAST_WINDOW) and int.from_bytes(header[20:24]) == 800
