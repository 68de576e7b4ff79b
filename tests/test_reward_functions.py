"""Reward functions, built in and the user's own: their numbers, their errors and their processes."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from handgrad.errors import STOPPING, DataError, UsageError
from handgrad.evaluation import rewards
from handgrad.evaluation.rewards import Rewards


def test_built_in_rewards() -> None:
    row = {"messages": [{"role": "user", "content": "abc"}], "answer": "so 3 * 4 = 12\n#### 1,012"}
    assert rewards.reversed_text(row, " cba ") == 1.0 and 0 < rewards.reversed_text(row, "cb") < 1
    assert rewards.last_number(row, "It is 1012.") == 1.0 and rewards.last_number(row, "12") == 0.0
    assert rewards.last_number(row, "none") == 0.0
    assert rewards.exact({**row, "answer": 5}, " 5\n") == 1.0
    with pytest.raises(DataError, match='expected rows with an "answer"'):
        rewards.exact({"messages": []}, "5")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return float('nan')", "expected a finite number as the reward of the answer 'x' to 'up 1.', found nan"),
        ("return 'much'", "expected a finite number as the reward of the answer 'x' to 'up 1.', found"),
        (
            "return 10**400",
            "expected a finite number as the reward of the answer 'x' to 'up 1.', found|raised OverflowError",
        ),
        ("return -1e31", "expected a finite number up to 1e\\+30 as the reward of the answer 'x' to 'up 1.', found -1e"),
        ("raise KeyError('k')", r"the reward of the answer 'x' to 'up 1.' raised KeyError\('k'\)"),
        ("raise KeyboardInterrupt", r"the reward of the answer 'x' to 'up 1.' raised KeyboardInterrupt\(\)"),
        ("raise SystemExit(3)", r"the reward of the answer 'x' to 'up 1.' raised SystemExit\(3\)"),
        ("import os; os._exit(3)", "the reward of the answer 'x' to 'up 1.' raised an end of its process"),
        ("import time; time.sleep(60)", "the reward of the answer 'x' to 'up 1.' took longer than 1 s"),
    ],
)
def test_a_reward_that_fails(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def mine(row, answer):\n    {body}\n")
    own = Rewards(f"{tmp_path / 'own.py'}:mine", 1)
    row = {"messages": [{"role": "user", "content": "up 1?"}]}
    with pytest.raises(UsageError, match=problem):
        own.of([row], ["x"])
    assert not own.workers


def test_rewards_come_from_processes_in_order(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(row, answer):\n    return len(answer) + row['more']\n")
    own = Rewards(f"{tmp_path / 'own.py'}:mine", 20)
    rows = [{"messages": [{"role": "user", "content": "a"}], "more": n} for n in range(20)]
    assert own.of(rows, ["a" * n for n in range(20)]) == [2.0 * n for n in range(20)]
    assert len(own.workers) == rewards.WORKERS and own.of(rows[:1], ["b"]) == [1.0]
    own.close()


OWN = """
import subprocess

def mine(row, answer):
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    return program.wait()
"""


def test_signals_leave_workers_and_a_lost_one_is_replaced(tmp_path: Path) -> None:
    """A terminal and a scheduler signal all processes of a run, which needs rewards to finish its step. Programs that a
    function starts end by signals as ever."""
    (tmp_path / "own.py").write_text(OWN)
    own = Rewards(f"{tmp_path / 'own.py'}:mine", 20)
    row = {"messages": [{"role": "user", "content": "a"}]}
    (process,) = (worker.process for worker in own.workers)
    assert os.getpgid(process.pid) != os.getpgrp(), "Ctrl-C would reach its programs"
    for number in (signal.SIGINT, *STOPPING):
        os.kill(process.pid, number)
    assert own.of([row], ["b"]) == [-signal.SIGTERM] and own.workers[0].process is process and process.is_alive()
    process.kill()
    process.join()
    assert own.of([row], ["b"]) == [-signal.SIGTERM] and own.workers[0].process is not process
    running = own.workers[0].process
    own.workers[0].process = multiprocessing.get_context("spawn").Process()  # about to be started by a thread
    own.close()
    running.kill()


def test_a_program_that_forgets_its_workers_ends(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(row, answer):\n    return 1\n")
    (tmp_path / "program.py").write_text(
        "from handgrad.evaluation.rewards import Rewards\n"
        f"if __name__ == '__main__':\n    own = Rewards('{tmp_path / 'own.py'}:mine', 20)\n"
    )
    subprocess.run([sys.executable, tmp_path / "program.py"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("reversed", "reward must be questions, reverse, exact, number, none or FILE.py:FUNCTION, found 'reversed'"),
        ("nowhere.py:mine", "reward names the file nowhere.py, found none"),
        ("{own}:other", "expected a function other in"),
        ("{broken}:mine", "cannot be loaded: SyntaxError"),
        ("{own}", "reward must be questions, reverse, exact, number, none or FILE.py:FUNCTION, found"),
        ("{leaving}:mine", r"leaving.py cannot be loaded: SystemExit\(3\)"),
        ("{dying}:mine", "dying.py:mine cannot be loaded: found an end of its process; mend it"),
        ("{sleeping}:mine", "sleeping.py:mine took longer than 3 s to load; compute less outside of its functions"),
    ],
)
def test_no_such_reward(spec: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose file does not load, which this process never runs."""
    own, files = "def mine(row, answer):\n    return 1\n", dict[str, Path]()
    starts = {"own": "", "broken": "def mine(\n", "leaving": "raise SystemExit(3)\n"}
    starts |= {"dying": "import os; os._exit(3)\n", "sleeping": "import time; time.sleep(60)\n"}
    for name, start in starts.items():
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(start + own)
    monkeypatch.setattr(rewards, "LOADING_SECONDS", 3 if "sleeping" in spec else 60)
    with pytest.raises(UsageError, match=problem):
        Rewards(spec.format(**files), 1)


@pytest.mark.parametrize("spec", ["reversed", "own.py", "nowhere.py:mine"])
def test_no_reward_has_no_identity(spec: str) -> None:
    with pytest.raises(UsageError, match=r"reward must be questions|reward names the file"):
        rewards.identity(spec)


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), 10**400, None, math.inf, 1e300, "1"])
def test_a_function_of_python_that_returns_no_number(value: Any) -> None:
    row = {"messages": [{"role": "user", "content": "up 1?"}]}
    with pytest.raises(UsageError, match=r"expected a finite number.* as the reward of the answer 'x' to 'up 1"):
        Rewards(lambda row, answer: value, 1).of([row], ["x"])
    assert Rewards(lambda row, answer: torch.tensor(0.5), 1).of([row], ["x"]) == [0.5]


def test_questions_are_the_only_prompts_that_their_reward_knows() -> None:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert [rewards.right({"messages": messages}, answer) for answer in ("2", "3")] == [1.0, 0.0]
    with pytest.raises(DataError, match="expected built-in questions, which this reward knows, found 'up 1"):
        rewards.right({"messages": [{"role": "user", "content": "up 1?"}]}, "x")
