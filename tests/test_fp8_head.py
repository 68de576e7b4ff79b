"""The head's GEMMs in fp8: the default, what the weight gradient asks for, its chunks, and the benchmark of its cost."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import first_steps, fp8_head, machine_text
from benchmarks.llama_twin import sizes
from handgrad import cli
from handgrad.data.mixture import open_data
from handgrad.errors import ConfigError, UsageError
from handgrad.joins.fp8.formats import E4M3, E5M2, Quantized
from handgrad.joins.fp8.tables import fp8_gemms
from handgrad.machine.gpus import GPUS
from handgrad.run.folder import as_begun
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check, to_toml
from handgrad.storage.checkpoint import peek_config
from handgrad.tools.speeds import gemm_seconds_per_token
from tests.test_fp8_training import steps_of

ALL = "forward,dgrad,wgrad"


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, precision="fp8", fp8_head=ALL, fp8_window=2, fp8_count_every=1)


def test_all_three_are_the_default() -> None:
    heads = {"auto": ALL, "none": "", "": "", "forward": "forward"}
    assert {head: RunConfig(precision="fp8", fp8_head=head).fp8_head_gemms for head in heads} == heads
    assert RunConfig().fp8_head == "auto" and RunConfig(lora="rank=8", init_from="x").fp8_head_gemms == ""


def test_a_run_keeps_the_head_that_it_began_with(config: RunConfig) -> None:
    """Under the same command, which leaves it open; so does a run of before, which had no GEMM of the head in fp8."""
    left_open = dataclasses.replace(config, precision="fp8", steps=2, save_every=1, sample_tokens=0)
    for folder, begun, kept in (("new", "auto", ALL), ("old", "none", "")):
        run = dataclasses.replace(left_open, out=f"{config.out}-{folder}")
        train(dataclasses.replace(run, fp8_head=begun))
        assert (peek_config(Path(run.out)) or {})["fp8_head"] == kept
        _, (line,) = as_begun(run)
        assert line.endswith(f"its start: packing stream, lanes 1, fp8_head {kept or 'none'}, fp8_gradients e4m3")
        shutil.rmtree(Path(run.out) / "checkpoints" / "step_00000002")
        train(run)
        log = (Path(run.out) / "log.txt").read_text()
        assert "resumed at step 1" in log and log.count("mlp, head;") == 2 * bool(kept)
    with pytest.raises(ConfigError, match="fp8_head"):
        train(dataclasses.replace(run, steps=3, fp8_head="forward"))


@pytest.mark.nightly(but=["48-gpt2", "0-modern"])
@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
@pytest.mark.parametrize("chunk", [0, 48])
def test_recompute_levels_give_the_same_bits(fp8: RunConfig, architecture: str, chunk: int) -> None:
    """In one chunk, and in chunks of which the last is shorter."""
    config = check(dataclasses.replace(fp8, head_chunk_tokens=chunk, architecture=architecture))
    first, results, found = steps_of(config, 3)
    logits, lnf = first.state.activations.logits, first.state.activations.lnf
    assert isinstance(logits, Quantized) and isinstance(lnf, Quantized)
    assert logits.columns is not None and logits.columns.dtype == E5M2 and logits.columns.shape == (384, chunk or 128)
    assert lnf.columns is not None and lnf.columns.dtype == E4M3
    for recompute in (1, 2, 3):
        again, others, other_found = steps_of(dataclasses.replace(config, recompute=recompute), 3)
        assert torch.equal(again.state.master, first.state.master)
        assert (others, other_found) == (results, found)


def test_the_weight_gradient_alone_differs(fp8: RunConfig) -> None:
    """The first step's loss is that of a head with two GEMMs in fp8; its update is not."""
    (one, results, _), (other, others, _) = (
        steps_of(dataclasses.replace(fp8, fp8_head=head), 1) for head in (ALL, "forward,dgrad")
    )
    assert results[0].loss == others[0].loss and results[0].norm != others[0].norm
    assert not torch.equal(one.state.master, other.state.master)


def test_other_runs_have_no_memory_for_it(fp8: RunConfig) -> None:
    two, three = (
        {buffer.name for buffer in resolve(dataclasses.replace(fp8, fp8_head=head), 257).plan.buffers}
        for head in ("forward,dgrad", ALL)
    )
    assert three - two == {"logits.columns", "lnf.columns"} and two <= three


def test_the_roofline_knows_it(fp8: RunConfig) -> None:
    def seconds(head: str) -> float:
        design = resolve(dataclasses.replace(fp8, fp8_head=head), 257)
        return gemm_seconds_per_token(GPUS["h200"], design, "fp8", 4e12)

    two, three, none = seconds("forward,dgrad"), seconds(ALL), seconds("")
    assert none - two == pytest.approx(2 * (two - three)) and two > three


@pytest.mark.parametrize("head", ["wgrad", "forward,wgrad"])
def test_it_needs_the_input_gradient(head: str) -> None:
    with pytest.raises(UsageError, match=f"wgrad needs dgrad, found '{head}'; try --fp8-head dgrad,{head}"):
        fp8_gemms("", head, 2, ("qkv", "proj", "mlp"))


def test_chunks_must_be_multiples_of_16(fp8: RunConfig) -> None:
    with pytest.raises(UsageError, match="multiple of 16 for fp8_head wgrad, found 40; try --head-chunk-tokens 48"):
        check(dataclasses.replace(fp8, head_chunk_tokens=40))
    check(dataclasses.replace(fp8, head_chunk_tokens=40, fp8_head="forward,dgrad"))


