"""`handgrad.Training` is the run of the command: the same bits in whatever pieces, stopped and resumed by either; and
`handgrad.metrics` follows it."""

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import handgrad
from handgrad import errors
from handgrad.api import records as api_records
from handgrad.errors import ConfigError, NumericsError, Preempted, UsageError
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere, interrupt_at, launch_ahead, records, same_bits


@pytest.fixture(autouse=True)
def ctrl_c_means_something() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["serial", "ahead"])
def launching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the loop: each step waited for, as on a CPU, and the next one launched first, as on a GPU."""
    if request.param == "ahead":
        launch_ahead(monkeypatch)
    return request.param


class Enough(Exception):
    """An exception from a user's callback."""


# The same bits.


@pytest.mark.usefixtures("launching")
def test_steps_in_pieces_are_the_run_of_the_command(finished: RunConfig) -> None:
    config = elsewhere(finished, "pieces")
    told: list = []
    with handgrad.Training(config, quiet=True) as run:
        made = [*run.steps(1, told.append), *run.steps(4, told.append), *run.steps(2), *run.steps()]
        assert run.steps() == [] and run.completed == 12
        assert run.validation_loss == records(config.out, ("validation",))[-1]["loss"]
    same_bits(finished.out, config.out, 12)
    assert [step.step for step in made] == list(range(1, 13)) and told == made[:5]
    names = ("step", "loss", "norm", "learning_rate", "skipped")
    assert [{n: getattr(step, n) for n in names} for step in made] == [
        {n: record[n] for n in names} for record in records(finished.out, ("step",))
    ]
    assert all(step.tokens_per_second > 0 for step in made)


def test_train_is_the_command(finished: RunConfig, capsys: pytest.CaptureFixture) -> None:
    config = elsewhere(finished, "function")
    capsys.readouterr()
    loss = handgrad.train(config)
    same_bits(finished.out, config.out, 12)
    assert loss == records(config.out, ("validation",))[-1]["loss"]
    assert "step 12/12 | loss" in capsys.readouterr().out
    assert handgrad.train(config, quiet=True) is None and capsys.readouterr().out == ""


