"""Programs of others beside handgrad: their files hold handgrad's weights and samples, their lines are read, their end is
told."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import llama_speed, peer_programs
from benchmarks.contenders import Settings, tokens_of
from handgrad.errors import UsageError
from handgrad.interop.llmc import read_model
from handgrad.memory.rows import initialize
from handgrad.models import parameter_table

PROGRAM = """#!{python}
import sys
arguments = " ".join(sys.argv[1:])
print("loading", flush=True)
if "e4m3" in arguments:
    sys.exit("no fp8 on this card")
for step in range(4):
    print(f"[T] step {{step:5}} [ 1%] | time: 1 ms | norm   1.0 | loss  {{11.5 - step}} | tps 12k", flush=True)
"""


@pytest.fixture
def settings() -> Settings:
    return Settings("tiny-qwen", 2, 32, 2, device="cpu", precision="fp32", vocab_size=300)


@pytest.fixture
def llmq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints llmq's lines and ends, and a shape for it."""
    program = tmp_path / "train"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("LLMQ", str(program))
    tiny = (300, 2, 4, 32, "kv_heads=2,feed_forward=96,tied,qkv_bias")
    monkeypatch.setitem(llama_speed.SHAPES, "tiny-qwen", tiny)
    return program


def test_names() -> None:
    names = ["llmc", "llmq", "llmq+e4m3", "llmq+16", "llmq+e4m3+16", "llmc+16", "llmq+fp8", "twin"]
    assert [peer_programs.is_program(name) for name in names] == [True] * 5 + [False] * 3


def test_its_lines_are_its_losses(llmq: Path, settings: Settings) -> None:
    assert llama_speed.check_contenders("handgrad,llmq", "bf16") == ["handgrad", "llmq"]
    run = llama_speed.make_run("llmq", settings)
    assert run.turn(lambda finished: finished < 2) == [11.5, 10.5]
    assert run.turn(lambda finished: False) == [9.5] and run.completed == 3
    run.turn(lambda finished: False)
    with pytest.raises(UsageError, match="the program ended with 0: loading"):
        run.turn(lambda finished: False)


def test_its_last_words_are_told(llmq: Path, settings: Settings) -> None:
    with pytest.raises(UsageError, match="the program ended with 1: loading / no fp8 on this card"):
        llama_speed.make_run("llmq+e4m3", settings).turn(lambda finished: False)


def test_a_program_that_is_not_there(llmq: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMQ")
    with pytest.raises(UsageError, match="expected the path of the built program of llmq in LLMQ, found ''"):
        llama_speed.make_run("llmq", settings)
    for name, words in (("llmq", "Qwen2.5, found gpt2"), ("llmc", "GPT-2, found llama")):
        config = Settings("d12" if name == "llmq" else "tiny-qwen", 1, 32, 1, device="cpu", vocab_size=300).config()
        with pytest.raises(UsageError, match=words):
            peer_programs.COMMANDS[name](Path(), config, config.shape(300), None, name)


def test_llmqs_files(llmq: Path, settings: Settings, tmp_path: Path) -> None:
    """They hold the same weights, tokens and sizes as handgrad's run."""
    config, tokens = settings.config(), tokens_of(settings)
    shape = config.shape(tokens.vocab_size)
    arguments = peer_programs.llmq_command(tmp_path, config, shape, tokens, "llmq+4")
    assert {"--batch-size=4", "--grad-accumulation=1", "--matmul-dtype=bf16", "--seq-length=32"} <= {*arguments}
    theirs = load_file(tmp_path / "model.safetensors")
    row = next(row for row in parameter_table(shape) if row.name == "wte")
    assert torch.equal(theirs["model.embed_tokens.weight"], initial(shape, config.seed, row).to(torch.bfloat16))
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 2
    content = (tmp_path / "tokens.bin").read_bytes()
    header, stored = np.frombuffer(content[:1024], "<i4"), np.frombuffer(content[1024:], "<i4")
    assert content.startswith(b"BIN.TOK\n") and header[2:7].tolist() == [2, 4, len(stored), 300, 0]
    check_tokens(stored, tokens, 32)


def test_llmcs_files(tmp_path: Path) -> None:
    settings = Settings("d12", 2, 32, 1, device="cpu", precision="fp32", vocab_size=300)
    tokens = tokens_of(settings)
    config = dataclasses.replace(settings.config(), num_layers=2, num_heads=2, channels=16)
    shape = config.shape(300)
    arguments = peer_programs.llmc_command(tmp_path, config, shape, tokens, "llmc")
    assert arguments[arguments.index("-d") + 1] == "64"
    model = read_model(tmp_path / "model.bin")
    assert (model.shape.num_layers, model.shape.channels, model.dtype) == (2, 16, torch.bfloat16)
    stored = np.frombuffer((tmp_path / "tokens.bin").read_bytes()[1024:], "<u2")
    check_tokens(stored, tokens, 32)


def initial(shape, seed: int, wanted) -> torch.Tensor:
    values = {}
    initialize([wanted], seed, lambda row, drawn: values.__setitem__(row.name, drawn))
    return values[wanted.name]


def check_tokens(stored: np.ndarray, tokens, length: int) -> None:
    """Sample 3's tokens, and the targets one further."""
    inputs, targets = (torch.zeros(1, length, dtype=torch.int64) for _ in range(2))
    tokens.source.fill(inputs, targets, 3)
    assert stored[3 * length : 4 * length].tolist() == inputs[0].tolist()
    assert stored[3 * length + 1 : 4 * length + 1].tolist() == targets[0].tolist()
