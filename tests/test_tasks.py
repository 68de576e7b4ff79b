"""Each task's questions, scored tokens and figures against values worked out by hand."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from handgrad.data.tokenizer import train_bpe
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.likelihoods import Likelihoods, Request
from handgrad.evaluation.scoring import Encoder, make_requests, results_of
from handgrad.evaluation.tasks import (
    Example,
    TaskData,
    ask_arc,
    ask_hellaswag,
    ask_lambada,
    ask_mmlu,
    ask_own,
    load_tasks,
    parse_tasks,
)
from handgrad.parsing import Record

WORDS = [
    "river",
    "stone,",
    "old",
    "Bright",
    "walks",
    "sings.",
    "über",
    "don't",
    "東京",
    "a",
    "hill;",
    "crow’s",
    "[step]",
    "42",
]


def hellaswag_row(draw: random.Random, words: int = 8) -> dict:
    """A made-up row in the shape of the Hub's, with brackets, double blanks and other letters."""

    def text(least: int, most: int) -> str:
        return draw.choice([" ", " ", "  "]).join(draw.choices(WORDS, k=draw.randint(least, most)))

    first, second = text(3, 12) + draw.choice([".", " [title] x"]), draw.choice(["", "he", "the OLD crow"])
    return {
        "ind": draw.randrange(1000),
        "activity_label": draw.choice(["Roof repair", "Play, music"]),
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}".rstrip(),
        "endings": [text(1, words) + draw.choice([".", " [substeps] y", ""]) for _ in range(4)],
        "label": str(draw.randrange(4)),
    }


def row(**record) -> Record:
    return Record(record, "line 1 of x.jsonl")


def test_hellaswag_in_the_words_of_both() -> None:
    """Worked out by hand from lm-eval's rules: `[title]` with its blank becomes a full stop, brackets go, a pair of blanks
    becomes one, ctx_b is capitalised, which also lowers the rest. llm.c takes the texts as they are."""
    asked = ask_hellaswag(
        row(
            activity_label="Food",
            ctx_a="[header] How to cook [title] Wash.  [step] Take it",
            ctx_b="he SAYS",
            ctx="[header] How to cook [title] Wash.  [step] Take it he SAYS",
            endings=[" sings [x]", "a  b", "c", "d"],
            label="2",
        )
    )
    # "Food: [header] How to cook. Wash.  [step] Take it He says", without the brackets, pairs of blanks halved once
    assert asked.context == "Food: How to cook. Wash.  Take it He says"
    assert asked.choices == ("sings ", "a b", "c", "d") and asked.continuations[0] == " sings "
    assert asked.answer == 2
    context, endings = asked.apart
    assert context == "[header] How to cook [title] Wash.  [step] Take it he SAYS" and endings[1] == " a  b"


def test_mmlu_with_and_without_solved_questions() -> None:
    one = row(question=" 1+1? ", subject="abstract_algebra", choices=["1", "2", "3", "4"], answer=1)
    asked = ask_mmlu(one)
    opening = "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
    assert asked.context == opening + "1+1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    assert asked.continuations == (" A", " B", " C", " D") and asked.answer == 1
    solved = [row(question=f"{n}?", subject="abstract_algebra", choices=list("wxyz"), answer=n % 4) for n in range(7)]
    solved.insert(0, row(question="other", subject="virology", choices=list("wxyz"), answer=0))
    asked = ask_mmlu(one, solved)
    shots = "".join(f"{n}?\nA. w\nB. x\nC. y\nD. z\nAnswer: {'ABCD'[n % 4]}\n\n" for n in range(5))
    assert asked.context == opening + shots + "1+1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"


