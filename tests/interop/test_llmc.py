"""Files of llm.c, written and read: the layout byte by byte, the same bits after export and import, and going on."""

import itertools
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.interop.llmc_model import LlmcModel, read_model
from handgrad.interop.llmc_state import OptimizerState, read_state, write_state
from handgrad.interop.llmc_tokenizer import read_tokens
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored
from tests.interop.models import SIZES, TOKENIZERS, make_checkpoint, our_logits, random_tokens, weights
from tests.test_commands import SMALL, refused

# llm.c's own order and shapes, without the layers, written down once more from `ParameterTensors`.
THEIRS: tuple[tuple[str, str], ...] = (
    *(("wte", "Vp C"), ("wpe", "T C"), ("ln1_weight", "L C"), ("ln1_bias", "L C"), ("qkv_weight", "L 3C C")),
    *(("qkv_bias", "L 3C"), ("proj_weight", "L C C"), ("proj_bias", "L C"), ("ln2_weight", "L C"), ("ln2_bias", "L C")),
    *(("fc_weight", "L 4C C"), ("fc_bias", "L 4C"), ("fcproj_weight", "L C 4C"), ("fcproj_bias", "L C")),
    *(("lnf_weight", "C"), ("lnf_bias", "C")),
)

# (precision of the weight, weight, master weight, whether they belong together)
MASTERS = [
    (torch.bfloat16, 1.0, 1.0 + 2**-7 - 2**-20, True),
    (torch.bfloat16, 1.0 + 2**-7, 1.0, True),
    (torch.bfloat16, -1.0, -1.0 - 2**-8, True),
    (torch.bfloat16, 0.0, 2.0**-140, True),
    (torch.bfloat16, 1.0 + 2**-6, 1.0, False),
    (torch.bfloat16, -1.0, -1.0 - 2**-6, False),
    (torch.bfloat16, 0.0, 1e-3, False),
    (torch.float32, 1.0, 1.0, True),
    (torch.float32, 1.0, 1.0 + 2**-23, False),
]


