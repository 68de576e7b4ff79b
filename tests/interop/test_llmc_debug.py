"""llm.c's debug state: written by PyTorch's autograd, read here, and forward and backward held against it."""

import math
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.llmc_debug import DebugState, compare, main, read_debug_state
from benchmarks.twin import Twin
from handgrad.data.llmc_header import DEBUG_STATE, make_header
from handgrad.interop.llmc import Values, all_bytes, read_model, write_model
from handgrad.memory.rows import flat_elements
from handgrad.models import gpt2, parameter_table
from handgrad.ops import reference
from handgrad.settings.config import ModelShape

ODD = ModelShape(vocab_size=57, sequence_length=19, num_layers=3, num_heads=3, channels=33)
CPU = torch.device("cpu")


def twin_logits(twin: Twin, tokens: Tensor) -> Tensor:
    x = twin.wte(tokens) + twin.wpe.weight[: tokens.shape[1]]
    for block in twin.blocks:
        x = block(x)
    return F.linear(twin.lnf(x), twin.wte.weight)[..., : twin.vocab_size]


def write_debug_state(
    path: Path, shape: ModelShape, tokens: Tensor, targets: Tensor, logits: Tensor, loss: float, gradient: Values
) -> None:
    """Writes a debug state: tokens and targets (B, T), logits (B, T, V), the mean loss, and the gradients of that mean."""
    batch = [ids.int().numpy().tobytes() for ids in (tokens, targets)]
    results = [values.float().numpy().tobytes() for values in (logits, torch.tensor([loss]))]
    words = {0: DEBUG_STATE, 1: 2, 2: tokens.shape[0], 3: tokens.shape[1]}
    path.write_bytes(b"".join([make_header(words), *batch, *results, *all_bytes(shape, gradient, torch.float32)]))


def make_state(
    folder: Path, shape: ModelShape = ODD, batch: int = 3, length: int = 17, seed: int = 4
) -> tuple[Path, Path, Twin]:
    """A model file and PyTorch's float32 debug state of it: (state file, model file, the model with its gradients)."""
    table, generator = parameter_table(shape), torch.Generator().manual_seed(seed)
    flat = torch.zeros(flat_elements(table))
    for row in table:
        center = 1.0 if row.init.kind == "constant" else 0.0
        row.stored(flat).copy_(center + 0.1 * torch.randn(row.stored_shape, generator=generator))
    tokens, targets = torch.randint(shape.vocab_size, (2, batch, length), generator=generator)
    twin = Twin(shape, padded=True)
    twin.load(table, flat)
    loss = twin(tokens, targets)
    loss.backward()
    with torch.no_grad():
        logits = twin_logits(twin, tokens)
    write_model(folder / "model.bin", shape, lambda row: row.stored(flat), torch.float32)

    def gradient(row) -> Tensor:
        found = twin.parameter_of(row).grad
        assert found is not None
        return found[: row.stored_rows]

    write_debug_state(folder / "state.bin", shape, tokens, targets, logits, loss.item(), gradient)
    return folder / "state.bin", folder / "model.bin", twin


