"""The command as a program of a shell: exit codes, pipes that close, consoles that show little, streams that are closed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import COMMANDS, main
from handgrad.commands import recipes
from handgrad.joins.parallel.local import LAUNCHER, command_line
from tests.test_commands import SMALL

ROOT = Path(__file__).resolve().parents[1]


def test_as_a_program() -> None:
    """`python -m handgrad`: exit codes reach the shell; a closed pipe is no error."""
    environment = {**os.environ, "COLUMNS": "100"}
    run = subprocess.run(
        [sys.executable, "-m", "handgrad", "train", "tny"], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 64 and run.stdout == "" and run.stderr.startswith("handgrad: unknown preset 'tny'")
    run = subprocess.run([sys.executable, "-m", "handgrad", "--help"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and all(f"  {name} " in run.stdout for name in COMMANDS)
    command = f"{sys.executable} -m handgrad doctor | head -1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "", run.stderr


def test_a_pipe_that_is_not_our_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A write to a process that died is an error, not the quiet end of `handgrad ... | head`."""

    def run(parsed: object) -> int:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return os.write(writer, b"question")
        finally:
            os.close(writer)

    monkeypatch.setattr(recipes, "run", run)
    assert main(["recipes"]) == 74
    assert capsys.readouterr().err == "handgrad: input or output failed: Broken pipe\n"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second checkout of handgrad, whose program does nothing but end with code 3."""
    (tmp_path / "other" / "handgrad").mkdir(parents=True)
    (tmp_path / "other" / "pyproject.toml").touch()
    (tmp_path / "other" / "handgrad" / "__init__.py").touch()
    (tmp_path / "other" / "handgrad" / "__main__.py").write_text("raise SystemExit(3)\n")
    return tmp_path / "other"


def test_a_command_says_which_code_it_runs(other: Path) -> None:
    """In another checkout and below it; not in its own, outside of any, and in the processes that it starts."""
    code = "from handgrad.cli import main; main(['runs', 'nowhere'])"
    start = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    note = f"handgrad: this is the code in {ROOT}, not the checkout in {other};"
    note += f" `cd {other} && python -m handgrad runs` runs the code there"
    started = {LAUNCHER: "1"}
    cases = [(other, {}, 1), (other / "handgrad", {}, 1), (other, started, 0), (ROOT, {}, 0), (other.parent, {}, 0)]
    for folder, added, notes in cases:
        run = subprocess.run(start, cwd=folder, env=environment | added, capture_output=True, text=True)
        assert [line for line in run.stderr.splitlines() if "this is the code" in line] == [note] * notes


def test_children_run_the_code_of_their_parent(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for folder in (other, ROOT):
        monkeypatch.chdir(folder)
        run = subprocess.run(command_line("--version"), capture_output=True, text=True)
        assert run.stdout == f"handgrad {handgrad.__version__}\n", f"exit code {run.returncode} in {folder}"


# Without a report, whose plots take longer than these runs.
PROGRAM = """
import sys
import handgrad.__main__, handgrad.commands.train
handgrad.commands.train.write_report = lambda runs, out: out
console = sys.stdout
for command in " ".join(sys.argv[1:]).split(" then "):
    sys.stdout, sys.argv[1:] = console, command.split()
    if code := handgrad.__main__.main():
        sys.exit(code)
assert "matplotlib" not in sys.modules, "a run imports it for its report alone"
"""


@pytest.mark.nightly(but=["{} >&-"])
@pytest.mark.parametrize("how", ["{} | head -1", "PYTHONIOENCODING=ascii {}", "{} >&-"])
def test_consoles_that_show_little(how: str, shards: Path, tmp_path: Path) -> None:
    """`handgrad train | head -1` loses its console, not its run; an ASCII console, or none, is no reason to lose it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    train = f"train {' '.join(SMALL)} --data {shards} --out {tmp_path / 'run'}"
    commands = f"{train} then sample {tmp_path / 'run'} --prompt 你好 --max-tokens 3"
    command = how.format(f"{sys.executable} {tmp_path / 'program.py'} {commands}")
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert run.returncode == 0 and re.fullmatch(r"3 tokens in .*\n", run.stderr), run.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()


def test_streams_that_are_closed_are_no_files(tmp_path: Path) -> None:
    """Else the first file that a run opens would be its stderr, and get what libraries print."""
    script = "import os; from handgrad.cli import main; main(['recipes']); os.symlink(os.readlink('/proc/self/fd/2'), 'o')"
    for closed in ("2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        subprocess.run(["bash", "-c", f'{sys.executable} -c "{script}" {closed}'], cwd=tmp_path, check=True)
        assert (tmp_path / "o").readlink() == Path("/dev/null")
        (tmp_path / "o").unlink()
