"""The tasks: what a row of each asks a model, in the words of lm-eval, and of llm.c where that differs.

lm-eval: EleutherAI's lm-evaluation-harness 0.4 (its tasks hellaswag, mmlu, arc_easy, arc_challenge, lambada_openai). llm.c:
its dev/data/hellaswag.py and dev/data/mmlu.py.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handgrad.config import nearest_name
from handgrad.data.hub import default_cache, fetch, find_hub
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.task_files import Row, read_rows
from handgrad.files import file_sha256

SHOTS = "mmlu_dev"  # solved questions that precede those of mmlu
MOST_SHOTS = 5


@dataclass(frozen=True)
class Example:
    """A question: which of the `continuations` of `context` is likeliest. `apart`: the same for llm.c, as (context,
    continuations), whose tokens are found apart from each other."""

    where: str
    context: str
    continuations: tuple[str, ...]
    choices: tuple[str, ...]  # the answers that lengths are counted of
    answer: int
    apart: tuple[str, tuple[str, ...]] | None = None


Ask = Callable[[Row, Sequence[Row]], Example]  # (row, solved rows) -> its question


@dataclass(frozen=True)
class Task:
    """How a task's rows are read, what is measured, and which (dataset, split) of the Hub it is."""

    ask: Ask
    metrics: tuple[str, ...]
    hub: tuple[str, str] | None = None


@dataclass(frozen=True)
class TaskData:
    """A task with the questions at hand."""

    name: str
    metrics: tuple[str, ...]
    examples: list[Example]
    sources: dict[str, str]  # file name: SHA-256
    notes: list[str] = field(default_factory=list)


def with_blanks(choices: Sequence[str]) -> tuple[str, ...]:
    """lm-eval's target delimiter in front of each choice."""
    return tuple(" " + choice for choice in choices)


