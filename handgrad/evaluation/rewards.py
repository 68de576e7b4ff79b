"""Rewards for answers: built-in functions, and functions of the user's own, in processes with a time limit.

A reward takes (row, answer): a prompt's row with its "messages", and an answer's text without the token that ends it. It
returns a finite number. This module imports no torch: worker processes load it.
"""

import atexit
import contextlib
import hashlib
import importlib.util
import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from handgrad.data import questions
from handgrad.errors import STOPPING, DataError, UsageError
from handgrad.names import nearest_name

Reward = Callable[[Mapping[str, Any], str], float]
PYTHON = "python:"  # before the name of a function that the caller passed
WORKERS, LOADING_SECONDS = 4, 120  # processes for a function of the user's own; the longest time to load it
LARGEST = 1e30  # of a reward's absolute value: differences of rewards are float32 numbers
ENDED = "an end of its process"
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def right(row: Mapping[str, Any], answer: str) -> float:
    """1 for the right answer to a built-in question."""
    if questions.known_answer(row["messages"]) is None:
        asked = row["messages"][-1]["content"]
        raise DataError(f"expected built-in questions, which this reward knows, found {asked!r:.80}; choose another reward")
    return float(questions.check(row["messages"], answer))


def reversed_text(row: Mapping[str, Any], answer: str) -> float:
    """The likeness of an answer to the prompt's last message, reversed: 0 to 1 (difflib's ratio)."""
    return SequenceMatcher(None, answer.strip(), row["messages"][-1]["content"].strip()[::-1], autojunk=False).ratio()


def exact(row: Mapping[str, Any], answer: str) -> float:
    """1 for the row's "answer", but for blanks around it."""
    return float(answer.strip() == str(known(row)).strip())


def last_number(row: Mapping[str, Any], answer: str) -> float:
    """1 if the last number in an answer is the last one in the row's "answer", as after GSM8K's "####"."""
    ours, theirs = (NUMBER.findall(text)[-1:] for text in (answer, str(known(row))))
    return float(bool(ours) and bool(theirs) and float(ours[0].replace(",", "")) == float(theirs[0].replace(",", "")))


def known(row: Mapping[str, Any]) -> Any:
    if row.get("answer") is None:
        raise DataError('expected rows with an "answer", which this reward reads, found one without; choose another reward')
    return row["answer"]


def nothing(row: Mapping[str, Any], answer: str) -> float:
    """0, for answers that only a teacher judges."""
    return 0.0


BUILT_IN: dict[str, Reward] = {"questions": right, "reverse": reversed_text, "exact": exact, "number": last_number}
BUILT_IN["none"] = nothing


def load(spec: str) -> Reward:
    """The function that a setting names. Raises UsageError: there is none."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    file, name = located(spec)
    path = Path(file)
    described = importlib.util.spec_from_file_location(f"handgrad_reward_{path.stem}", path)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    try:
        described.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{file} cannot be loaded: {error!r:.200}; mend it, then start the run again") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"expected a function {name or 'NAME'} in {file}, found none; write {file}:FUNCTION")
    return function


def located(spec: str) -> tuple[str, str]:
    """The file and the name of a function of the user's own. Raises `UsageError`: there is no such file."""
    if spec.startswith(PYTHON):
        raise UsageError(f"the run was started with the function {spec}; give it again, as handgrad.train(reward=...)")
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        near = nearest_name(spec, BUILT_IN)
        raise UsageError(f"reward must be {', '.join(BUILT_IN)} or FILE.py:FUNCTION, found {spec!r}{near}")
    if not Path(file).is_file():
        raise UsageError(f"reward names the file {file}, found none; check the path")
    return file, name


def trusted(spec: str) -> str:
    """The reward that a run's folder names. Raises `UsageError` if it is code: only the user may ask to run some."""
    if spec and spec not in BUILT_IN:
        name = "FILE.py:FUNCTION" if spec.startswith(PYTHON) else spec
        raise UsageError(f"the run's rewards come from {spec}, code that runs only if you name it: --reward {name}")
    return spec


def identity(spec: str) -> str:
    """A built-in reward's or Python function's name, or the SHA-256 of the user's file with the function's name."""
    if spec in BUILT_IN or spec.startswith(PYTHON):
        return spec
    file, name = located(spec)
    return f"{hashlib.sha256(Path(file).read_bytes()).hexdigest()}:{name}"


