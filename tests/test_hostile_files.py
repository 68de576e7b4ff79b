"""Files that are well-formed and hostile: every reader refuses them in one line, without a traceback, at once."""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from handgrad.data import confined
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.model_tokenizer import model_tokenizer
from handgrad.data.shards import open_dataset
from handgrad.data.sources import find_local, read_rows as read_documents
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, HandgradError
from handgrad.evaluation.tasks import load_tasks
from handgrad.generation.prompts import read_prompts
from handgrad.interop.huggingface import read_shape, weight_files
from handgrad.parsing import MOST_DEPTH, parse_json, parse_toml
from handgrad.reports.reading import read_run
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, read_toml
from handgrad.storage import checkpoint
from handgrad.storage.manifest import verify_file
from tests.data.chats import CHATML, made_tokenizer, talk
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


@pytest.mark.parametrize(
    "ends", [5, {"a": 1}, [5], [[]], [["wte", "5", "ab"]], [[1, 2, "ab"]], [["wte", 1.5, "ab"]], [["wte", 5]], None]
)
def test_malformed_ends_of_a_damaged_file(ends: Any, tmp_path: Path) -> None:
    """They say where a file is damaged, and nothing if they are no such list: the file is refused in one line."""
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(DataError, match=r"its SHA-256 differs from the manifest's; the file is damaged$"):
        verify_file(tmp_path / "model.safetensors", {"bytes": 8, "sha256": "0" * 64, "ends": ends})


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


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow bounds of a foreign program, so that the tests are quick."""
    monkeypatch.setattr(confined, "MEMORY_BYTES", 1 << 29)
    monkeypatch.setattr(confined, "SECONDS", 0.5)


LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    "nested ranges": (LOOP * 3 + "{% endfor %}" * 3, "no end within"),
    "a repeated text": ("{{ messages[0].content * 10**9 }}", "more than 512 MiB of memory"),
    "a folded constant": ("{{ 'x' * 10**9 }}", "more than 512 MiB of memory"),
    "a doubled text": (
        "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "more than 512 MiB of memory|no end within",  # a slow machine zeroes 512 MiB in longer than the bound of time
    ),
    "a large power": ("{{ (messages|length + 8) ** (9**9) }}", "no end within"),
    "a wide field": ("{{ '%1000000000d' % messages|length }}", "more than 512 MiB of memory"),
    "a long output": ("{{ messages[0].content * 10**7 }}", r"ValueError: \d+ bytes, expected at most"),
    "a deep expression": (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "RecursionError|more than 512 MiB|its process ended",
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.mark.fault(53)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_without_bounds(kind: str, narrow: None) -> None:
    """One line, and this process lends them neither its time nor its memory."""
    template, told = TEMPLATES[kind]
    begun, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=f"^expected a (chat template|conversation).*found ({told})") as refused:
        ChatTemplate(made_tokenizer(template)).render(talk("a"), True)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 800
    assert time.process_time() - begun < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (64 << 10)  # KiB; on macOS bytes


def split_by(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


TOKENIZERS: dict[str, tuple[str, Any, str]] = {
    "nested repeats": ("pre_tokenizer", split_by("(a+)+$"), "PanicException"),
    "a recursion": ("pre_tokenizer", split_by("(?<n>a|b\\g<n>\\g<n>c)*$"), "no end within"),
    "an expression that grows": ("pre_tokenizer", split_by("((((a{999}){999}){999}){999})"), "no end within"),
    "a replacement that grows": (
        "normalizer",
        {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 1_000_000},
        "its process ended|no end within",  # as above
    ),
}


@pytest.mark.fault(53)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_without_bounds(kind: str, narrow: None) -> None:
    part, change, told = TOKENIZERS[kind]
    plain = made_tokenizer(None)
    content = json.dumps(json.loads(plain.json_bytes) | {part: change}).encode()
    with pytest.raises(DataError, match=f"^expected a tokenizer in a test.*found .*({told})") as refused:
        model_tokenizer(content, {}, plain.vocab_size, plain.end_of_text, "a test").encode("a" * 30_000 + "c")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 800


def test_a_program_ends_with_its_owner_alone() -> None:
    """One whose process was killed is started again, in a fork of its owner as well, and gives the same."""
    tokenizer = made_tokenizer(CHATML)
    tokens = tokenizer.encode("he said").tolist()
    library = next(
        cell.cell_contents for cell in tokenizer.encode_texts.__closure__ if "Program" in repr(cell.cell_contents)
    )
    library.process.kill()
    library.process.wait()
    assert tokenizer.encode("he said").tolist() == tokens
    library.owner = -1  # as a fork finds it
    first, pipe = library.process, library.pipe
    assert tokenizer.encode("he said").tolist() == tokens and library.process is not first and first.poll() is None
    confined.end(first, pipe, os.getpid())
    assert first.poll() is not None


@pytest.mark.fault(26)
def test_a_long_run_of_blanks_before_special_tokens() -> None:
    """Of tokens that take the blanks beside them; a step for each pair of blanks would take a minute."""
    template = ChatTemplate(made_tokenizer(CHATML, takes_blanks=True))
    begun, blanks = time.process_time(), " " * 100_000
    tokens, stretches = template.conversation(talk(f"a{blanks}b", f"c{blanks}"))
    assert time.process_time() - begun < 5
    short, spans = template.conversation(talk("a  b", "c  "))
    more = len(blanks) - 2
    assert len(tokens) == len(short) + 2 * more and stretches[-1][0] == spans[-1][0] + more


@pytest.mark.fault(26)
@pytest.mark.parametrize("special", [["<|x|>" * 4000], [f"<|{n}|>" for n in range(70_000)]])
def test_too_many_or_too_long_special_tokens(special: list[str]) -> None:
    tables = json.loads(made_tokenizer(CHATML).json_bytes)
    first = len(tables["model"]["vocab"])
    tables["added_tokens"] = [
        {**tables["added_tokens"][0], "id": first + n, "content": content} for n, content in enumerate(special)
    ]
    size = first + len(special)
    tokenizer = model_tokenizer(json.dumps(tables).encode(), {"chat_template.jinja": CHATML}, size, size - 1, "a test")
    with pytest.raises(DataError, match="expected fewer or shorter special tokens, found"):
        ChatTemplate(tokenizer)


def test_an_endless_template_is_tried_once(narrow: None) -> None:
    """The rows after it, which `--skip-bad-rows` would leave out one by one, cost no time."""
    template = ChatTemplate(made_tokenizer(TEMPLATES["nested ranges"][0] + CHATML))
    first, *rest = template.conversations([talk("a", "b")] * 3)
    assert all(str(each) == str(first) and isinstance(each, DataError) for each in rest)
    assert template._jinja is not None
    process = template._jinja.program.process
    with pytest.raises(DataError, match="found no end within"):
        template.conversation(talk("c", "d"))
    assert template._jinja.program.process is process, "it was started again"