def test_arc_lambada_and_own_files() -> None:
    choices = {"text": ["ice", "steam", "dew"], "label": ["1", "2", "3"]}
    asked = ask_arc(row(question="What?", choices=choices, answerKey="2"))
    assert (asked.context, asked.continuations, asked.answer) == ("Question: What?\nAnswer:", (" ice", " steam", " dew"), 1)
    asked = ask_lambada(row(text="he opened  the door"))
    assert (asked.context, asked.continuations) == ("he opened  the", (" door",))
    asked = ask_own(row(context="One and one", choices=["is two", "is three"], answer=0))
    assert (asked.context, asked.continuations, asked.answer) == ("One and one", (" is two", " is three"), 0)


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "bpe"])
def test_tokens_are_those_of_the_whole_text(kind: str) -> None:
    """The definition: encode context + continuation, after as many tokens as the context alone has; on awkward texts."""
    tokenizer = train_bpe(["the old river's stone 's 42 über " * 9], 300) if kind == "bpe" else load_tokenizer(kind)
    encoder = Encoder(tokenizer)
    pieces = ["a", "end.", "it'", "x \t", "blanks   ", "\n", "東京", "1 ", "ü\u00a0", "'s", "\x1c", "e\u3000"]
    for context in pieces:
        for rest in [" river", "  two", " 's", "joined", " ", "'s", "\n\nnew", " \u3000x", "42", " 🦉"]:
            ids, scored = encoder.together(context, rest)
            whole = tokenizer.encode(context + rest).tolist()
            kept = len(tokenizer.encode(context.rstrip()))
            assert ids.tolist() == whole and scored == len(whole) - kept, (context, rest)
    ids, scored = encoder.together("", " river")
    assert ids[0] == tokenizer.end_of_text and scored == len(ids) - 1
    ids, scored = encoder.apart("blank ", " river")
    assert ids.tolist() == [*tokenizer.encode("blank ").tolist(), *tokenizer.encode(" river").tolist()]


def a_task(metrics: tuple[str, ...], *examples: Example) -> TaskData:
    return TaskData("made-up", metrics, list(examples), {})