def test_the_benchmark_names_a_llamas_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(fp8_head, "subprocess", SimpleNamespace(run=lambda command, check: commands.append(command[3:])))
    for model in ("Qwen2.5-0.5B", "d12"):
        fp8_head.train("shards", tmp_path, model, fp8_head.HEADS["e5m2"], 1, {"steps": "9"})
    qwen, gpt2 = commands
    assert gpt2[:2] == ["train", "d12"] and qwen[1].startswith("--")
    assert qwen[qwen.index("--llama") + 1] == sizes("Qwen2.5-0.5B")["llama"] and qwen[qwen.index("--channels") + 1] == "896"
    assert all(command[command.index("--fp8-gradients") + 1] == "e5m2" for command in commands)
    assert all(command[command.index("--steps") + 1] == "9" for command in commands)


@pytest.mark.nightly  # of a measuring script
def test_the_benchmark_makes_all_runs_once(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: each run would spend ten times as long on importing torch."""

    def train_here(command: list[str], *, check: bool) -> None:
        assert command[:3] == [sys.executable, "-m", "handgrad"] and check
        assert cli.main(command[3:]) == 0

    monkeypatch.setattr(fp8_head, "subprocess", SimpleNamespace(run=train_here))
    sizes = "num_layers=1 num_heads=2 channels=32 sequence_length=32 micro_batch=4 tokens_per_step=128 steps=2 device=cpu"
    out, work = tmp_path / "head.json", tmp_path / "runs"
    arguments = [str(out), "--data", str(shards), "--work", str(work), "--seeds", "1,2"]
    quick = "eval_every=1 eval_tokens=256 warmup_steps=0 log_every=1"
    monkeypatch.setattr(sys, "argv", ["fp8_head", *arguments, "--set", *sizes.split(), *quick.split()])
    fp8_head.main()
    groups = json.loads(out.read_text())["groups"]
    assert list(groups) == list(fp8_head.FP8) and all(row["seeds"] == [1, 2] for row in groups.values())
    assert groups["none"]["difference"] == 0 and groups["all"]["standard_error"] > 0
    assert [len(list(work.glob(f"{name.replace(' ', '-')}-*"))) for name in fp8_head.FP8] == [2, 2, 2]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--heads", "bf16,all", "--shared"])
    fp8_head.main()
    groups = json.loads(out.read_text())["groups"]
    assert list(groups) == ["bf16", "all"] and not any("seconds" in row for row in groups.values())
    assert (peek_config(work / "bf16-1") or {})["precision"] == "bf16" and groups["all"]["difference"] != 0
    before = {path: path.stat().st_mtime_ns for path in work.rglob("model.safetensors")}
    fp8_head.main()
    assert {path: path.stat().st_mtime_ns for path in work.rglob("model.safetensors")} == before


def test_the_first_steps_of_runs_that_were_stopped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Another seed has other samples, and a run that stopped sooner lacks steps: both are refused."""

    def run(name: str, losses: list[float], **settings: object) -> Path:
        (folder := tmp_path / name).mkdir()
        (folder / "config.toml").write_text(to_toml(dataclasses.replace(RunConfig(), **settings)))
        start = {"kind": "run", "device": "cuda: a GPU", "torch": "2", "commit": "cafe"}
        steps = [
            {"kind": "step", "step": n, "loss": loss, "norm": 1.0, "tokens": 64 * n} for n, loss in enumerate(losses, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [start, *steps]))
        return folder

    bf16, fp8 = run("bf16", [5.0, 4.0, 3.0], precision="bf16"), run("fp8", [5.0, 4.5, 3.5, 9.0], precision="fp8")
    first_steps.main(str(tmp_path / "out.json"), "2-3", [f"bf16={bf16}", f"fp8={fp8}"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"] == "cuda: a GPU" and found["runs"]["fp8"]["difference"] == 0.5
    assert found["runs"]["fp8"]["losses"] == [5.0, 4.5, 3.5] and found["runs"]["fp8"]["tokens"] == 192
    assert "fp8                      4.0000 (+0.5000); precision: 'bf16' -> 'fp8'" in capsys.readouterr().out
    for other, told in ((run("seed", [5.0, 4.0, 3.0], seed=1), "has seed 1"), (run("short", [5.0]), "lacks some")):
        with pytest.raises(AssertionError, match=told):
            first_steps.compare({"bf16": bf16, "other": other}, 2, 3)


def test_text_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file once, none that is no text; a tokenizer that `prepare` takes, with a vocabulary of the size wanted."""
    (folder := tmp_path / "here").mkdir()
    texts = {"a.py": "x = 1  # one\n" * 40, "b.md": "words of a page\n" * 40, "twin.py": "x = 1  # one\n" * 40}
    for name, text in (texts | {"data.bin": "words" * 100, "short.py": "x"}).items():
        (folder / name).write_text(text)
    (folder / "bytes.txt").write_bytes(b"\xff\xfe" * 200)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["machine_text", str(out), "--roots", str(folder), "--vocabulary", "512"])
    monkeypatch.setattr(machine_text, "WORDS", 300)
    machine_text.main()
    rows = [json.loads(line)["text"] for part in sorted(out.glob("text/*")) for line in part.read_text().splitlines()]
    assert sorted(rows) == sorted({texts["a.py"], texts["b.md"]})
    shards, source = tmp_path / "shards", out / "text" / "*.jsonl"
    assert cli.main(["prepare", str(source), "--tokenizer", str(out / "tokenizer"), "--out", str(shards)]) == 0
    assert open_data(str(shards)).tokenizer.vocab_size == 512
    found = list(machine_text.up_to(iter(["four", "five", "six"]), 8))
    assert found == ["four", "five"], "whole files"
