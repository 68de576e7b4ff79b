"""The command line: what works end to end, and that every mistake gets one clear line, its exit code and no half output."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from handgrad.api.records import metrics
from handgrad.cli import COMMANDS, main
from handgrad.data.llmc_header import HEADER_BYTES, header
from handgrad.settings import recipes
from handgrad.settings.config import FIELDS, RunConfig, read_toml, to_dict, to_toml
from handgrad.storage.run_files import LOCK_FILE
from tests.conftest import write_text

SMALL = [
    *("tiny", "--num-heads", "2", "--channels", "32", "--sequence-length", "32", "--tokens-per-step", "256"),
    *("--micro-batch", "4", "--steps", "4", "--device", "cpu", "--sample-tokens", "4", "--eval-every", "2"),
    *("--learning-rate", "3e-3", "--warmup-steps", "10"),  # faster than the preset's: four steps are to change the loss
]


def refused(capsys: pytest.CaptureFixture, code: int, *arguments: str) -> str:
    """Runs a command that must fail with `code`; returns its one line."""
    assert main(list(arguments)) == code, capsys.readouterr().err
    line = capsys.readouterr().err
    assert line.startswith("handgrad: ") and line.count("\n") == 1, f"expected one line, found {line!r}"
    assert "Traceback" not in line
    return line


@pytest.mark.report
def test_from_text_to_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """prepare, plan, train, evaluate, sample, report: the whole way, once."""
    text, data, run = write_text(tmp_path / "my.txt"), str(tmp_path / "data"), str(tmp_path / "run")
    assert main(["prepare", str(text), "--out", data, "--tokenizer", "bpe:300", "--workers", "1"]) == 0
    assert main(["plan", *SMALL, "--data", data]) == 0
    assert "at best" in capsys.readouterr().out
    assert main(["train", *SMALL, "--data", data, "--out", run]) == 0
    shown = capsys.readouterr().out
    assert "step 4/4 | loss" in shown and "validation loss" in shown and "memory" in shown
    assert main(["evaluate", run]) == 0
    assert "bits per byte" in capsys.readouterr().out
    # The checkpoint alone is enough: its tokenizer travels with it.
    text.unlink()
    assert main(["sample", run, "--prompt", "the river", "--max-tokens", "8", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the river")
    assert main(["sample", run, "--prompt", "the river", "--max-tokens", "8", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first, "a seed means the same text"
    assert main(["report", run, "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    for name in ("config.toml", "metrics.jsonl", "main.log", "log.txt", "report.html", "samples/step_00000004.txt"):
        assert (Path(run) / name).stat().st_size > 0, name
    assert "s:3 trl:" in (Path(run) / "main.log").read_text() and "s:4 tel:" in (Path(run) / "main.log").read_text()
    assert json.loads((Path(run) / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "run"


def test_every_field_is_a_flag_and_a_toml_key(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["train", "--help-all"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert f"--{name.replace('_', '-')} " in shown, name
    recipe = tmp_path / "recipe.toml"
    config = RunConfig(out='runs/\N{GRINNING FACE} \x7f"', seed=7, learning_rate=1.5e-4, overfit_one_batch=True)
    recipe.write_text(to_toml(config))
    assert read_toml(str(recipe)) == to_dict(config)


def test_flags_beat_recipe_beats_preset(tmp_path: Path) -> None:
    from handgrad.commands.arguments import run_config
    from handgrad.commands.flags import add_run_arguments
    from handgrad.commands.parser import Parser

    recipe = tmp_path / "r.toml"
    recipe.write_text('preset = "tiny"\nmodel = "d12"\nsteps = 7\nseed = 3\n')
    parser = Parser("x")
    add_run_arguments(parser)
    config = run_config(
        parser.parse(
            [
                "--config",
                str(recipe),
                "--seed",
                "9",
                "--tokens-per-step",
                "2e3",
                "--micro-batch=125",
                "--sequence-length",
                "16",
            ]
        )
    )
    assert (config.num_layers, config.steps, config.seed, config.tokens_per_step) == (12, 7, 9, 2000)


def libraries_after(code: str) -> set[str]:
    """The heavy libraries that a Python of its own has loaded after `code`."""
    heavy = {"torch", "numpy", "matplotlib", "pyarrow", "transformers", "tokenizers", "tiktoken", "jinja2"}
    heavy |= {"http.client", "ssl"}
    code = f"import sys\nfrom handgrad.cli import main\n{code}\nprint('\\nloaded', *({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split()[1:])


def test_help_and_mistakes_load_no_library() -> None:
    lines = [["train", "tinny"], ["train", "tiny", "--steps", "many"], ["sample"], ["evaluate", "x", "--micro-batch", "0"]]
    lines += [[], ["trian"], ["train", "--help-all"], *([name, flag] for name in COMMANDS for flag in ("--help", "--hepl"))]
    code = f"""