def checked(value: Any, where: str) -> float:
    """A reward as a number. Raises `UsageError` if it is none, not finite, or too large for float32."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # a number beyond float's range, or whatever the value's own conversion raises
        number = math.nan
    if not abs(number) <= LARGEST:
        expected = "a finite number" if math.isnan(number) else f"a finite number up to {LARGEST:g}"
        raise UsageError(f"expected {expected} as the reward of {where}, found {value!r:.60}; mend the function")
    return number


def named(row: Mapping[str, Any], answer: str) -> str:
    """A prompt and an answer, for a message."""
    return f"the answer {answer!r:.80} to {row['messages'][-1]['content']!r:.80}"


class Rewards:
    """The rewards of a setting. The user's own function runs in `WORKERS` processes, `seconds` an answer, until `close`."""

    def __init__(self, spec: str | Reward, seconds: float):
        """`spec`: a setting, or a function, which is called here without a limit."""
        self.spec, self.seconds = spec, seconds
        self.inside = callable(spec) or spec in BUILT_IN
        self.function = spec if callable(spec) else BUILT_IN.get(spec, nothing)  # a file's runs in workers alone
        self.workers = [] if callable(spec) or self.inside else [Worker(spec)]

    def of(self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]:
        """The reward of each answer. UsageError, with row and text: no finite number, an exception, or too slow."""
        if not self.inside:
            return self.in_processes(rows, answers) if rows else []
        rewards = []
        for row, answer in zip(rows, answers, strict=True):
            try:
                value = self.function(row, answer)
            except DataError:
                raise
            except Exception as error:  # a callable from Python may raise anything
                raise UsageError(f"the reward of {named(row, answer)} raised {error!r:.200}; mend the function") from None
            rewards.append(checked(value, named(row, answer)))
        return rewards

    def in_processes(self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]:
        assert isinstance(self.spec, str)
        self.workers += [Worker(self.spec) for _ in range(min(WORKERS, len(rows)) - len(self.workers))]
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            free.put(worker)

        def earned(row: Mapping[str, Any], answer: str) -> float:
            worker = free.get()
            try:
                return checked(worker.ask(row, answer, self.seconds), named(row, answer))
            finally:
                free.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            try:
                return list(pool.map(earned, rows, answers))
            except BaseException:
                self.close()  # so that no thread waits for an answer
                raise

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.pid:  # a thread may be about to start it anew
                worker.process.kill()
        self.workers = []


class Worker:
    """A process that computes rewards one by one."""

    def __init__(self, spec: str):
        self.spec = spec
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks and the GPU's state
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.spec), daemon=True)
        self.process.start()
        atexit.register(self.process.kill)  # multiprocessing would send it SIGTERM and wait
        theirs.close()
        late = f"{self.spec} took longer than {LOADING_SECONDS} s to load; compute less outside of its functions"
        _, error = self.received(LOADING_SECONDS, late)  # a start does not count as an answer's time
        if error:
            raise UsageError(f"{self.spec} cannot be loaded: found {ENDED}; mend it" if error == ENDED else error)

    def ask(self, row: Mapping[str, Any], answer: str, seconds: float) -> Any:
        """An answer's reward. Raises `UsageError` if the function raised, ended the process or took longer."""
        try:
            self.connection.send((row, answer))
        except OSError:  # it was killed while it waited, as by a system short of memory
            self.start()
            self.connection.send((row, answer))
        of = f"the reward of {named(row, answer)}"
        more = f"mend the function, or give it more: --reward-seconds {math.ceil(2 * seconds)}"
        value, error = self.received(seconds, f"{of} took longer than {seconds:g} s; {more}")
        if error:
            raise UsageError(f"{of} raised {error:.200}; mend the function")
        return value

    def received(self, seconds: float, late: str) -> tuple[Any, str]:
        """(value, error) of the process. Raises `UsageError` with the text `late` after `seconds`."""
        if not self.connection.poll(seconds):
            self.process.kill()
            raise UsageError(late)
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None, ENDED


def serve(connection: Connection, spec: str) -> None:
    """Runs in a worker process: answers (row, answer) with (reward, "") or (None, the error).

    Ctrl-C and a scheduler signal all processes of a run; its own process then finishes and saves the step, for which it
    needs rewards. A handler, unlike SIG_IGN, is not inherited by programs that the function starts."""
    os.setsid()
    for number in (signal.SIGINT, *STOPPING):
        signal.signal(number, lambda *_: None)
    try:
        function = load(spec)
        connection.send((None, ""))
    except UsageError as error:
        connection.send((None, str(error)))
        return
    with contextlib.suppress(EOFError, OSError):  # the run has ended
        while True:
            row, answer = connection.recv()
            try:
                value = function(row, answer)
                reply = float(value) if hasattr(value, "__float__") else repr(value), ""
            except BaseException as error:  # the user's own code may raise anything
                reply = None, repr(error)
            connection.send(reply)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of values with its standard error."""
    average = mean(values)
    return average, math.sqrt(mean((value - average) ** 2 for value in values) / max(1, len(values) - 1))