def cleaned(text: str) -> str:
    """HellaSwag's WikiHow half carries [title], [header], [step]; lm-eval's preprocess takes them out, and one of every
    two blanks."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def ask_hellaswag(row: Row, solved: Sequence[Row] = ()) -> Example:
    endings, apart = row.texts("endings"), None
    if "ctx" in row.record:
        apart = row.text("ctx"), with_blanks(endings)
    answer = row.index("label", len(endings))
    if "ctx_a" not in row.record and apart is not None:  # a file that llm.c's scoring alone can use
        return Example(row.where, "", (), (), answer, apart)
    second = row.text("ctx_b")
    context = cleaned(f"{row.text('activity_label')}: {row.text('ctx_a')} {second.capitalize()}")
    choices = tuple(map(cleaned, endings))
    return Example(row.where, context, with_blanks(choices), choices, answer, apart)


LETTERS = ("A", "B", "C", "D")


def mmlu_question(row: Row) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row.texts("choices", count=4), strict=True)]
    return "\n".join([row.text("question").strip(), *lines, "Answer:"])


def ask_mmlu(row: Row, solved: Sequence[Row] = ()) -> Example:
    subject = row.text("subject")
    shots = [shot for shot in solved if shot.text("subject") == subject][:MOST_SHOTS]
    parts = [f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."]
    parts += [f"{mmlu_question(shot)} {LETTERS[shot.index('answer', 4)]}" for shot in shots]
    context = "\n\n".join([*parts, mmlu_question(row)])
    return Example(row.where, context, with_blanks(LETTERS), LETTERS, row.index("answer", 4))


def ask_arc(row: Row, solved: Sequence[Row] = ()) -> Example:
    inner, key = row.inner("choices"), row.text("answerKey")
    choices, labels = inner.texts("text"), inner.texts("label")
    if len(labels) != len(choices) or key not in labels:
        raise row.wrong("answerKey", f"one of the labels {', '.join(labels)}", key)
    context = f"Question: {row.text('question')}\nAnswer:"
    return Example(row.where, context, with_blanks(choices), choices, labels.index(key))


def ask_lambada(row: Row, solved: Sequence[Row] = ()) -> Example:
    context, _, word = row.text("text").rpartition(" ")
    if not word:
        raise row.wrong("text", "a last word", row.text("text"))
    return Example(row.where, context, (" " + word,), (word,), 0)


def ask_own(row: Row, solved: Sequence[Row] = ()) -> Example:
    choices = row.texts("choices")
    if "" in choices:
        raise row.wrong("choices", "texts that are not empty", list(choices))
    return Example(row.where, row.text("context"), with_blanks(choices), choices, row.index("answer", len(choices)))


LLMC = "acc_norm_llmc"
OF_CHOICE = ("acc", "acc_norm", "acc_bytes")
TASKS: dict[str, Task] = {
    "hellaswag": Task(ask_hellaswag, (*OF_CHOICE, LLMC), ("Rowan/hellaswag", "validation")),
    "mmlu": Task(ask_mmlu, ("acc",), ("cais/mmlu:all", "test")),
    "arc_easy": Task(ask_arc, OF_CHOICE, ("allenai/ai2_arc:ARC-Easy", "test")),
    "arc_challenge": Task(ask_arc, OF_CHOICE, ("allenai/ai2_arc:ARC-Challenge", "test")),
    "lambada": Task(ask_lambada, ("acc", "perplexity"), ("EleutherAI/lambada_openai:default", "test")),
}
SHOTS_HUB = ("cais/mmlu:all", "dev")
OWN = Task(ask_own, OF_CHOICE)


def parse_tasks(spec: str) -> dict[str, str]:
    """ "hellaswag=FILE,arc_easy" -> {"hellaswag": "FILE", "arc_easy": ""}. Raises `UsageError` for names that are unknown
    and have no file, or come twice."""
    files: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        name, _, file = (piece.strip() for piece in part.partition("="))
        if not re.fullmatch(r"[\w.-]+", name) or name in files:
            raise UsageError(f"expected tasks like hellaswag=FILE,lambada, each once, found {part!r}")
        if not file and name not in (*TASKS, SHOTS):
            known = ", ".join(TASKS)
            raise UsageError(f"unknown task {name!r}{nearest_name(name, TASKS)}; known are {known}, others need NAME=FILE")
        files[name] = file
    if SHOTS in files and "mmlu" not in files:
        raise UsageError(f"{SHOTS} holds the solved questions of mmlu; name mmlu, too")
    if spec.strip() and not files:
        raise UsageError(f"expected tasks like hellaswag=FILE,lambada, found {spec!r}")
    return files


def task_rows(name: str, file: str, cache: Path) -> tuple[list[Path], list[Row]]:
    """The files and rows of a task, from `file` or, without one, from the Hub through `cache`."""
    if file:
        paths = [Path(file).expanduser()]
    else:
        hub = SHOTS_HUB if name == SHOTS else TASKS[name].hub
        assert hub is not None
        paths = [fetch(source) for source in find_hub(hub[0], cache, split=hub[1])]
    rows = [row for path in paths for row in read_rows(path)]
    if not rows:
        raise DataError(f"expected examples of {name}, found none in {paths[0]}; give another file")
    return paths, rows


def load_tasks(spec: str, limit: int = 0, cache: Path | None = None) -> list[TaskData]:
    """The questions of all tasks in `spec`, of each the first `limit` (0: all).

    Raises `UsageError` for what is no task, `DataError` with file and line for what is no example, and whatever a download
    raises.
    """
    cache, files, loaded = cache or default_cache(), parse_tasks(spec), []
    shots: tuple[list[Path], list[Row]] = task_rows(SHOTS, files[SHOTS], cache) if SHOTS in files else ([], [])
    for name, file in files.items():
        if name == SHOTS:
            continue
        task = TASKS.get(name, OWN)
        paths, rows = task_rows(name, file, cache)
        solved: Sequence[Row] = ()
        if name == "mmlu":
            paths, solved = [*paths, *shots[0]], shots[1]
        examples = [task.ask(row, solved) for row in rows[: limit or None]]
        sources = {path.name: file_sha256(path) for path in paths}
        loaded.append(settled(TaskData(name, task.metrics, examples, sources)))
    return loaded


def settled(task: TaskData) -> TaskData:
    """The task with the metrics that all its examples allow, and a note where those are not all."""
    metrics, notes = list(task.metrics), list(task.notes)
    if LLMC in metrics:
        without_pairs = next((e.where for e in task.examples if not e.continuations), "")
        without_apart = next((e.where for e in task.examples if e.apart is None), "")
        if without_pairs:
            if without_apart:
                raise DataError(
                    f"expected the same fields in all rows, found no 'ctx_a' in {without_pairs}, no 'ctx' in"
                    f" {without_apart}; repair the file"
                )
            metrics = [LLMC]
            notes.append(f"{task.name}: only {LLMC}, which needs 'ctx' alone: no 'ctx_a' and 'ctx_b' in {without_pairs}")
        elif without_apart:
            metrics.remove(LLMC)
            notes.append(f"{task.name}: without {LLMC}, which needs 'ctx': there is none in {without_apart}")
    return TaskData(task.name, tuple(metrics), task.examples, task.sources, notes)