for line in {lines}:
    try:
        assert main(line) == 64, line
    except SystemExit as ended:
        assert ended.code == 0 and line[1].startswith("--help"), line
"""
    assert libraries_after(code) == set()


def test_prepare_loads_no_torch(tmp_path: Path) -> None:
    line = ["prepare", str(write_text(tmp_path / "a.txt")), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]
    assert "torch" not in libraries_after(f"main({line})")
    assert (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("recipe", recipes.recipe_names())
def test_shipped_recipes_are_valid(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from handgrad.commands.arguments import run_config
    from handgrad.commands.flags import add_run_arguments
    from handgrad.commands.parser import Parser
    from handgrad.interop import sources

    known = {  # as they are on the Hub, and in the runs that the recipes name
        "gpt2": {"num_layers": 12, "num_heads": 12, "channels": 768, "sequence_length": 1024},
        "runs/smollm": {"architecture": "llama", "llama": "kv_heads=3,tied", "num_heads": 9, "channels": 576},
        "runs/stories": {"num_layers": 4, "num_heads": 4, "channels": 128, "sequence_length": 256},
    }
    monkeypatch.setattr(sources, "read_sizes", known.__getitem__)
    parser = Parser("x")
    add_run_arguments(parser)
    config = run_config(parser.parse(["--config", recipe]))
    assert not config.init_from or config.channels == known[config.init_from]["channels"]


def test_recipes_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.find("gpt2-124m") == recipes.find("gpt2-124m.toml") == str(recipes.shipped()["gpt2-124m"])
    Path("gpt2-124m").touch()
    assert recipes.find("gpt2-124m") == "gpt2-124m", "a file of that name comes first"
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    trained, launched = listed[: listed.index("")], listed[listed.index("") + 1 :]
    for part in (trained, launched):
        assert "handgrad recipes NAME >" in part.pop(), "each list ends with what to do with one of it"
    assert [line.split()[0] for line in trained] == recipes.recipe_names()
    assert [line.split()[0] for line in trained + launched] == list(recipes.shipped())
    for name, path in recipes.shipped().items():
        assert main(["recipes", name]) == main(["recipes", path.name]) == 0
        assert capsys.readouterr().out == 2 * path.read_text()
    for words in (["recipes", "gpt2-124"], ["train", "--config", "recipes/gpt2-124.toml"]):
        assert main(words) == 64
        assert "did you mean gpt2-124m?" in capsys.readouterr().err
    assert main(["train", "gpt2-350m"]) == 64
    assert "handgrad train --config gpt2-350m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian"], "unknown command 'trian' (did you mean train?); `handgrad --help` lists all"),
        (["train"], "say what to train"),
        (["train", "tinny"], "did you mean tiny?"),
        (["train", "tiny", "--model", "d122"], "did you mean d12?"),
        (["train", "tiny", "--sted", "3"], "did you mean --seed?"),
        (["train", "tiny", "--lora"], "--lora needs a value, found none: train only adapters, like rank=16,alpha=32"),
        (["prepare", "text.txt", "--tokenizer"], "--tokenizer needs a value, found none: gpt2, bytes, bpe:SIZE"),
        (["sample", "run", "--top-p"], "--top-p needs a value, found none: only the likeliest"),
        (["train", "tiny", "--out=~/a"], "expected a path, found --out=~/a: shells leave that ~ alone; try --out ~/a"),
        (["train", "tiny", "--out", "~"], "out must be a folder whose ~ is written out, found ~"),
        (["train", "tiny", "--steps", "many"], "steps must be a whole number, found 'many'"),
        (["train", "tiny", "--steps", "0"], "steps must be at least 1"),
        (["train", "tiny", "--learning-rate", "nan"], "learning_rate must be a finite number"),
        (["train", "tiny", "--precision", "fp7"], "precision must be one of"),
        (["train", "tiny", "--precision", "tf32", "--device", "cpu"], "use fp32 or bf16"),
        (["train", "tiny", "--backend", "kernels", "--device", "cpu"], "or use --backend reference"),
        (["train", "tiny", "--master-weights", "false"], "master_weights false needs precision bf16"),
        (["sweep", "tiny", "--over", "seed=1,2,3"], "sweep is a loop of the shell now: `for seed in 1 2 3; do"),
        (["tune", "d12"], "tune is a script of the repository now: `python -m benchmarks.tune` there"),
        (["doctor", "--net"], "unknown argument '--net' (`python -m benchmarks.network` in the repository measures"),
        (["bench", "kernels", "--device", "cpu"], "needs a CUDA GPU"),
        (["train", "tiny", "--channels", "65"], "channels must be a multiple of num_heads"),
        (["train", "tiny", "--tokens-per-step", "1000"], "try --tokens-per-step 1024"),
        (["train", "tiny", "--recompute", "4"], "recompute must be 0, 1, 2 or 3"),
        (["train", "tiny", "--num-layers", "100000000"], "num_layers must be at most 1000"),
        (["train", "tiny", "--out", "a\0b"], "out must be text without NUL"),
        (["train", "tiny", "extra"], "one argument too many: 'extra'; after a PRESET all is named: --data DIR"),
        (["train", "--config", "no-such.toml"], "no-such.toml does not exist"),
        (["sample", "run", "--temperature", "-1"], "temperature must be"),
        (["plan", "d12", "--vocab-size", "0"], "--vocab-size"),
        (["plan", "d12", "--gpu", "h300"], "--gpu must be one of b200, "),
        (["plan", "d12", "--price", "cheap"], "--price must be a number, found 'cheap'"),
        (["sample", "run", "--max-tokens", "abc"], "--max-tokens must be a whole number, found 'abc'"),
        (["bench", "setp"], "found 'setp' (did you mean step?)"),
        (["train", "--config", "slurm"], "slurm is a launch file, not a recipe: `handgrad recipes slurm` prints it"),
        (["evaluate", "run", "--stall-seconds", "0"], "--stall-seconds must be 1 to 86400, found 0"),
        (["train", "tiny", "--seed", "99999999999"], "seed must be below 2^32"),
        (["sample", "run", "--seed", "99999999999"], "seed must be at least 0"),
        (["bench", "step", "--model", "d122"], "did you mean d12?"),
        (["prepare", "stories", "--tokenizer", "gpt5"], "gpt5"),
        (["prepare", "stories", "--validation-fraction", "2"], "validation"),
    ],
)
def test_usage_errors(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in refused(capsys, 64, *arguments)
    assert list(tmp_path.iterdir()) == [], "a refused command writes nothing"


def test_unknown_toml_key(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("learningrate = 1\n")
    assert "did you mean learning_rate?" in refused(capsys, 64, "train", "--config", str(recipe))
    recipe.write_text("preset = 3\n")
    assert "preset in" in refused(capsys, 64, "train", "--config", str(recipe))
    recipe.write_text("steps = [\n")
    assert "not valid TOML" in refused(capsys, 65, "train", "--config", str(recipe))
    recipe.write_bytes(b"\xff\xfe")
    refused(capsys, 65, "train", "--config", str(recipe))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing.txt", None, "missing.txt"),
        ("empty.txt", b"", "empty"),
        ("latin.txt", b"caf\xe9 au lait\n" * 50, "UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2"),
        ("nofield.jsonl", b'{"body": "a"}\n', "text"),
        ("table.parquet", b"PAR1 not really", "parquet"),
    ],
)
def test_bad_text(name: str, content: bytes | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        source.write_bytes(content)
    line = refused(capsys, 65, "prepare", str(source), "--out", str(out), "--workers", "1")
    assert told.lower() in line.lower() and name in line
    assert not out.exists(), "nothing half-written stands under the final name"


def bare_shards(folder: Path, train: bytes, validation: bytes) -> None:
    folder.mkdir()
    (folder / "x_train_000000.bin").write_bytes(train)
    (folder / "x_val_000000.bin").write_bytes(validation)


def shard(tokens: int, first: int = 0) -> bytes:
    return header(tokens) + ((np.arange(tokens) + first) % 50257).astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda b: b"\0" * 4 + b[4:], "20240520"),
        (lambda b: b[:4] + (7).to_bytes(4, "little") + b[8:], "version"),
        (lambda b: b[:-2], "tokens"),
        (lambda b: b[:-1], "byte"),
        (lambda b: b + b"\0\0", "tokens"),
        (lambda b: b[:500], "header"),
        (lambda b: b"", "header"),
        (lambda b: b[: HEADER_BYTES + 200] + b"\xff\xff" + b[HEADER_BYTES + 202 :], "65535"),
    ],
    ids=["magic", "version", "short", "odd", "long", "cut header", "empty", "token beyond the vocabulary"],
)
def test_bad_shards(damage, told: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "data"
    bare_shards(data, damage(shard(4000)), shard(400))
    line = refused(capsys, 65, "train", *SMALL, "--data", str(data), "--out", str(tmp_path / "run"))
    assert told in line and "x_train_000000.bin" in line, line


def test_corpus_shorter_than_a_sample_or_a_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = str(tmp_path / "run")
    bare_shards(tmp_path / "sample", shard(20), shard(20))
    line = refused(capsys, 65, "train", *SMALL, "--data", str(tmp_path / "sample"), "--out", run)
    assert "33 tokens" in line and "--sequence-length" in line
    bare_shards(tmp_path / "step", shard(200), shard(200))
    line = refused(capsys, 65, "train", *SMALL, "--data", str(tmp_path / "step"), "--out", run)
    assert "--micro-batch 4 --tokens-per-step 128" in line
    assert not Path(run).exists()


def test_a_warm_up_as_long_as_the_run(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The schedule never begins, and the run says so."""
    line = "warm-up    10 steps in a run of 4: the learning rate ends at 1.20e-03 on its way to 3.00e-03; --warmup-steps"
    train = ["train", *SMALL, "--data", str(shards), "--sample-tokens", "0", "--out"]
    assert main([*train, str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count(line) == 1 and line in (tmp_path / "run" / "log.txt").read_text()
    rates = [record["learning_rate"] for record in metrics(tmp_path / "run", "step")]
    assert rates[-1] == pytest.approx(1.2e-3)
    assert main([*train, str(tmp_path / "shorter"), "--warmup-steps", "3"]) == 0
    assert "warm-up" not in capsys.readouterr().out


def test_data_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, 65, "train", *SMALL, "--data", str(tmp_path / "none"), "--out", str(tmp_path / "run"))
    assert "handgrad prepare" in line
    assert "expected weights at" in refused(capsys, 65, "sample", str(tmp_path))
    refused(capsys, 65, "evaluate", str(tmp_path / "none"))
    refused(capsys, 65, "report", str(tmp_path / "none"))


@pytest.mark.fault(14)
def test_out_cannot_be_written(shards: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(capsys, 64, "train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "file"))
    refused(capsys, 74, "train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "file" / "run"))


def test_logs_on_a_full_disk(
    shards: Path, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes no byte, like a disk without space."""
    from handgrad.run.log import METRICS_FILE, RunLog

    original = RunLog._open

    def full(self: RunLog, name: str):
        return open("/dev/full", "w", buffering=1) if name == METRICS_FILE else original(self, name)  # noqa: PTH123

    monkeypatch.setattr(RunLog, "_open", full)
    line = refused(capsys, 74, "train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "run"))
    assert "No space left" in line


@pytest.mark.fault(41)
def test_a_run_that_does_not_fit_in_memory(
    shards: Path, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batch that the line names fits, with the texts that the run writes."""
    from handgrad.machine import devices

    monkeypatch.setattr(devices, "available_bytes", lambda device: 1_500_000)
    command = "train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "run")
    line = refused(capsys, 65, *command)
    assert "try --micro-batch 1 " in line
    assert main([*command, "--micro-batch", "1"]) == 0


@pytest.mark.fault(14)
def test_a_run_whose_checkpoints_do_not_fit(
    shards: Path, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20, 1 << 19, 1 << 19))
    arguments = [*SMALL, "--save-every", "1", "--data", str(shards), "--out", str(tmp_path / "run")]
    line = refused(capsys, 74, "train", *arguments)
    assert "3 checkpoints take" in line and "--keep-checkpoints" in line
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "checkpoints" / "step_00000001.partial").mkdir(parents=True)  # an interrupted save is none of them
    (tmp_path / "run" / LOCK_FILE).touch()
    assert "3 checkpoints take" in refused(capsys, 74, "train", *arguments)
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir()
    assert "2 checkpoints take" in refused(capsys, 74, "train", *arguments)


def test_an_evaluation_that_does_not_fit(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert "--micro-batch" in refused(capsys, 65, "evaluate", str(tmp_path / "run"), "--micro-batch", "100000000")


def test_doctor_is_well(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "forward and backward, fp32 and bf16 works" in shown and "FAIL" not in shown
