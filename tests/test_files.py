"""Files that two processes write at the same time: the one waits for the other, or both are whole."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from handgrad import files
from handgrad.data import hub
from handgrad.data.sources import Download
from handgrad.files import locked, write_bytes_durably

CONTENT = b"as the first process downloaded it"


def test_a_download_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would write PATH.partial, and the second into the file that the first has given its name."""
    path, said, waits = tmp_path / "cache" / "file", list[str](), threading.Event()

    def say(text: str, *, ends: bool) -> None:
        said.append(text)
        waits.set()

    monkeypatch.setattr(files, "print_message", say)
    asked = Download("http://127.0.0.1:9/unused", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    second = threading.Thread(target=hub.download, args=(asked, path))
    with locked(path.parent):
        second.start()
        assert waits.wait(60), "it did not wait"
        path.write_bytes(CONTENT)
    second.join()
    assert path.read_bytes() == CONTENT and [*path.parent.iterdir()] == [path]
    assert said == [f"waiting for another download into {path.parent}"]


def test_two_processes_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one writes all of it between our last byte and our rename."""
    path, sync = tmp_path / "report.html", files.os.fsync
    other = f"from pathlib import Path; from handgrad import files; files.write_durably(Path({str(path)!r}), 'other')"

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(files.os, "fsync", sync)
        subprocess.run([sys.executable, "-c", other], check=True)
        assert path.read_text() == "other"

    monkeypatch.setattr(files.os, "fsync", meanwhile)
    write_bytes_durably(path, b"ours, which is longer")
    assert path.read_text() == "ours, which is longer" and [*tmp_path.iterdir()] == [path]
