"""A run measures its saves, and says once that a stop signal would not leave it the time for one."""

import dataclasses
from pathlib import Path

import pytest

from handgrad.run.open import train
from handgrad.run.saves import DEFAULT_SECONDS, VARIABLE, grace_seconds, too_slow
from handgrad.settings.config import RunConfig
from tests.test_runs import records


@pytest.mark.parametrize("grace", ["0", "300"])
def test_saves_are_timed(config: RunConfig, grace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a grace of nothing is too short for any."""
    monkeypatch.setenv(VARIABLE, grace)
    train(dataclasses.replace(config, sample_tokens=0, eval_every=0))
    saves = records(config.out, ("save",))
    assert [save["step"] for save in saves] == [4, 8, 12]
    assert all(save["seconds"] > 0 and save["pause_seconds"] > 0 for save in saves)
    log = (Path(config.out) / "log.txt").read_text()
    assert log.count("a stop takes") == (grace == "0")


def test_the_grace_of_launchers() -> None:
    assert grace_seconds({}) == grace_seconds({VARIABLE: "soon"}) == DEFAULT_SECONDS
    assert not too_slow(27.0, 3.0, {}) and not too_slow(250.0, 3.0, {VARIABLE: "300"})
    line = too_slow(42.0, 3.0, {})
    assert line.startswith("a stop takes 45.0 s (42.0 s to save after a step of 3.0 s), longer than the 30 s")
    assert f"{VARIABLE}=90" in line and "TERM@90" in line


def test_a_stop_may_find_a_save_under_way() -> None:
    assert not too_slow(13.0, 3.0, {}, 13.0)
    times = "43.0 s (20.0 s to save after a step of 3.0 s and 20.0 s of a save under way)"
    assert too_slow(20.0, 3.0, {}, 20.0).startswith(f"a stop takes {times}, longer than the 30 s")