def test_what_one_began_the_other_goes_on_with(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, closed; the command, killed; Training again, in a `with` block that an error leaves; the command."""
    config = elsewhere(finished, "turns")
    run = handgrad.Training(config, quiet=True)
    run.steps(3)
    run.close()
    assert (Path(config.out) / "checkpoints" / "step_00000003").is_dir(), "close saves"
    interrupt_at(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), handgrad.Training(config, quiet=True) as run:
        assert run.completed == 4
        run.steps(3)
        _ = 1 // 0
    assert (Path(config.out) / "checkpoints" / "step_00000007").is_dir(), "an error between steps loses none"
    train(config)
    same_bits(finished.out, config.out, 12)


# What ends the steps.


def test_an_exception_of_the_callback_loses_nothing(finished: RunConfig, launching: str) -> None:
    """The run stands after a whole step: the one that raised, or the one that was under way."""
    config = elsewhere(finished, "raising")
    told: list[int] = []

    def enough(step) -> None:
        told.append(step.step)
        if step.step == 6:
            raise Enough

    with handgrad.Training(config, quiet=True, eval_every=100, save_every=100, sample_every=100) as run:
        with pytest.raises(Enough):
            run.steps(on_step=enough)
        assert run.completed == (7 if launching == "ahead" else 6)
        assert told == [1, 2, 3, 4, 5, 6]
        assert not list((Path(config.out) / "checkpoints").iterdir()), "and nothing is saved that was not due"
        left = 12 - run.completed
        assert len(run.steps()) == left
    assert records(config.out, ("step",)) == records(finished.out, ("step",))
    weights = [handgrad.load(out).flat for out in (finished.out, config.out)]
    assert torch.equal(*weights)


def test_ctrl_c_finishes_the_step_and_saves(finished: RunConfig, launching: str) -> None:
    config = elsewhere(finished, "interrupted")
    before = signal.getsignal(signal.SIGINT)

    def press(step) -> None:
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with handgrad.Training(config, quiet=True) as run:
        with pytest.raises(KeyboardInterrupt, match=f"stopped by SIGINT after step {5 + (launching == 'ahead')}"):
            run.steps(on_step=press)
        assert (Path(config.out) / "checkpoints" / f"step_{run.completed:08d}").is_dir()
        assert signal.getsignal(signal.SIGINT) is before, "between steps signals are the user's"
        run.steps()
    same_bits(finished.out, config.out, 12)


def test_a_second_ctrl_c_is_raised_at_once(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step; the run then has to be opened again, and goes on from its checkpoint."""
    config = elsewhere(finished, "twice")
    original = TrainStep.finish

    def pressed_twice(training, step):
        if step == 5:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        original(training, step)

    monkeypatch.setattr(TrainStep, "finish", pressed_twice)
    monkeypatch.setattr(errors, "REPEAT_SECONDS", 0.0)  # as if later than that
    run = handgrad.Training(config, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        run.steps()
    monkeypatch.undo()
    for again in (run.steps, run.save):
        with pytest.raises(UsageError, match="ended within a step; close it and open it again"):
            again()
    run.close()
    assert not (Path(config.out) / "checkpoints" / "step_00000005").exists(), "what is torn is not saved"
    with handgrad.Training(config, quiet=True) as run:
        assert run.completed == 4
        run.steps()
    same_bits(finished.out, config.out, 12)


def test_sigterm_is_preempted(config: RunConfig) -> None:
    with handgrad.Training(config, quiet=True) as run:
        with pytest.raises(Preempted, match="after step 2"):
            run.steps(on_step=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.step == 2 else None)
        assert len(run.steps(1)) == 1


@pytest.mark.parametrize("step", [2, 12])
def test_ctrl_c_in_the_last_callback_is_not_lost(config: RunConfig, step: int) -> None:
    """A stop is noticed also where no step comes after it."""
    with handgrad.Training(config, quiet=True) as run:
        with pytest.raises(KeyboardInterrupt):
            run.steps(step, lambda made: os.kill(os.getpid(), signal.SIGINT) if made.step == step else None)
        assert run.completed == step and len(run.steps()) == 12 - step


def test_a_thread_may_train(finished: RunConfig) -> None:
    """Outside the main thread Python allows no signal handlers."""
    config = elsewhere(finished, "thread")
    thread = threading.Thread(target=handgrad.train, args=(config,), kwargs={"quiet": True})
    thread.start()
    thread.join(600)
    same_bits(finished.out, config.out, 12)


def test_numbers_that_are_not_finite_are_not_saved(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainStep.result

    def poisoned(training, step):
        result = original(training, step)
        return dataclasses.replace(result, norm=float("inf"), skipped="norm is inf") if step == 1 else result

    monkeypatch.setattr(TrainStep, "result", poisoned)
    with handgrad.Training(config, quiet=True) as run:
        assert run.steps(2)[1].skipped == "norm is inf"
        with pytest.raises(NumericsError, match="step 2 are not finite and were not saved"):
            run.save()
    assert not list((Path(config.out) / "checkpoints").iterdir())


# The folder and the weights.


def test_the_folder_is_held_until_it_is_closed(config: RunConfig) -> None:
    with handgrad.Training(config, quiet=True) as run:
        with pytest.raises(ConfigError, match=r"or a `handgrad\.Training` that is not closed"):
            handgrad.Training(config)
        for count in (0, 2.0, "3"):
            with pytest.raises(UsageError, match=f"expected a whole number of steps, 1 or more, found {count!r}"):
                run.steps(count)
        for action in (run.steps, run.save, run.close):
            with pytest.raises(UsageError, match=r"while it makes a step|cannot make or save steps itself"):
                run.steps(1, lambda step, action=action: action())
        assert run.save().name == "step_00000003" and "3 of 12 steps" in repr(run)
    assert "closed" in repr(run)
    run.close()
    for action in (run.steps, run.save, run.model):
        with pytest.raises(UsageError, match="is closed; open it again"):
            action()
    with handgrad.Training(config, quiet=True) as again:
        assert again.completed == 3


@pytest.mark.nightly(but=["ahead-bf16-4", "serial-fp32-0"])
@pytest.mark.parametrize(("precision", "lanes"), [("fp32", 0), ("bf16", 4)])
def test_a_model_of_a_run_is_a_copy_of_now(config: RunConfig, launching: str, precision: str, lanes: int) -> None:
    """Also inside of a callback, while the next step may be under way: the weights of its checkpoint."""
    config = dataclasses.replace(config, precision=precision, lanes=lanes, micro_batch=2, save_every=4)
    models: dict[int, handgrad.Model] = {}
    with handgrad.Training(config, quiet=True) as run:
        run.steps(8, lambda step: models.update({step.step: run.model()}))
        before = models[4].flat.clone()
        for step in (4, 8):
            saved = handgrad.load(Path(config.out) / "checkpoints" / f"step_{step:08d}", device="cpu", precision=precision)
            assert torch.equal(models[step].flat, saved.flat) and models[step].origin["step"] == step
        assert models[8].generate("the", max_tokens=9) == saved.generate("the", max_tokens=9)
        assert models[3].loss("the river") != models[4].loss("the river")
        run.steps(1)
        assert torch.equal(models[4].flat, before)
        loss = handgrad.evaluate(run.model(), eval_tokens=64).loss
    assert models[8].loss("the river") == saved.loss("the river") and loss > 0


# The record.


def test_metrics_of_a_finished_run(finished: RunConfig) -> None:
    found = list(handgrad.metrics(finished.out))
    assert found[0]["kind"] == "run" and found[-1] == {"kind": "end", "step": 12}
    assert [r["step"] for r in handgrad.metrics(finished.out, "step")] == list(range(1, 13))
    assert [r["step"] for r in handgrad.metrics(finished.out, "validation", follow=True)] == [6, 12]
    assert list(handgrad.metrics(finished.out, follow=True)) == found
    path = Path(finished.out) / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text + '{"kind": "evaluation", "step": 12}\n')  # made after the run
    assert len(list(handgrad.metrics(finished.out, follow=True))) == len(found) + 1
    path.write_text(text)
    path.write_text(path.read_text() + '{"kind": "st')
    assert list(handgrad.metrics(finished.out)) == found, "a line that is not all there yet is none"
    path.write_text('{"kind": "run"}\n[]\n')
    with pytest.raises(handgrad.HandgradError, match=r"expected a JSON object, found \[\] in line 2 of .*metrics\.jsonl"):
        list(handgrad.metrics(finished.out))
    with pytest.raises(handgrad.HandgradError, match=r"expected a run with metrics\.jsonl"):
        handgrad.metrics(finished.out + "x")


def test_metrics_follow_a_run_that_is_stopped_and_resumed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before its first step; steps that the resumed run does again come again; then it ends."""
    monkeypatch.setattr(api_records, "POLL_SECONDS", 0.002)
    found: list[dict] = []
    caught_up = threading.Event()

    def follow() -> None:
        for record in handgrad.metrics(config.out, "step", follow=True):
            found.append(record)
            if record["step"] == 6:
                caught_up.set()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        interrupt_at(patch, 6)
        handgrad.train(config, quiet=True)
    assert caught_up.wait(600)
    handgrad.train(config, quiet=True)
    follower.join(600)
    assert not follower.is_alive()
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 12]


def test_what_a_resumed_run_wrote_anew_is_told_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is word for word what stood there before, after the first line that is not."""
    monkeypatch.setattr(api_records, "POLL_SECONDS", 0.002)

    def write(*kinds: str) -> None:
        lines = "".join(f'{{"kind": "{kind}"}}\n' for kind in kinds)
        (tmp_path / "new").write_text(lines)
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")

    write("run", "step", "sample", "event")
    following = handgrad.metrics(tmp_path, follow=True)
    assert [next(following)["kind"] for _ in range(4)] == ["run", "step", "sample", "event"]
    write("run", "gpu", "sample", "event")
    assert [next(following)["kind"] for _ in range(3)] == ["gpu", "sample", "event"]
    write("run", "gpu", "sample", "event", "end")
    assert [record["kind"] for record in following] == ["end"]
