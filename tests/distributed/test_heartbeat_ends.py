"""The end of a heartbeat: a last beat, a store that is gone, a rank that ends by itself, nobody who listens."""

import io
import json
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from handgrad.joins.parallel import heartbeat
from handgrad.joins.parallel.heartbeat import Fault
from tests.distributed.test_heartbeat import PATIENCE, alone, wait_until


class SlowStore(dist.HashStore):
    """Holds the heartbeat's thread up, with `answers` cleared as a store does whose host is stopped: one call at a time, so
    nobody else's call returns either. `late`: before the call has begun."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.answers, self.held, self.call, self.late = threading.Event(), threading.Event(), threading.Lock(), late
        self.answers.set()

    def set(self, key: str, value: str) -> None:  # pyrefly: ignore
        if self.late:
            self.wait_for_answer()
        with self.call:
            if not self.late:
                self.wait_for_answer()
            super().set(key, value)

    def wait_for_answer(self) -> None:
        if threading.current_thread().name == "heartbeat" and not self.answers.is_set():
            self.held.set()
            self.answers.wait(PATIENCE)


def test_the_last_beat_is_the_last() -> None:
    """A beat that was on its way when the rank closed must not come after its farewell: it would be missed."""
    store = SlowStore(late=True)
    beating = alone(store=store, timeout=PATIENCE)
    beating.interval = 0.1
    beating.start()
    store.answers.clear()
    assert store.held.wait(PATIENCE)
    closing = threading.Thread(target=beating.leave, args=("",))
    closing.start()
    assert beating.closing.wait(PATIENCE)
    store.answers.set()
    closing.join(PATIENCE)
    beating.thread.join(PATIENCE)
    assert heartbeat.Beat(*json.loads(store.get("beat/0"))).left == ""


def test_closing_does_not_wait_for_a_store_that_is_gone() -> None:
    store = SlowStore()
    beating = alone(store=store, timeout=0.4)
    beating.start()
    store.answers.clear()
    assert store.held.wait(PATIENCE)
    beating.leave("an error")
    assert not store.answers.is_set() and beating.thread.is_alive(), "the store has not answered yet"
    store.answers.set()


def test_a_rank_that_ends_by_itself_in_the_grace_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(heartbeat, "GRACE_SECONDS", PATIENCE)
    beating = alone(ends=ends, timeout=0.4)
    beating.store.set("fault", json.dumps(Fault("lost rank 1")))
    beating.start()
    wait_until(lambda: beating.fault is not None, "fault")
    beating.leave("my own error")
    beating.guard.join(PATIENCE)
    assert not beating.guard.is_alive() and not ends


class BrokenPipe(io.StringIO):
    """stderr, when the launcher that read it is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        raise OSError("no file")


def test_it_ends_though_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    alone(tmp_path / "stacks", ends).stop(Fault("lost rank 1"))
    assert ends == [75]
    assert "lost rank 1" in (tmp_path / "stacks" / "rank_0000.txt").read_text()


def test_it_ends_though_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    with pytest.raises(OSError, match="no file"):  # `os._exit` comes before anyone sees it
        alone(tmp_path / "missing" / "stacks", ends).stop(Fault("rank 1 ended by an error", 65))
    assert ends == [65]


def test_it_ends_though_the_device_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[int] = []
    beating = alone(tmp_path / "stacks", ends)

    def pending() -> str:
        raise RuntimeError("CUDA error")

    beating.pending = pending
    beating.stop(Fault("lost rank 1"))
    assert ends == [75] and "lost rank 1" in capfd.readouterr().err
