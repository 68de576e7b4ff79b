"""The slow rank: named if it is one, and nobody on a machine that is merely busy."""

import itertools
import json
from pathlib import Path

import pytest

from handgrad.joins.parallel.stragglers import WINDOW_STEPS, WINDOWS, Stragglers

# Milliseconds of each rank's own work, step by step, of a tiny model on two cores: beside the work of others (busy), beside
# three more processes that never rest (loaded), and with a rank that sleeps 200 ms in each step.
RECORDED = json.loads((Path(__file__).parent / "step_times.json").read_text())
SLOW = {"slow_of_two": 1, "slow_of_four": 2}
QUIET = [name for name in RECORDED if name not in SLOW]
NAMED_AFTER = WINDOW_STEPS * WINDOWS


def named(steps: list, every: int = 1) -> list[tuple[int, str]]:
    """(step, line) of each rank that is named, with a report after every `every` steps. `steps`: milliseconds."""
    stragglers, lines = Stragglers(), []
    for step, times in enumerate(steps, 1):
        stragglers.add([time / 1e3 for time in times])
        if step % every == 0 and (found := stragglers.report()) and found[1]:
            lines.append((step, found[1]))
    return lines


@pytest.mark.fault(33)
@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize("every", [1, 10])
def test_nobody_is_slow_on_a_busy_machine(name: str, every: int) -> None:
    """Wherever in the record a run begins."""
    assert len(RECORDED[name]) >= 95
    for start in range(WINDOW_STEPS):
        assert not named(RECORDED[name][start:], every), f"from step {start} on"


@pytest.mark.fault(33)
@pytest.mark.parametrize(("name", "rank"), SLOW.items())
def test_a_rank_that_sleeps_is_named_on_a_busy_machine(name: str, rank: int) -> None:
    """Once, and no other."""
    for start, every in itertools.product(range(WINDOW_STEPS), (1, 10)):
        ((step, line),) = named(RECORDED[name][start:], every)
        assert step == -(-NAMED_AFTER // every) * every and line.startswith(f"rank {rank} is slow: 2")


def test_a_slow_rank_is_named_with_its_time() -> None:
    ((step, line),) = named([(100, 130, 100)] * 40, 10)
    assert step == 30
    assert line == "rank 1 is slow: 130 ms of its own work a step, the median rank 100 ms; all ranks wait for it"


def test_a_rank_that_is_slow_again_is_named_again() -> None:
    slow, well = [(100, 130, 100)] * NAMED_AFTER, [(100, 100, 100)] * NAMED_AFTER
    assert [step for step, _ in named([*slow, *well, *slow])] == [NAMED_AFTER, 3 * NAMED_AFTER]
    assert [step for step, _ in named([*slow, *[(130, 100, 100)] * NAMED_AFTER])] == [NAMED_AFTER, 2 * NAMED_AFTER]


def test_noise_makes_no_straggler() -> None:
    """A rank that is slow in most steps of a window, in two windows of three, or by less than five milliseconds."""
    assert not named([*[(100, 130, 100)] * (WINDOW_STEPS - 1), (100, 100, 100)] * 9)
    window = [(100, 130, 100)] * WINDOW_STEPS
    assert not named([*window, *window, *[(100, 100, 100)] * WINDOW_STEPS] * 4)
    assert not named([(10, 14, 10)] * 99) and not named([(100, 100, 100)] * 99)
    assert not named([*[(130, 100)] * WINDOW_STEPS, *[(100, 130)] * WINDOW_STEPS] * 6), "now the one, now the other"


def test_a_straggler_is_a_tenth_and_five_milliseconds_slower() -> None:
    """Than the median rank, in its median step and in its fastest."""
    for milliseconds, slow in ((111, True), (109, False)):
        assert bool(named([(100, milliseconds, 100)] * NAMED_AFTER)) == slow
    for milliseconds, slow in ((25.2, True), (24.8, False)):
        assert bool(named([(20, milliseconds, 20)] * NAMED_AFTER)) == slow
    for fastest, slow in ((111, True), (109, False)):
        assert bool(named([*[(100, 200, 100)] * (WINDOW_STEPS - 1), (100, fastest, 100)] * WINDOWS)) == slow


def test_the_figures_are_of_the_steps_since_the_last_report() -> None:
    stragglers = Stragglers()
    for times in ((0.1, 0.3), (0.1, 0.2), (0.1, 0.25)):
        stragglers.add(times)
    figures, _ = stragglers.report() or ({}, None)
    assert figures == {"slowest": 1, "slowest_ms": 250.0, "median_ms": 100.0, "steps": 3}
    assert stragglers.report() is None
