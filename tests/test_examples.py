"""The examples run as they stand, in one folder, and show what they promise."""

import re
from pathlib import Path

import pytest

from tests.distributed.runs import Launcher

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# In `make test` they run with fewer steps and documents, which teach little: what they learn, `make nightly` checks.
FEWER = {'"steps": 500': '"steps": 100', '"steps": 60': '"steps": 6', "documents=4000": "documents=800", "20_000": "1_000"}

# What each must print, in this order; numbers in it are captured.
SHOWN = {
    "1_train": [
        r"[\d,]+ tokens to train on",
        r"<handgrad.Model: 2 layers",
        r"step  50   loss (\d\.\d+)   +[\d,]+ tokens/s\n(?:.*\n)*?step 500   loss (\d\.\d+) ",
        r"    Once upon a time \w+",
        r"step 500   validation loss \d\.\d+ =+\n",
        r"<handgrad.Training: runs/examples, 500 of 500 steps, closed>",
    ],
    "2_generate": [
        r"The brave girl \.\.\.['\"].*\w.*\n.*\nA kind farmer",
        r"'Once upon a' goes on with\n    ' time' +(\d+\.\d)% #+\n",
        r"\nOnce upon a time Tom, a brave boy, lived above a purple volcano\.\n",
        r"the least expected came after 'Once",
    ],
    "3_finetune": [
        r"before +([\d.]+) +([\d.]+)\nfinetuned +([\d.]+) +([\d.]+)\nlower half frozen +([\d.]+) +([\d.]+)\n",
        r"block 0 is unchanged\nblock 1 is changed\nA king",
    ],
    "4_evaluate": [
        r"held-out tokens: loss (\d\.\d+) nats per token",
        r"a story +[\d.]+ +[\d.]+ +([\d.]+)\nnews +[\d.]+ +[\d.]+ +([\d.]+)\nnoise +[\d.]+ +[\d.]+ +([\d.]+)\n",
        r"'Once upon a time there lived a brave girl\.' is e\^",
        r"'He went home proud\.' is e\^",
    ],
    "5_transformers": [
        r"same tokens: True\nlargest difference of a logit: (\d\.\de-\d+)\nsame text: True\n",
        r"same bits after the round trip: True",
    ],
    "6_story_talks": [
        r"([\d,]+) conversations in talks\.jsonl, for example\n",
        r" +user: .*\nassistant: \w.*\n.*\n +user: .*\?\nassistant: \w.*\.\n",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


def shown(patterns: list[str], output: str) -> list[float]:
    """The numbers that the patterns capture, each behind the one before."""
    rest, numbers = output, []
    for pattern in patterns:
        found = re.search(pattern, rest)
        assert found, f"{pattern!r} is not in what is left of\n{output}"
        numbers += [float(number.replace(",", "")) for number in found.groups()]
        rest = rest[found.start() + 1 :]
    return numbers


@pytest.mark.nightly  # test_example_with_fewer_steps
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, folder: Path, launcher: Launcher) -> None:
    done = launcher.run(1, [str(example)], cwds=[folder]).ranks[0]
    CHECKS[example.stem](shown(SHOWN[example.stem], done.output))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_with_fewer_steps(example: Path, other_folder: Path, launcher: Launcher) -> None:
    text = example.read_text()
    for old, new in FEWER.items():
        text = text.replace(old, new)
    script = other_folder / example.name
    script.write_text(text)
    patterns = [re.sub(r"\b500\b", "100", pattern) for pattern in SHOWN[example.stem]]
    patterns = [pattern for pattern in patterns if "time \\w" not in pattern and "time' +" not in pattern]  # learnt words
    numbers = shown(patterns, launcher.run(1, [str(script)], cwds=[other_folder]).ranks[0].output)
    if example.stem == "5_transformers":
        CHECKS[example.stem](numbers)


def test_they_leave_the_folders_of_others_alone() -> None:
    """The demo's, a recipe's and the tour's, which a reader has by then: theirs would be refused, or removed."""
    texts = {path.name: path.read_text() for path in EXAMPLES}
    for name in ("shards/stories", "runs/stories", "runs/demo", "runs/mine", '"exported"'):
        assert not [path for path, text in texts.items() if name in text], name
    recipe = (ROOT / "handgrad" / "settings" / "recipes" / "finetune_chat_own.toml").read_text()
    assert "--tokenizer bytes --out shards/stories-bytes" in recipe and "--out shards/stories\n" not in recipe


def check_training(numbers: list[float]) -> None:
    first, last = numbers
    assert last < first - 2, "it learns"


def check_probabilities(numbers: list[float]) -> None:
    assert numbers[0] > 20, "it knows how stories begin"


def check_finetuning(numbers: list[float]) -> None:
    """The gain and the cost of finetuning; freezing lies between, on both texts."""
    (new_before, old_before), (new_whole, old_whole), (new_frozen, old_frozen) = zip(*[iter(numbers)] * 2, strict=True)
    assert new_whole < new_frozen < new_before - 2
    assert old_before < old_frozen < old_whole


def check_texts(numbers: list[float]) -> None:
    held_out, story, news, noise = numbers
    assert held_out < 2 and story < news < noise, "bits per byte tell what it has read from what not"


def check_logits(numbers: list[float]) -> None:
    assert numbers[0] < 1e-4  # the promise of tests/interop


def check_talks(numbers: list[float]) -> None:
    assert numbers[0] == 20_000


CHECKS = {
    "1_train": check_training,
    "2_generate": check_probabilities,
    "3_finetune": check_finetuning,
    "4_evaluate": check_texts,
    "5_transformers": check_logits,
    "6_story_talks": check_talks,
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_cells(example: Path) -> None:
    lines = example.read_text().splitlines()
    assert 30 <= len(lines) <= 60 and lines[0].startswith('"""') and sum(line.startswith("# %% ") for line in lines) >= 4
