"""The tasks: reads their files, and words the question of a row as lm-eval does, and as llm.c does where it differs.

lm-eval: EleutherAI's lm-evaluation-harness 0.4 (its tasks hellaswag, mmlu, arc_easy, arc_challenge, lambada_openai). llm.c:
its dev/data/hellaswag.py and dev/data/mmlu.py.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path

from handgrad.data.sources import batches, open_parquet, open_plain, reading
from handgrad.errors import DataError, UsageError
from handgrad.files import file_sha256
from handgrad.names import nearest_name
from handgrad.parsing import Record, as_record, numbered_lines, parse_json, parse_record

SHOTS = "mmlu_dev"  # solved questions that precede each question of mmlu
MOST_SHOTS = 5
MOST_BYTES = 256 << 20  # of an uncompressed file, which is held in memory
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")


# A file's rows.


def read_rows(path: Path) -> Iterator[Record]:
    """The rows of a file. `UsageError`: none, or an unknown ending; `DataError`: damaged; `StorageError`: unreadable."""
    if not path.is_file():
        raise UsageError(f"expected a task's file at {path}, found none; give NAME=FILE, or a known NAME for the Hub's")
    if not (name := path.name.lower()).endswith(SUFFIXES):
        raise UsageError(f"expected a file named {', '.join(SUFFIXES)}, found {path}; rename it if it is one of these")
    if name.endswith(".parquet"):
        with open_parquet(path) as file:
            rows = (batch.slice(n, 1).to_pylist()[0] for batch in batches(file) for n in range(batch.num_rows))
            characters = 0
            for number, row in enumerate(rows, start=1):
                characters += len(str(row))
                check_size(characters, path)
                yield Record(row, f"row {number} of {path}")
        return
    with reading(path), open_plain(path) as file:
        content = file.read(MOST_BYTES + 1)
    check_size(len(content), path)
    if name.endswith(".txt"):
        yield from text_rows(content, path)
    elif name.endswith(".json"):
        yield from json_rows(content, path)
    else:
        yield from (parse_record(line, where) for line, where in numbered_lines(content, path))


def check_size(size: int, path: Path) -> None:
    if size > MOST_BYTES:
        raise DataError(f"expected a task of at most {MOST_BYTES} bytes, found more in {path}; give a part of it")


def text_rows(content: bytes, path: Path) -> Iterator[Record]:
    """A text per line."""
    for line, where in numbered_lines(content, path):
        try:
            yield Record({"text": line.decode().removesuffix("\r")}, where)
        except UnicodeDecodeError:
            raise DataError(f"expected UTF-8, found other bytes in {where}; convert it, for example with iconv") from None


def json_rows(content: bytes, path: Path) -> Iterator[Record]:
    """A list of objects; or an object per line, which the Hub names .json as well."""
    try:
        loaded = parse_json(content)
    except JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DataError(f"expected JSON, found {error.msg} in line {error.lineno} of {path}; repair the file") from None
        yield from (parse_record(line, where) for line, where in numbered_lines(content, path))
        return
    except ValueError as error:
        raise DataError(f"expected a list of objects in UTF-8, found {error!s:.200} in {path}; repair the file") from None
    for number, row in enumerate(loaded if isinstance(loaded, list) else [loaded], start=1):
        yield as_record(row, f"entry {number} of {path}")


# A row's question.


@dataclass(frozen=True)
class Example:
    """A question: the likeliest of the `continuations` of `context`. `apart`: the same for llm.c, as (context,
    continuations), which it encodes separately."""

    where: str
    context: str
    continuations: tuple[str, ...]
    choices: tuple[str, ...]  # the answers whose lengths count
    answer: int
    apart: tuple[str, tuple[str, ...]] = ("", ())


Ask = Callable[[Record, Sequence[Record]], Example]  # (row, solved rows) -> its question


def with_blanks(choices: Sequence[str]) -> tuple[str, ...]:
    """Puts lm-eval's target delimiter in front of each choice."""
    return tuple(" " + choice for choice in choices)