def read_as_llmc(path: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """A float32 model file, parsed by nothing of ours: header and tensors as llm.c points into them."""
    content = path.read_bytes()
    header = list(struct.unpack("<256i", content[:1024]))
    T, _, L, _, C, Vp = header[2:8]
    sizes = {"Vp": Vp, "T": T, "L": L, "C": C, "3C": 3 * C, "4C": 4 * C}
    tensors, start = {}, 1024
    for name, dims in THEIRS:
        shape = tuple(sizes[d] for d in dims.split())
        tensors[name] = np.frombuffer(content, "<f4", math.prod(shape), start).reshape(shape)
        start += 4 * math.prod(shape)
    assert start == len(content)
    return header, tensors


@pytest.mark.parametrize("kind", SIZES)
def test_a_model_file_is_llmcs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every byte has the place that llm.c reads it from, and comes back as the same bits."""
    run, shape = make_checkpoint(tmp_path / "run", kind)
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    assert "every number is the same bits" in capsys.readouterr().out
    header, tensors = read_as_llmc(tmp_path / "c" / "model.bin")
    sizes = [shape.sequence_length, shape.vocab_size, shape.num_layers, shape.num_heads, shape.channels]
    assert header == [20240326, 3, *sizes, -(-shape.vocab_size // 128) * 128] + [0] * 248
    stored = weights(run)
    for name, values in tensors.items():
        for layer in range(shape.num_layers) if f"blocks.0.{name}" in stored else [None]:
            ours = stored[name if layer is None else f"blocks.{layer}.{name}"].numpy()
            theirs = values if layer is None else values[layer]
            assert np.array_equal(theirs[: len(ours)], ours) and not theirs[len(ours) :].any(), name
    assert main(["import", str(tmp_path / "c" / "model.bin"), "--out", str(tmp_path / "back")]) == 0
    after = weights(tmp_path / "back")
    assert stored.keys() == after.keys() and all(torch.equal(stored[name], after[name]) for name in stored)
    then, now = checkpoint.find(str(run)).manifest, checkpoint.find(str(tmp_path / "back")).manifest
    assert then["tokenizer"] == now["tokenizer"] and now["imported"]["from"] == "llm.c" and now["step"] == 0
    tokens, end_of_text = read_tokens(tmp_path / "c" / "gpt2_tokenizer.bin")
    assert tokens == TOKENIZERS[kind]().token_bytes and end_of_text == TOKENIZERS[kind]().end_of_text


def test_the_tokenizer_file_of_gpt2(tmp_path: Path) -> None:
    """As the published gpt2_tokenizer.bin begins and ends; without its end-of-text id (version 1) it reads the same."""
    from handgrad.interop.llmc_tokenizer import tokenizer_bytes

    content = tokenizer_bytes(TOKENIZERS["gpt2"]())
    assert struct.unpack("<4i", content[:16]) == (20240328, 2, 50257, 50256) and not any(content[16:1024])
    assert content[1024:1030] == b'\x01!\x01"\x01#' and content.endswith(b"\x0d<|endoftext|>")
    (tmp_path / "old.bin").write_bytes(struct.pack("<4i", 20240328, 1, 50257, 0) + content[16:])
    assert read_tokens(tmp_path / "old.bin") == (TOKENIZERS["gpt2"]().token_bytes, 50256)


def test_bf16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Half the bytes; what comes back is the rounding of what went out; rounded again, it is the same file."""
    run, shape = make_checkpoint(tmp_path / "run", "bpe")
    for source, name in ((run, "half"), (tmp_path / "back", "again")):
        assert main(["export", str(source), "--to", "llmc", str(tmp_path / name), "--dtype", "bf16"]) == 0
        told = capsys.readouterr().out
        assert ("moves a logit by 0 at most" in told) == (name == "again") and "moves a logit by" in told
        if name == "half":
            assert main(["import", str(tmp_path / "half" / "model.bin"), "--out", str(tmp_path / "back")]) == 0
    before, after = weights(run), weights(tmp_path / "back")
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
    content = (tmp_path / "half" / "model.bin").read_bytes()
    assert content == (tmp_path / "again" / "model.bin").read_bytes() and struct.unpack("<i", content[4:8]) == (5,)
    first = torch.tensor(np.frombuffer(content, "<i2", shape.channels, 1024)).view(torch.bfloat16)
    assert torch.equal(first, before["wte"][0].bfloat16())


def test_a_run_goes_on_through_llmc(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Half a run, out to llm.c's files, back in, and the second half: the bits of a run that never left."""
    settings = [*SMALL, "--steps", "6", "--data", str(shards), "--schedule", "constant"]
    assert main(["train", *settings, "--out", str(tmp_path / "whole")]) == 0
    assert main(["train", *settings, "--steps", "3", "--out", str(tmp_path / "half")]) == 0
    c = tmp_path / "c"
    assert main(["export", str(tmp_path / "half"), "--to", "llmc", str(c), "--with-optimizer"]) == 0
    assert sorted(path.name for path in c.iterdir()) == [
        *("DONE_00000003", "gpt2_tokenizer.bin", "model.bin", "model_00000003.bin", "state_00000003_00000.bin")
    ]
    header = struct.unpack("<256i", (c / "state_00000003_00000.bin").read_bytes()[:1024])
    assert header[:6] == (20240527, 1, 1, 0, 1, 0) and header[10] == 3
    model, state = c / "model_00000003.bin", c / "state_00000003_00000.bin"
    assert main(["import", str(model), "--out", str(tmp_path / "on"), "--optimizer", str(state)]) == 0
    told = capsys.readouterr().out
    assert "after 3 steps" in told
    hint = next(line.split() for line in told.splitlines() if line.strip().startswith("handgrad train"))
    command = [str(shards) if word == "SHARDS" else word for word in hint[1:]]
    assert main(["evaluate", str(tmp_path / "on"), "--data", str(shards)]) == 0
    assert "was started with another" in refused(capsys, 78, "train", *settings, "--out", str(tmp_path / "on"))
    others = dict(zip(settings[1::2], settings[2::2], strict=True))  # after the preset
    others = {flag: value for flag, value in others.items() if flag not in command}
    assert main([command[0], settings[0], *command[1:], *itertools.chain(*others.items())]) == 0
    assert checkpoint.find(str(tmp_path / "on")).manifest["init"]["sha256"].keys() == {model.name, state.name}
    last = []
    for run in ("whole", "on"):
        folder = checkpoint.find(str(tmp_path / run))
        assert folder.step == 6
        last.append([(folder.folder / name).read_bytes() for name in (checkpoint.WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE)])
    assert last[0] == last[1]
    assert "found none" in refused(
        capsys, 64, "export", str(make_checkpoint(tmp_path / "bare", "bytes")[0]), "--to", "llmc", str(tmp_path / "x"),
        "--with-optimizer",
    )  # fmt: skip


def make_state(run: Path, folder: Path, processes: int, *, zero: bool, shuffles: bool = False) -> dict[str, Tensor]:
    """A model file and a state of several processes, laid out as `save_state` does; returns what it holds by name."""
    assert main(["export", str(run), "--to", "llmc", str(folder)]) == 0
    _, tensors = read_as_llmc(folder / "model.bin")
    generator = np.random.default_rng(0)
    whole: dict[str, dict[str, np.ndarray]] = {"m": {}, "v": {}, "master": tensors}
    held = {}
    for part in ("m", "v"):
        for name, values in tensors.items():
            drawn = generator.random(values.shape, np.float32)
            if name == "wte":
                drawn[257:] = 0
            whole[part][name] = drawn
            for layer in range(len(values)) if dict(THEIRS)[name].startswith("L") else [None]:
                key = f"{part}.{name}" if layer is None else f"{part}.blocks.{layer}.{name}"
                held[key] = torch.from_numpy((drawn if layer is None else drawn[layer])[: 257 if name == "wte" else None])
    for rank in range(processes):
        header = np.zeros(256, "<i4")
        header[:6] = 20240527, 1, processes, rank, 1, int(shuffles)
        header[10] = 77
        content = [header.tobytes()]
        for part in whole.values():
            for name, values in part.items():
                layers = values if dict(THEIRS)[name].startswith("L") else values[None]
                for layer in layers.reshape(len(layers), -1):
                    size = len(layer) // processes
                    content.append((layer[rank * size : (rank + 1) * size] if zero else layer).tobytes())
        if shuffles:
            content.append(struct.pack("<q3iq5i", 3, 2, 0, 1, 5, 4, 3, 2, 1, 0) + bytes(2520))
        (folder / f"state_00000077_{rank:05d}.bin").write_bytes(b"".join(content))
    return held


@pytest.mark.parametrize(
    ("processes", "zero", "shuffles"),
    [(1, False, False), (1, False, True), (4, False, True), (4, True, False), (2, True, True)],
)
def test_states_of_several_processes(processes: int, zero: bool, shuffles: bool, tmp_path: Path) -> None:
    """Whole in each rank's file or cut by ZeRO, with and without the loader's permutations behind it."""
    run, shape = make_checkpoint(tmp_path / "run", "bytes")
    held = make_state(run, tmp_path / "c", processes, zero=zero, shuffles=shuffles)
    state = read_state(tmp_path / "c" / f"state_00000077_{processes - 1:05d}.bin", read_model(tmp_path / "c" / "model.bin"))
    assert state.step == 77 and state.has_master and len(state.paths) == (processes if zero else 1)
    for row in parameter_table(shape):
        for part in ("m", "v"):
            assert torch.equal(state.values(part, row), held[f"{part}.{row.name}"]), f"{part}.{row.name}"
        assert torch.equal(state.values("master", row), weights(run)[row.name])


def test_master_weights_are_the_weights(tmp_path: Path) -> None:
    """A bf16 model with a state is imported with the float32 weights it was rounded from."""
    run, _ = make_checkpoint(tmp_path / "run", "bytes")
    found = checkpoint.find(str(run))
    moments = [Stored.of(f"{part}.{name}", value**2) for part in "mv" for name, value in weights(run).items()]
    state = [Stored.of(name, value) for name, value in weights(run).items()]
    manifest = {key: found.manifest[key] for key in ("config", "vocab_size", "tokenizer", "identity")}
    checkpoint.save(found.folder.parent, 41, [*state, *moments], manifest, {})
    arguments = ["export", str(run), "--to", "llmc", str(tmp_path / "c"), "--dtype", "bf16", "--with-optimizer"]
    assert main(arguments) == 0
    model, optimizer = tmp_path / "c" / "model.bin", tmp_path / "c" / "state_00000041_00000.bin"
    assert main(["import", str(model), "--out", str(tmp_path / "back"), "--optimizer", str(optimizer)]) == 0
    before, after = weights(run), weights(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("dtype", "weight", "master", "accepted"), MASTERS)
def test_a_master_weight_is_a_bf16_step_away_at_most(
    dtype: torch.dtype, weight: float, master: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stochastic rounding leaves it: of numbers from 1 to 2 a step is 2^-7. Float32 weights are their own masters."""
    row = parameter_table(ModelShape(257, 16, 1, 1, 8))[0]
    model = cast(LlmcModel, SimpleNamespace(dtype=dtype, path=Path("model.bin"), weight=lambda row: torch.tensor([weight])))
    monkeypatch.setattr(OptimizerState, "values", lambda state, name, row: torch.tensor([master]))
    state = OptimizerState(model, (Path("state.bin"),), 1, True)
    if accepted:
        assert state.master(row).item() == master
    else:
        with pytest.raises(DataError, match="different steps or runs"):
            state.master(row)


def test_the_same_logits(tmp_path: Path) -> None:
    run, shape = make_checkpoint(tmp_path / "run", "bpe")
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    named = ["--tokenizer", str(checkpoint.find(str(run)).folder / "tokenizer.json")]
    (tmp_path / "c" / "tokenizer.json").unlink()
    assert main(["import", str(tmp_path / "c" / "model.bin"), "--out", str(tmp_path / "back"), *named]) == 0
    tokens = random_tokens(shape)
    assert torch.equal(our_logits(run, tokens), our_logits(tmp_path / "back", tokens))
    assert json.loads((checkpoint.find(str(tmp_path / "back")).folder / "manifest.json").read_text())["step"] == 0


def test_the_header_of_a_state_is_llmcs(tmp_path: Path) -> None:
    """Its words by train_gpt2.cu: [10] steps, [20] the generator's seed, [32] and [33] a loader that has read nothing."""
    shape, path = ModelShape(11, 8, 1, 1, 16), tmp_path / "state_00000007_00000.bin"
    write_state(path, shape, 7, dict.fromkeys(("m", "v"), lambda row: torch.zeros(row.stored_shape)))
    words = np.frombuffer(path.read_bytes()[:1024], "<i4")
    assert words[[2, 3, 4, 5, 10, 20, 32, 33]].tolist() == [1, 0, 0, 0, 7, 13371337, -1, -1]
