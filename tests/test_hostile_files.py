"""Files that are well-formed and hostile: every reader refuses them in one line, without a traceback, at once."""

import contextlib
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from handgrad import checkpoint
from handgrad.config import RunConfig, read_toml
from handgrad.data.shards import open_dataset
from handgrad.data.sources import find_local, read_rows as read_documents
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, HandgradError
from handgrad.evaluation.tasks import load_tasks
from handgrad.generation.prompts import read_prompts
from handgrad.interop.huggingface import read_shape, weight_files
from handgrad.parsing import MOST_DEPTH, parse_json, parse_toml
from handgrad.reports.reading import read_run
from handgrad.run.start import train
from tests.test_report import make_run, start_line

DEEP, DEEPER = "[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000
NUMBERS = ["1" * 400, "-" + "9" * 41, "1" * 5000]
VALUES = {"deep": DEEP, "deeper": DEEPER, **{f"{len(number)} characters": number for number in NUMBERS}}


def report_of(folder: Path, config: str = "seed = 1\n", line: str = "") -> None:
    made = make_run(folder / "run")
    written(made / "config.toml", config)
    written(made / "metrics.jsonl", json.dumps(start_line()) + "\n" + line + "\n")
    read_run(made, "run")


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("latin-1"))
    return path


# Each reads a file in a folder whose text holds a hostile value in the place of %s.
READERS: dict[str, tuple[str, Callable[[Path, str], Any]]] = {
    "recipe": ("steps = %s\n", lambda f, text: read_toml(str(written(f / "a.toml", text)))),
    "recipe's unknown key": ("[a.b]\nc = %s\n", lambda f, text: read_toml(str(written(f / "a.toml", text)))),
    "recipe's preset": ("preset = %s\n", lambda f, text: read_toml(str(written(f / "a.toml", text)))),
    "config of a run": ("seed = %s\n", lambda f, text: report_of(f, config=text)),
    "task": ('[{"text": %s}]', lambda f, text: load_tasks(f"lambada={written(f / 'a.json', text)}")),
    "task by lines": ('{"text": %s}\n', lambda f, text: load_tasks(f"lambada={written(f / 'a.jsonl', text)}")),
    "task's answer": (
        '{"context": "a", "choices": ["b", "c"], "answer": "%s"}\n',
        lambda f, text: load_tasks(f"own={written(f / 'a.jsonl', text)}"),
    ),
    "prompts": ('{"prompt": %s}\n', lambda f, text: read_prompts(written(f / "a.jsonl", text))),
    "prompts' length": ('{"prompt": "a", "max_tokens": %s}\n', lambda f, text: read_prompts(written(f / "a.jsonl", text))),
    "metrics": ('{"kind": "step", "step": 1, "loss": %s}', lambda f, text: report_of(f, line=text)),
    "documents": (
        '{"text": "a", "b": %s}\n',
        lambda f, text: list(read_documents(find_local(str(written(f / "a.jsonl", text)))[0], "text")),
    ),
    "tokenizer": ('{"model": %s}', lambda f, text: load_tokenizer(str(written(f / "tokenizer.json", text)))),
    "manifest of shards": ('{"schema": %s}', lambda f, text: open_dataset(written(f / "manifest.json", text).parent)),
    "manifest": ('{"schema": %s}', lambda f, text: checkpoint.open_checkpoint(written(f / "manifest.json", text).parent)),
    "their config": ('{"n_layer": %s}', lambda f, text: read_shape(written(f / "config.json", text))),
    "their index": (
        '{"weight_map": %s}',
        lambda f, text: weight_files(written(f / "model.safetensors.index.json", text).parent),
    ),
}


@pytest.mark.fault(26)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_values(reader: str, value: str, tmp_path: Path) -> None:
    template, read = READERS[reader]
    begun = time.process_time()
    with pytest.raises(HandgradError) as refused:
        read(tmp_path, template.replace("%s", VALUES[value]))
    line = str(refused.value)
    assert refused.value.exit_code in (64, 65) and len(line) < 800 and "\n" not in line
    assert time.process_time() - begun < 1


# Valid ones, to be changed at a few places.
VALID = {
    "recipe": b'steps = 10\npreset = "tiny"\nlearning_rate = 1e-3\nkeep_best = true\n',
    "config of a run": b'seed = 1\nchannels = 128\nclip_norm = 1.0\nout = "runs/x"\n',
    "task": b'[{"text": "one two"}, {"text": "three four"}]',
    "task's answer": b'{"context": "a", "choices": ["b", "c"], "answer": 1}\n{"context": "\\ud800", "choices": ["", ""]}\n',
    "prompts": b'{"prompt": "Once", "max_tokens": 3}\n{"prompt": "Twice"}\n',
    "metrics": b'{"kind": "step", "step": 1, "loss": 2.5, "norm": 1.0}',
    "documents": b'{"text": "a", "more": [1, 2.5, null]}\n{"text": "b"}\n',
    "manifest": b'{"schema": 1, "step": 3, "config": {"lanes": 1}, "files": {}}',
    "their config": b'{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 257}',
    "their index": b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
}
PIECES = [
    b"",
    b"[",
    b"{",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"-",
    b"1e999",
    b"9" * 50,
    b"NaN",
    b"null",
    b"true",
    b"\xff",
    b"=",
    b".",
]


