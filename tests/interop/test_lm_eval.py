"""lm-eval on the exported folder and handgrad's own scoring: the same, example for example.

Needs the lm-evaluation-harness, which is 450 MB with what it depends on: `pip install lm-eval accelerate`.
HANDGRAD_HELLASWAG=FILE takes the first examples of a real file instead of those made up here.
"""

import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handgrad.cli import main
from tests.test_tasks import WORDS, hellaswag_row

lm_eval = pytest.importorskip(
    "lm_eval", reason="the lm-evaluation-harness is not installed (pip install lm-eval accelerate)"
)

TASKS = {
    "hellaswag": {
        "process_docs": "!function lm_eval.tasks.hellaswag.utils.process_docs",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
        "output_type": "multiple_choice",
        "metric_list": ["acc", "acc_norm", "acc_bytes"],
    },
    "arc_easy": {
        "doc_to_text": "Question: {{question}}\\nAnswer:",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
        "output_type": "multiple_choice",
        "metric_list": ["acc", "acc_norm"],
    },
    "lambada": {
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "output_type": "loglikelihood",
        "metric_list": ["perplexity", "acc"],
    },
    "mmlu": {
        "doc_to_text": "{{question.strip()}}\\n"
        + "".join(f"{letter}. {{{{choices[{n}]}}}}\\n" for n, letter in enumerate("ABCD"))
        + "Answer:",
        "doc_to_target": "answer",
        "doc_to_choice": '["A", "B", "C", "D"]',
        "description": "The following are multiple choice questions (with answers) about crow anatomy.\\n\\n",
        "output_type": "multiple_choice",
        "metric_list": ["acc"],
        "num_fewshot": 5,
    },
}


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    draw = random.Random(name)
    words = lambda n: " ".join(draw.choices(WORDS, k=n))  # noqa: E731
    if name == "hellaswag":
        return [hellaswag_row(draw) for _ in range(count)]
    if name == "arc_easy":
        labels = [["A", "B", "C", "D"], ["1", "2", "3"]]
        made = []
        for number in range(count):
            label = labels[number % 2]
            choices = {"text": [words(draw.randint(1, 6)) for _ in label], "label": label}
            made.append({"question": words(9) + "?", "choices": choices, "answerKey": draw.choice(label)})
        return made
    if name == "lambada":
        return [{"text": words(draw.randint(2, 30))} for _ in range(count)]
    return [
        {"question": f" {words(7)}?", "subject": "crow_anatomy", "choices": [words(3) for _ in range(4)], "answer": n % 4}
        for n in range(count)
    ]


def write_task(folder: Path, name: str, data: Path, dev: Path) -> None:
    """A task of lm-eval's words over a local file."""
    content = dict(TASKS[name])
    metrics = content.pop("metric_list")
    files = {"test": str(data), **({"dev": str(dev)} if name == "mmlu" else {})}
    lines = [f"task: local_{name}", "dataset_path: json", f"dataset_kwargs: {json.dumps({'data_files': files})}"]
    lines += ["test_split: test", *(["fewshot_split: dev", "fewshot_config: {sampler: first_n}"] if name == "mmlu" else [])]
    for key, value in content.items():
        text = str(value)
        lines.append(f"{key}: {text if text.startswith('!') else quoted(text)}")
    lines += ["metric_list:", *(f"  - {{metric: {metric}, higher_is_better: true}}" for metric in metrics)]
    (folder / f"local_{name}.yaml").write_text("\n".join(lines) + "\n")


def quoted(text: str) -> str:
    return text if text.isdecimal() else '"' + text.replace('"', '\\"') + '"'


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    for name in TASKS:
        count = 60 if name == "hellaswag" else 24
        made = rows_of(name, count)
        if name == "hellaswag" and (real := os.environ.get("HANDGRAD_HELLASWAG")):
            made = [json.loads(line) for line in Path(real).read_text().splitlines()[:300]]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in made]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        write_task(folder, name, folder / f"{name}.jsonl", folder / "dev.jsonl")
    dev = [json.dumps(row) + "\n" for row in rows_of("mmlu_dev", 7)]
    (folder / "dev.jsonl").write_text("".join(dev))
    return folder


def theirs(folder: Path, data: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},dtype=float32,add_bos_token=False",
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(data), include_defaults=False),
        device="cpu",
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.mark.parametrize("kind", ["gpt2", "bpe"])
def test_equal_to_lm_eval_example_for_example(kind: str, exported, data: Path, tmp_path: Path, capsys) -> None:
    """Random weights of three sizes over: every figure, every pick, every likelihood. The last within 1e-3 nats: logits
    agree to 1e-4 (`test_huggingface`), and a text has about ten tokens that are scored."""
    run, folder, _ = exported(kind)
    spec = ",".join(f"{name}={data / name}.jsonl" for name in TASKS) + f",mmlu_dev={data / 'dev.jsonl'}"
    assert main(["evaluate", str(run), "--tasks", spec, "--out", str(tmp_path / "out.jsonl"), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    ours: dict[str, list[dict[str, Any]]] = {name: [] for name in TASKS}
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        row = json.loads(line)
        ours[row["task"]].append(row)
    found = theirs(folder, data)
    for name in TASKS:
        samples = sorted(found["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(ours[name])
        for sample, row in zip(samples, ours[name], strict=True):
            sums = np.array([float(answer[0][0]) for answer in sample["resps"]])
            assert np.abs(sums - row["loglikelihoods"]).max() < 1e-3
            assert [str(answer[0][1]) == "True" for answer in sample["resps"]] == row["greedy"]
            if name != "lambada":
                assert int(sums.argmax()) == int(np.argmax(row["loglikelihoods"]))
            for metric in TASKS[name]["metric_list"]:
                if metric != "perplexity":
                    assert float(sample[metric]) == row[metric], (name, row["where"], metric)
        table = found["results"][f"local_{name}"]
        for metric in TASKS[name]["metric_list"]:
            line = next(line for line in told.splitlines() if line.split()[:2] == [name, metric])
            value = table[f"{metric},none"]
            assert float(line.split()[2]) == pytest.approx(value, abs=1e-4 * max(1.0, abs(value)))
    picks = [int(np.argmax(row["loglikelihoods"])) for row in ours["hellaswag"]]
    assert any(a != b for a, b in pairwise(picks))
