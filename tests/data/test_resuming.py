"""One result for any number of workers, and whatever is killed: the rerun goes on and gives the same bytes."""

import errno
import json
import multiprocessing
import os
import signal

import pytest

from handgrad.data import prepare as module, writer
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import StorageError
from tests.data.conftest import contents, everything


@pytest.mark.nightly(but=["files"])
@pytest.mark.parametrize("source", ["files", "stories"])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, make_text, small_units, source):
    given = str(everything(tmp_path, make_text)) if source == "files" else "stories"
    limit = 0 if source == "files" else 150
    results = []
    for count in (1, 2, 3):
        out = tmp_path / f"out{count}"
        prepare(PrepareOptions(given, out, "gpt2", workers=count, shard_tokens=5000, documents=limit))
        results.append(contents(out))
    assert results[0] == results[1] == results[2] and len(results[0]) > 6


def test_no_worker_outlives_a_failure(tmp_path, make_text, small_units):
    others = {*multiprocessing.active_children()}  # of another test in this process

    def fail(progress):
        assert {*multiprocessing.active_children()} - others
        raise ZeroDivisionError

    options = PrepareOptions(str(everything(tmp_path, make_text)), tmp_path / "out", tokenizer="bytes", workers=2)
    with pytest.raises(ZeroDivisionError) as held:  # the traceback keeps every frame alive
        prepare(options, fail)
    assert not {*multiprocessing.active_children()} - others and held.traceback


def test_workers_live_on_after_a_stray_close(tmp_path, make_text, small_units):
    """A child of multiprocessing takes the end of a pipe for its parent's death; here only the pipe ends."""
    closed, others = [], {*multiprocessing.active_children()}  # of other tests in this process

    def close(progress):
        for child in {*multiprocessing.active_children()} - others if not closed else ():
            *_, pipe = child._popen.finalizer._args
            end = os.open(os.devnull, os.O_WRONLY)
            os.dup2(end, pipe)  # the child sees the end of the pipe, the descriptor stays this process's
            os.close(end)
            closed.append(child.pid)

    source = str(everything(tmp_path, make_text))
    for name, progress in (("control", None), ("out", close)):
        prepare(PrepareOptions(source, tmp_path / name, "gpt2", workers=2, shard_tokens=5000), progress)
    assert len(closed) == 2 and contents(tmp_path / "out") == contents(tmp_path / "control")


class Kill:
    """A progress callback that kills one worker after some units."""

    def __init__(self, after: int):
        self.calls, self.after, self.killed = 0, after, 0
        self.others = {*multiprocessing.active_children()}  # of other tests in this process

    def __call__(self, progress):
        self.calls += 1
        children = [*{*multiprocessing.active_children()} - self.others]
        if self.calls == self.after and children:
            os.kill(children[0].pid, signal.SIGKILL)
            self.killed = children[0].pid


@pytest.mark.fault(25)
def test_a_killed_worker_is_named_and_the_rerun_gives_the_same_bytes(tmp_path, make_text, small_units, monkeypatch):
    source = str(everything(tmp_path, make_text))
    prepare(PrepareOptions(source, tmp_path / "control", "gpt2", workers=2, shard_tokens=5000))
    monkeypatch.setattr(module, "CHECKPOINT_UNITS", 1000)  # only the failure itself journals
    kill, options = Kill(after=5), PrepareOptions(source, tmp_path / "out", "gpt2", workers=2, shard_tokens=5000)
    with pytest.raises(StorageError, match="killed"):
        prepare(options, kill)
    assert kill.killed and not options.out.exists()
    done = json.loads(json.loads((tmp_path / "out.partial/journal.json").read_text())[1])["units_done"]
    assert done >= 5
    again = []
    tokenize = writer.tokenize
    monkeypatch.setattr(writer, "tokenize", lambda *a: again.append(1) or tokenize(*a))
    prepare(PrepareOptions(source, options.out, "gpt2", workers=1, shard_tokens=5000))
    assert contents(options.out) == contents(tmp_path / "control")
    monkeypatch.setattr(writer, "tokenize", tokenize)
    total = len(again) + done
    again.clear()
    monkeypatch.setattr(writer, "tokenize", lambda *a: again.append(1) or tokenize(*a))
    prepare(PrepareOptions(source, tmp_path / "full", "gpt2", workers=1, shard_tokens=5000))
    assert len(again) == total  # what was done was not done again


@pytest.mark.fault(25)
@pytest.mark.parametrize("spec", ["gpt2", "bpe:300"])
def test_the_main_process_killed_anywhere(tmp_path, make_text, small_units, spec):
    source = str(everything(tmp_path, make_text))
    options = PrepareOptions(source, tmp_path / "out", spec, workers=1, shard_tokens=3000)
    prepare(PrepareOptions(source, tmp_path / "control", spec, workers=1, shard_tokens=3000))
    calls = 0

    class Killed(BaseException):
        pass

    def stop(progress):
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise Killed

    stops = 0
    while not options.out.exists():  # four units on, two checkpoints, and two of them lost or not
        try:
            prepare(options, stop)
        except Killed:
            stops += 1
            assert stops < 50
    assert stops > 5 and contents(options.out) == contents(tmp_path / "control")


@pytest.mark.parametrize("damage", ["journal", "shard", "tokenizer", "options", "source"])
def test_a_partial_folder_that_does_not_fit_is_started_over(tmp_path, make_text, small_units, damage):
    source = tmp_path / "a.txt"
    source.write_text(make_text(40_000))
    options = PrepareOptions(str(source), tmp_path / "out", "bpe:300", workers=1)

    def stop(progress):
        if progress.tokens > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, stop)
    partial = tmp_path / "out.partial"
    if damage == "journal":
        (partial / "journal.json").write_bytes(
            (partial / "journal.json").read_bytes().replace(b"units_done", b"units_dome")
        )
    elif damage == "shard":
        os.truncate(partial / "train_000000.bin", 1030)
    elif damage == "tokenizer":
        (partial / "tokenizer.json").write_text("{}")
    elif damage == "options":
        options = PrepareOptions(str(source), tmp_path / "out", "bpe:300", workers=1, validation_fraction=0.2)
    else:
        source.write_text(make_text(40_000, seed=9))
    result = prepare(options)
    control = PrepareOptions(
        str(source), tmp_path / "control", "bpe:300", workers=1, validation_fraction=options.validation_fraction
    )
    assert contents(result.dataset.folder) == contents(prepare(control).dataset.folder)


@pytest.mark.parametrize("failing", [1, 4, 9])
def test_a_full_disk(tmp_path, make_text, small_units, monkeypatch, failing):
    (tmp_path / "a.txt").write_text(make_text(20_000))
    options, calls, fsync = PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", "gpt2", workers=1), [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        prepare(options)
    assert len(calls) == failing and not options.out.exists()
    result = prepare(options).dataset  # the control, on the same partial folder
    assert sum(s.tokens.size for s in result.splits["train"]) == result.tokens("train")