def test_figures_by_hand() -> None:
    """Three questions. Sums -6, -4, -9 of 12, 2 and 3 characters: the second is likeliest; by character it is -0.5, -2, -3
    and the first wins; "ü" has two bytes, which decides the third question."""
    metrics = ("acc", "acc_norm", "acc_bytes")
    one = Example("w", "c", (" x",) * 3, ("a" * 12, "bb", "ccc"), 1)
    two = Example("w", "c", (" x",) * 3, ("a" * 12, "bb", "ccc"), 0)
    three = Example("w", "c", (" x", " y"), ("üüü", "abcd"), 0)  # -6/3 < -7/4, but -6/6 > -7/4
    sums = np.array([-6.0, -4, -9, -6, -4, -9, -6, -7])
    found = Likelihoods(sums, np.zeros(8, bool))
    requests = [Request(np.zeros(4, int), 1)] * 8
    (result,) = results_of([a_task(metrics, one, two, three)], requests, found)
    assert [[line["acc"], line["acc_norm"], line["acc_bytes"]] for line in result.rows] == [[1, 0, 0], [0, 1, 1], [1, 0, 1]]
    figures = {figure.metric: figure for figure in result.figures}
    assert figures["acc"].value == pytest.approx(2 / 3)
    # The sample's deviation of (1, 0, 1) is sqrt((1/9 + 4/9 + 1/9) / 2) = 1/sqrt(3); over sqrt(3): 1/3.
    assert figures["acc"].stderr == pytest.approx(1 / 3)
    assert figures["acc_norm"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize(("second", "right"), [(-3.5, 1), (-4.5, 0)])
def test_lengths_are_counted_exactly(second: float, right: int) -> None:
    """Sums of 2 and 4 characters, each a byte: -2 / 2 lies between -3.5 / 4 and -4.5 / 4. With one character more in both
    -2 / 3 is above -3.5 / 5; with one less -2 is below -4.5 / 3."""
    example = Example("w", "c", (" x", " y"), ("ab", "abcd"), right)
    found = Likelihoods(np.array([-2.0, second]), np.zeros(2, bool))
    (result,) = results_of([a_task(("acc_norm", "acc_bytes"), example)], [Request(np.zeros(4, int), 1)] * 2, found)
    assert (result.rows[0]["acc_norm"], result.rows[0]["acc_bytes"]) == (1, 1)


def test_llmc_takes_the_lowest_mean_loss() -> None:
    """Sums -6 of 3 tokens and -5 of 2: means 2 and 2.5."""
    example = Example("w", "c", (" x", " y"), ("x", "y"), 0, ("c", (" x", " y")))
    requests = [Request(np.zeros(5, int), n) for n in (3, 2, 3, 2)]
    found = Likelihoods(np.array([-6.0, -5, -6, -5]), np.zeros(4, bool))
    (result,) = results_of([a_task(("acc", "acc_norm_llmc"), example)], requests, found)
    assert result.rows[0]["mean_losses"] == [2.0, 2.5]
    assert {f.metric: f.value for f in result.figures} == {"acc": 0.0, "acc_norm_llmc": 1.0}
    assert all(math.isnan(figure.stderr) for figure in result.figures), "one example has no deviation"


def test_perplexity_and_greedy() -> None:
    examples = [Example("w", "c", (" x",), ("x",), 0) for _ in range(2)]
    found = Likelihoods(np.array([-1.0, -3.0]), np.array([True, False]))
    (result,) = results_of([a_task(("acc", "perplexity"), *examples)], [Request(np.zeros(2, int), 1)] * 2, found)
    accuracy, perplexity = result.figures
    assert accuracy.value == 0.5
    # exp of the mean 2; the mean's standard error is sqrt(2)/sqrt(2) = 1, times exp(2)
    assert perplexity.value == pytest.approx(math.exp(2)) and perplexity.stderr == pytest.approx(math.exp(2))


def test_the_perplexity_of_a_model_that_knows_nothing_is_a_number() -> None:
    examples = [Example("w", "c", (" x",), ("x",), 0) for _ in range(2)]
    found = Likelihoods(np.array([-1e4, -2e4]), np.zeros(2, bool))
    (result,) = results_of([a_task(("perplexity",), *examples)], [Request(np.zeros(2, int), 1)] * 2, found)
    assert math.isfinite(result.figures[0].value) and result.figures[0].value > 1e300


def test_of_equal_choices_the_first_counts() -> None:
    choices = [Example("w", "c", (" x", " y"), ("x", "y"), answer) for answer in (0, 1)]
    found = Likelihoods(np.full(4, -1.0), np.zeros(4, bool))
    (result,) = results_of([a_task(("acc",), *choices)], [Request(np.zeros(2, int), 1)] * 4, found)
    assert [row["acc"] for row in result.rows] == [1, 0]


def test_numbers_that_are_none_are_no_result() -> None:
    example = Example("w", "c", (" x", " y"), ("x", "y"), 0)
    found = Likelihoods(np.array([math.nan, -1.0]), np.zeros(2, bool))
    (result,) = results_of([a_task(("acc",), example)], [Request(np.zeros(2, int), 1)] * 2, found)
    assert math.isnan(result.figures[0].value)


GOOD = {"context": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".jsonl.gz"])
def test_every_format_reads_the_same(suffix: str, tmp_path: Path) -> None:
    import gzip

    rows, path = [GOOD, {**GOOD, "context": "ü"}, GOOD], tmp_path / f"own{suffix}"
    lines = "".join(json.dumps(record) + "\n" for record in rows)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else lines)
    (task,) = load_tasks(f"own={path}", limit=2)
    assert [example.context for example in task.examples] == ["a", "ü"] and task.examples[0].answer == 1


