"""Every mistake of tests/mistakes.txt gets one line that says what is wrong; the command that the line leads to works."""

import contextlib
import json
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from handgrad.cli import main
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.conftest import write_text
from tests.data.chats import talk

SIZES = {"num_layers": 1, "num_heads": 2, "channels": 32, "sequence_length": 32, "tokens_per_step": 64, "micro_batch": 2}
SMALL = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
SMALL += " --steps 1 --device cpu --sample-tokens 0 --eval-tokens 64 --out out"
ROWS = [
    tuple(part.strip() for part in line.split(" |"))
    for line in (Path(__file__).with_name("mistakes.txt")).read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
CODES = {64, 65, 74, 78}  # of `HandgradError`'s classes: a bug ends with 1


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with texts, shards, runs and models, some of them damaged."""
    root = tmp_path_factory.mktemp("world")
    with contextlib.chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("handgrad.commands.train.write_report", lambda runs, out: out)
        make_files()
        make_shards()
        make_runs()
        make_models()
        yield root


def make_files() -> None:
    write_text(Path("text.txt"))
    chats = f"{json.dumps({'messages': talk('Hi', 'Hello')})}\n" * 40
    contents: dict[str, str | bytes] = {
        "empty.txt": "",
        "latin.txt": b"caf\xe9 au lait\n" * 500,
        "binary.bin": bytes(range(256)) * 40,
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "talks.jsonl": chats,
        "bad_talks.jsonl": chats + '{"messages": 3}\n' + chats,
        "prompts.jsonl": '{"prompt": "a"}\n{"text": 3}\n',
        "table.parquet": b"PAR1 and no more",
        "zipped.txt.gz": b"not zipped",
        "broken.toml": "steps = \n",
        "typed.toml": 'steps = "many"\n',
        "notes/one.txt": "mine",
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path("emptyfolder").mkdir()
    Path("loop").symlink_to("loop")


def make_shards() -> None:
    for name, tokenizer in (("mine", "bytes"), ("bpe", "bpe:300")):
        prepare(PrepareOptions("text.txt", Path("shards") / name, tokenizer=tokenizer, workers=1))
    shutil.copytree("shards/bpe", "shards/spare")
    for name in ("cut", "gone", "newer", "emptied"):
        shutil.copytree("shards/mine", f"shards/{name}")
    cut(Path("shards/cut/train_000000.bin"), 27000)
    Path("shards/gone/train_000000.bin").unlink()
    manifest = Path("shards/newer/manifest.json")
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 99', 1))
    Path("shards/emptied/manifest.json").write_text("")


def make_runs() -> None:
    settings = {**SIZES, "num_layers": 2, "steps": 4, "save_every": 2, "eval_every": 2, "eval_tokens": 64}
    train(RunConfig(data="shards/mine", out="runs/a", device="cpu", sample_tokens=0, **settings))
    for name in ("cut", "cut_all", "emptied", "newer", "half", "scribbled"):
        shutil.copytree("runs/a", f"runs/{name}")
        config = Path(f"runs/{name}/config.toml")
        config.write_text(config.read_text().replace('"runs/a"', f'"runs/{name}"'))
    cut(Path("runs/cut/checkpoints/step_00000004/model.safetensors"), 1000)
    for weights in Path("runs/cut_all").glob("checkpoints/*/model.safetensors"):
        cut(weights, 1000)
    for manifest in Path("runs/emptied").glob("checkpoints/*/manifest.json"):
        manifest.write_text("")
    for manifest in Path("runs/newer").glob("checkpoints/*/manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    for step in ("2", "4"):
        folder = Path(f"runs/half/checkpoints/step_0000000{step}")
        folder.rename(f"{folder}.partial")
    lines = Path("runs/scribbled/metrics.jsonl").read_text().splitlines()
    Path("runs/scribbled/metrics.jsonl").write_text("\n".join([*lines[:2], "{oops", *lines[3:]]) + "\n")
    shutil.copytree("shards/mine", "project/texts")
    with contextlib.chdir("project"):
        train(RunConfig(data="texts", out="runs/moved", device="cpu", sample_tokens=0, **settings))
    Path("project/runs/moved").rename("runs/moved")
    shutil.rmtree("project")


def make_models() -> None:
    assert main(["export", "runs/a", "theirs", "--to", "hf"]) == 0
    for name in ("cut", "emptied", "other", "without", "wide"):
        shutil.copytree("theirs", f"theirs_{name}")
    cut(Path("theirs_cut/model.safetensors"), 2000)
    Path("theirs_emptied/config.json").write_text("")
    Path("theirs_without/model.safetensors").unlink()
    for name, change in (("other", {"model_type": "bert"}), ("wide", {"n_embd": 64})):
        config = Path(f"theirs_{name}/config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | change))


def cut(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


@pytest.fixture
def untouched(world: Path) -> Iterator[set[Path]]:
    """Removes what a remedy has made; the paths there are before."""
    before = files_in(world)
    yield before
    for path in sorted(files_in(world) - before):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def files_in(world: Path) -> set[Path]:
    return {path for pattern in ("*", "*/*", "runs/*/*") for path in world.glob(pattern)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_mistake(row: tuple[str, ...], world: Path, untouched: set[Path], capsys: pytest.CaptureFixture) -> None:
    command, told, *remedy = row
    if "torch finds" in told and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fields = {"small": SMALL, "long": 300 * "a", "taken": taken.getsockname()[1]}
        code = main(shlex.split(command.format(**fields)))
    line = capsys.readouterr().err
    assert code in CODES and line.startswith("handgrad: ") and line.count("\n") == 1, (code, line)
    assert told.format(root=world).replace("`", "") in line.replace("`", ""), line
    assert files_in(world) == untouched, "a refused command writes nothing"
    if not (remedy and remedy[0]):
        return
    for words in re.findall(r"`([^`]+)`", told):
        assert words.removeprefix("handgrad ").strip() in remedy[0] or words in ("handgrad ", "MODEL"), words
    try:
        assert main(shlex.split(remedy[0].format(small=SMALL))) == 0, capsys.readouterr().err
    except SystemExit as ended:  # --help
        assert ended.code == 0


def test_there_are_enough_of_them() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 126