@pytest.mark.fault(26)
@pytest.mark.soak(60, 200)
@pytest.mark.parametrize("reader", VALID)
def test_changed_files(reader: str, seeds: Sequence[int], tmp_path: Path) -> None:
    """Any change leaves a file that is read, or refused."""
    _, read = READERS[reader]
    for seed in seeds:
        dice, content = random.Random(f"{reader} {seed}"), bytearray(VALID[reader])
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(content) + 1)
            content[start : start + dice.randint(0, 6)] = dice.choice(PIECES)
        folder = tmp_path / str(seed)
        folder.mkdir()
        with contextlib.suppress(HandgradError):
            read(folder, bytes(content).decode("latin-1"))


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_bounds(parse: Callable[[bytes], Any]) -> None:
    """The largest that passes, and the smallest that does not."""
    before = b"a = " if parse is parse_toml else b""
    for depth, digits in ((MOST_DEPTH - 1, 40), (1, 1)):
        parse(before + b"[" * depth + b"9" * digits + b"]" * depth)
    for depth, digits, told in ((MOST_DEPTH + 1, 1, "nested more than 64 deep"), (1, 41, "more than 40 digits")):
        with pytest.raises(ValueError, match=told):
            parse(before + b"[" * depth + b"9" * digits + b"]" * depth)


def test_long_keys_of_a_recipe() -> None:
    """Python's reader takes time with the square of their length."""
    for text in (".".join("a" * 100_000) + " = 1", "[" + " . ".join('"b"' for _ in range(100_000)) + "]", "a" * (2 << 20)):
        begun = time.process_time()
        with pytest.raises(ValueError, match=r"64 deep|more than 1048576"):
            parse_toml(text.encode())
        assert time.process_time() - begun < 1
    assert parse_toml(b"# " + b"." * 200 + b"\na = '../../../x.y'")["a"] == "../../../x.y"


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\0.safetensors", "..", "a/b.safetensors", "config.json", ""])
def test_names_of_shards(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match="expected a weight_map of tensors to files"):
        weight_files(tmp_path)


@pytest.fixture(scope="module")
def saved(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    from tests.conftest import small_run

    config = small_run(shards, tmp_path_factory.mktemp("saved") / "run")
    train(config)
    return config


GONE = object()
FORGED = {
    "negative step": ("step", -12, "expected a whole number as step"),
    "boolean step": ("step", True, "expected a whole number as step"),
    "fractional step": ("step", 12.0, "expected a whole number as step"),
    "no step": ("step", GONE, "expected a whole number as step"),
    "another folder's step": ("step", 6, "holds a checkpoint of step 6"),
    "no config": ("config", GONE, "expected an object as config"),
    "no files": ("files", GONE, "expected both files as files"),
    "no weights": ("files", {}, "expected both files as files"),
    "no window": ("loss_window", GONE, "expected a list of numbers as loss_window"),
    "a window of text": ("norm_window", ["1.0"], "expected a list of numbers as norm_window"),
    "a window of NaN": ("norm_window", [float("nan")], "expected a list of numbers as norm_window"),
    "a window of booleans": ("loss_window", [True], "expected a list of numbers as loss_window"),
    "no skips": ("skips_in_a_row", GONE, "expected a whole number as skips_in_a_row"),
    "negative skips": ("skips_in_a_row", -1, "expected a whole number as skips_in_a_row"),
    "no versions": ("versions", GONE, "expected an object as versions"),
    "a loss scale of one number": ("loss_scale", [1.0], "expected two numbers as loss_scale"),
}


@pytest.mark.fault(10)
@pytest.mark.parametrize("forgery", FORGED)
def test_forged_manifests(forgery: str, saved: RunConfig, tmp_path: Path) -> None:
    """With the right hash: what a writer with a bug would leave. The checkpoint is no checkpoint."""
    key, value, told = FORGED[forgery]
    folder = shutil.copytree(Path(saved.out) / "checkpoints" / "step_00000012", tmp_path / "step_00000012")
    manifest = checkpoint.open_checkpoint(folder).manifest
    manifest.pop(key) if value is GONE else manifest.update({key: value})
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, **manifest}))
    with pytest.raises(DataError, match=told):
        checkpoint.open_checkpoint(folder)
    found, passed_over = checkpoint.newest(tmp_path)
    assert found is None and len(passed_over) == 1