BROKEN = {
    "not JSON": ('{"context": ', "found b'{\"context\": ' in line 2 of"),
    "no object": ("[1]", "found \\[1\\] in line 2 of"),
    "no key": ('{"context": "a", "answer": 0}', "in 'choices', found only the keys context, answer in line 2 of"),
    "an answer too many": (
        '{"context": "a", "choices": ["b", "c"], "answer": 2}',
        "0 to 1 in 'answer', found 2 in line 2 of",
    ),
    "one choice": ('{"context": "a", "choices": ["b"], "answer": 0}', "two or more texts in 'choices'.* in line 2 of"),
    "an empty choice": ('{"context": "a", "choices": ["b", ""], "answer": 0}', "not empty in 'choices'.* in line 2 of"),
    "half a pair": ('{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', "surrogate pair in 'context'.*line 2 of"),
    "no number": ('{"context": "a", "choices": ["b", "c"], "answer": true}', "'answer', found True in line 2 of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_one_line_with_its_place(name: str, tmp_path: Path) -> None:
    line, told = BROKEN[name]
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(DataError, match=told) as raised:
        load_tasks(f"own={path}")
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_other_files_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none"):
        load_tasks(f"own={tmp_path / 'nothing.jsonl'}")
    (tmp_path / "own.csv").write_text("a,b")
    with pytest.raises(UsageError, match=r"named .jsonl"):
        load_tasks(f"own={tmp_path / 'own.csv'}")
    for name, content in (
        ("a.jsonl", b"\xff\n"),
        ("a.jsonl.gz", b"no gzip"),
        ("a.parquet", b"no parquet"),
        ("b.json", b"{"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}"):
            load_tasks(f"own={tmp_path / name}")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="found none in"):
        load_tasks(f"own={tmp_path / 'empty.jsonl'}")


def test_nothing_to_score_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({**GOOD, "context": "   "}) + "\n")
    tasks = load_tasks(f"own={tmp_path / 'own.jsonl'}")
    with pytest.raises(DataError, match=r"line 1 of .*own.jsonl"):
        make_requests(tasks, load_tokenizer("bytes"), 64)
    (tmp_path / "own.jsonl").write_text(json.dumps({**GOOD, "choices": ["b" * 63, "c"]}) + "\n")
    longest, _ = make_requests(load_tasks(f"own={tmp_path / 'own.jsonl'}"), load_tokenizer("bytes"), 64)
    assert longest.scored == 64, "as many as the context has: a blank and 63 letters"
    (tmp_path / "own.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "choices": ["b" * 64, "c"]}) + "\n")
    tasks = load_tasks(f"own={tmp_path / 'own.jsonl'}")
    with pytest.raises(DataError, match=r"at most 64 tokens.*found 65 in line 2 of .*own.jsonl"):
        make_requests(tasks, load_tokenizer("bytes"), 64)


def test_which_tasks() -> None:
    assert parse_tasks("hellaswag=a/b.jsonl, arc_easy ,") == {"hellaswag": "a/b.jsonl", "arc_easy": ""}
    assert parse_tasks("") == {}
    for spec, told in (
        ("helaswag", "did you mean hellaswag"),
        ("arc_easy,arc_easy=x", "each once"),
        ("=x", "expected tasks like"),
        (",", "expected tasks like"),
        ("mmlu_dev=x", "name mmlu as well"),
    ):
        with pytest.raises(UsageError, match=told):
            parse_tasks(spec)


def test_a_file_without_the_parts_of_the_context_has_llmc_figures_alone(tmp_path: Path) -> None:
    full = hellaswag_row(random.Random(0))
    path = tmp_path / "h.jsonl"

    def metrics(*rows: dict) -> tuple[str, ...]:
        path.write_text("".join(json.dumps(record) + "\n" for record in rows))
        (task,) = load_tasks(f"hellaswag={path}")
        assert bool(task.notes) == (len(task.metrics) < 4)
        return task.metrics

    bare = {key: value for key, value in full.items() if not key.startswith("ctx_")}
    without = {key: value for key, value in full.items() if key != "ctx"}
    assert metrics(full) == ("acc", "acc_norm", "acc_bytes", "acc_norm_llmc")
    assert metrics(full, bare) == ("acc_norm_llmc",)
    assert metrics(full, without) == ("acc", "acc_norm", "acc_bytes")
    with pytest.raises(DataError, match="line 1"):
        metrics(bare, without)