def test_the_layout_is_llmcs(tmp_path: Path) -> None:
    """Read by nothing of ours: B, T, inputs, targets, logits, the loss, and gradients that begin with the embedding's."""
    path, _, twin = make_state(tmp_path)
    content, N, V, C = path.read_bytes(), 51, 57, 33
    assert struct.unpack("<5i", content[:20]) == (20240327, 2, 3, 17, 0)
    tokens = torch.tensor(struct.unpack(f"<{N}i", content[1024 : 1024 + 4 * N])).view(3, 17)
    targets = torch.tensor(struct.unpack(f"<{N}i", content[1024 + 4 * N : 1024 + 8 * N])).view(3, 17)
    start = 1024 + 8 * N
    logits = torch.tensor(struct.unpack(f"<{N * V}f", content[start : start + 4 * N * V])).view(3, 17, V)
    (loss,) = struct.unpack("<f", content[start + 4 * N * V : start + 4 * N * V + 4])
    start += 4 * N * V + 4
    gradients = torch.frombuffer(bytearray(content[start:]), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(twin_logits(twin, tokens), logits) and twin(tokens, targets).item() == loss
    assert torch.equal(gradients[: V * C].view(V, C), twin.wte.weight.grad[:V]) and not gradients[V * C : 128 * C].any()
    assert torch.equal(gradients[128 * C : (128 + 19) * C].view(19, C), twin.wpe.weight.grad)
    assert torch.equal(gradients[-C:], twin.lnf.bias.grad)
    last_fc = gradients[-2 * C - 3 * C - 3 * 4 * C * C - 4 * C : -2 * C - 3 * C - 3 * 4 * C * C]
    assert torch.equal(last_fc, twin.blocks[2].fc.bias.grad), "layer after layer within a tensor"


@pytest.mark.parametrize(
    ("shape", "batch", "length"), [(ODD, 3, 17), (ODD, 1, 1), (ModelShape(300, 32, 2, 2, 32), 2, 32)], ids=str
)
def test_handgrad_finds_what_pytorch_found(shape: ModelShape, batch: int, length: int, tmp_path: Path) -> None:
    draws = range(4, 12) if batch * length == 1 else [4]  # a row of 33 numbers says little of float32's error
    found = []
    for seed in draws:
        folder = tmp_path / str(seed)
        folder.mkdir()
        path, model, _ = make_state(folder, shape, batch, length, seed)
        found.append(list(compare(read_debug_state(path, read_model(model)), CPU, reference)))
    assert len(found[0]) == 18
    for each in zip(*found, strict=True):  # a tensor in all draws
        error, tolerance = (
            math.hypot(*values) for values in zip(*((one.error, one.tolerance) for one in each), strict=True)
        )
        assert error <= tolerance, f"{each[0].name}: {error:.3g} > {tolerance:.3g}"
        assert all(one.tolerance < 1e-5 for one in each), "of the size of float32's rounding"


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, _ = make_state(tmp_path)
    arguments = [str(path), str(model)]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert told.count("ok  ") == 19 and "gradient of fcproj_weight: relative error" in told and "3 texts of 17" in told
    state = bytearray(path.read_bytes())
    for place, wrong in ((-4, "lnf_bias"), (1024 + 8 * 51 + 40, "logits"), (1024 + 8 * 51 + 4 * 51 * 57, "loss")):
        changed = state.copy()
        end = None if place == -4 else place + 4
        changed[place:end] = struct.pack("<f", struct.unpack("<f", state[place:end])[0] + 1e-3)
        path.write_bytes(changed)
        assert main(arguments) == 1
        failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
        assert len(failed) == 1 and wrong in failed[0], failed
    path.write_bytes(state)
    # A backward that forgets a thousandth of a gradient is found, in the tensor where it happens.
    original = gpt2.block_backward

    def forgetful(ops: object, weights: object, gradients: object, *rest: object, **options: object) -> None:
        original(ops, weights, gradients, *rest, **options)
        gradients.proj_weight.mul_(0.999)

    monkeypatch.setattr(gpt2, "block_backward", forgetful)
    assert main(arguments) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and "gradient of proj_weight" in failed[0]


def test_wrong_states(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each is one line that names the file and what was found."""
    path, model, _ = make_state(tmp_path)
    whole = path.read_bytes()

    def told(content: bytes) -> str:
        path.write_bytes(content)
        assert main([str(path), str(model)]) == 65
        line = capsys.readouterr().err
        assert str(path) in line and line.count("\n") == 1
        return line

    def words(*values: int) -> bytes:
        return struct.pack(f"<{len(values)}i", *values) + whole[4 * len(values) :]

    assert "found 1000" in told(whole[:1000])
    assert "bytes for 3 texts of 17 tokens through model.bin" in told(whole[:-4])
    assert "found 20240326, a GPT-2 model" in told(model.read_bytes())
    assert "expected version 2 of a debug state" in told(words(20240327, 1))
    assert "found 3 of 20" in told(words(20240327, 2, 3, 20)), "longer than the model's context"
    assert "found -1 of 17" in told(words(20240327, 2, -1, 17))
    assert "expected 4814658521476 bytes" in told(words(20240327, 2, 1 << 30, 19)), "sizes that would not fit in memory"
    assert "expected token ids from 0 to 56" in told(whole[:1024] + struct.pack("<i", 57) + whole[1028:])
    assert "gradient of lnf_bias" in told(whole[:-4] + struct.pack("<f", float("nan")))
    padded_row = 1024 + 8 * 51 + 4 * 51 * 57 + 4 + 4 * 57 * 33
    assert "zeros in the padded rows" in told(whole[:padded_row] + struct.pack("<f", 1.0) + whole[padded_row + 4 :])
    path.unlink()
    assert main([str(path), str(model)]) == 65 and "found no such file" in capsys.readouterr().err


def test_reading_is_lazy(tmp_path: Path) -> None:
    """A state of gigabytes is opened by its header and its tokens; the rest is mapped."""
    path, model, _ = make_state(tmp_path)
    state = read_debug_state(path, read_model(model))
    assert isinstance(state, DebugState) and state.logits().shape == (51, 57) and 3 < state.loss < 6