def cleaned(text: str) -> str:
    """Removes [title], [header] and [step] of HellaSwag's WikiHow half, and one of two blanks, as lm-eval does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def ask_hellaswag(row: Record, solved: Sequence[Record] = ()) -> Example:
    endings = row.texts("endings")
    apart = (row.text("ctx"), with_blanks(endings)) if "ctx" in row.fields else ("", ())
    answer = row.count("label", len(endings), or_text=True)
    if "ctx_a" not in row.fields and "ctx" in row.fields:  # a file for llm.c's scoring only
        return Example(row.where, "", (), (), answer, apart)
    context = cleaned(f"{row.text('activity_label')}: {row.text('ctx_a')} {row.text('ctx_b').capitalize()}")
    choices = tuple(map(cleaned, endings))
    return Example(row.where, context, with_blanks(choices), choices, answer, apart)


LETTERS = ("A", "B", "C", "D")


def mmlu_question(row: Record) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row.texts("choices", count=4), strict=True)]
    return "\n".join([row.text("question").strip(), *lines, "Answer:"])


def ask_mmlu(row: Record, solved: Sequence[Record] = ()) -> Example:
    subject = row.text("subject")
    shots = [shot for shot in solved if shot.text("subject") == subject][:MOST_SHOTS]
    prompt = [f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."]
    prompt += [f"{mmlu_question(shot)} {LETTERS[shot.count('answer', 4, or_text=True)]}" for shot in shots]
    context = "\n\n".join([*prompt, mmlu_question(row)])
    return Example(row.where, context, with_blanks(LETTERS), LETTERS, row.count("answer", 4, or_text=True))


def ask_arc(row: Record, solved: Sequence[Record] = ()) -> Example:
    inner, key = row.inner("choices"), row.text("answerKey")
    choices, labels = inner.texts("text"), inner.texts("label")
    if len(labels) != len(choices) or key not in labels:
        raise row.wrong("answerKey", f"one of the labels {', '.join(labels)}", key)
    context = f"Question: {row.text('question')}\nAnswer:"
    return Example(row.where, context, with_blanks(choices), choices, labels.index(key))


def ask_lambada(row: Record, solved: Sequence[Record] = ()) -> Example:
    context, _, word = row.text("text").rpartition(" ")
    if not word:
        raise row.wrong("text", "a last word", row.text("text"))
    return Example(row.where, context, (" " + word,), (word,), 0)


def ask_own(row: Record, solved: Sequence[Record] = ()) -> Example:
    if "" in (choices := row.texts("choices")):
        raise row.wrong("choices", "texts that are not empty", list(choices))
    answer = row.count("answer", len(choices), or_text=True)
    return Example(row.where, row.text("context"), with_blanks(choices), choices, answer)


# The tasks.


@dataclass(frozen=True)
class Task:
    """The reader of a task's rows, its metrics, and its (dataset, split) on the Hub."""

    ask: Ask
    metrics: tuple[str, ...]
    hub: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class TaskData:
    """A task with its questions."""

    name: str
    metrics: tuple[str, ...]
    examples: list[Example]
    sources: dict[str, str]  # file name: SHA-256
    notes: list[str] = field(default_factory=list)


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
    """ "hellaswag=FILE,arc_easy" -> {"hellaswag": "FILE", "arc_easy": ""}. Raises `UsageError` for an unknown name without
    a file, and for one given twice."""
    files: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in spec.split(","))):
        name, _, file = (piece.strip() for piece in entry.partition("="))
        if not re.fullmatch(r"[\w.-]+", name) or name in files:
            raise UsageError(f"expected tasks like hellaswag=FILE,lambada, each once, found {entry!r}")
        if not file and name not in (*TASKS, SHOTS):
            known = ", ".join(TASKS)
            raise UsageError(f"unknown task {name!r}{nearest_name(name, TASKS)}; known are {known}, others need NAME=FILE")
        files[name] = file
    if SHOTS in files and "mmlu" not in files:
        raise UsageError(f"{SHOTS} holds the solved questions of mmlu; name mmlu as well")
    if spec.strip() and not files:
        raise UsageError(f"expected tasks like hellaswag=FILE,lambada, found {spec!r}")
    return files


def task_rows(name: str, file: str) -> tuple[list[Path], list[Record]]:
    """The files and rows of a task, from `file` or, without one, from the Hub."""
    if file:
        paths = [Path(file).expanduser()]
    else:
        from handgrad.data.hub import fetch, find_hub  # `--help` lists the tasks, and needs no HTTP

        dataset, split = SHOTS_HUB if name == SHOTS else TASKS[name].hub
        paths = [fetch(source) for source in find_hub(dataset, split)]
    if not (rows := [row for path in paths for row in read_rows(path)]):
        raise DataError(f"expected examples of {name}, found none in {paths[0]}; give another file")
    return paths, rows


def load_tasks(spec: str, limit: int = 0) -> list[TaskData]:
    """The first `limit` questions (0: all) of each task in `spec`. Raises `UsageError` for an unknown task, `DataError`
    with file and line for a broken example, and the errors of a download."""
    files = parse_tasks(spec)
    shot_paths, shots = task_rows(SHOTS, files.pop(SHOTS)) if SHOTS in files else ([], [])
    loaded = []
    for name, file in files.items():
        task = TASKS.get(name, OWN)
        paths, rows = task_rows(name, file)
        examples = [task.ask(row, shots) for row in rows[: limit or None]]
        metrics, notes = possible_metrics(name, task.metrics, examples)
        sources = {path.name: file_sha256(path) for path in (*paths, *(shot_paths if name == "mmlu" else ()))}
        loaded.append(TaskData(name, metrics, examples, sources, notes))
    return loaded


def possible_metrics(name: str, metrics: tuple[str, ...], examples: Sequence[Example]) -> tuple[tuple[str, ...], list[str]]:
    """(the metrics that all examples allow, a note if that excludes one)."""
    if LLMC not in metrics:
        return metrics, []
    without_pairs = next((e.where for e in examples if not e.continuations), "")
    without_apart = next((e.where for e in examples if not e.apart[1]), "")
    if without_pairs and without_apart:
        raise DataError(
            f"expected the same fields in all rows, found no 'ctx_a' in {without_pairs}, no 'ctx' in {without_apart};"
            " repair the file"
        )
    if without_pairs:
        return (LLMC,), [f"{name}: only {LLMC}, which needs 'ctx' alone: no 'ctx_a' and 'ctx_b' in {without_pairs}"]
    if without_apart:
        note = f"{name}: without {LLMC}, which needs 'ctx': there is none in {without_apart}"
        return tuple(metric for metric in metrics if metric != LLMC), [note]
    return metrics, []
