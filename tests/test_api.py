"""`handgrad.load`, its model, and the functions of the commands: the numbers of the reference, the texts of the command."""

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import handgrad
from benchmarks.twin import Twin
from handgrad.cli import main
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, HandgradError, UsageError
from handgrad.settings.config import RunConfig, to_toml
from tests.conftest import small_run, write_text

LENGTHS = (5, 32, 1, 17, 9, 2, 30, 8, 3, 11)  # of rows: more than a micro-batch, up to the context


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished run of bytes with a context of 32."""
    config = small_run(shards, tmp_path_factory.mktemp("api") / "run")
    handgrad.train(config, quiet=True)
    return config.out


@pytest.fixture(scope="module")
def model(run: str) -> handgrad.Model:
    return handgrad.load(run, device="cpu")


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(257, (length,), generator=generator).tolist() for length in LENGTHS]


def twin_logits(model: handgrad.Model, row: list[int], dtype: torch.dtype) -> Tensor:
    """(T, V): the same weights in plain PyTorch, one row at a time, without padding."""
    twin = Twin(model.shape).to(dtype)
    twin.load(model.table, model.flat)
    with torch.no_grad():
        x = twin.wte(torch.tensor([row])) + twin.wpe.weight[: len(row)]
        for block in twin.blocks:
            x = block(x)
        return F.linear(twin.lnf(x), twin.wte.weight)[0]


# The names.


def test_importing_loads_nothing_heavy() -> None:
    """And every public name is where the table says."""
    code = "import sys, handgrad; light = not {'torch', 'numpy', 'rich'} & set(sys.modules); sys.exit(not light)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert sorted(handgrad.HOMES) == handgrad.__all__
    for name in handgrad.__all__:
        assert getattr(handgrad, name).__name__ == name and name in dir(handgrad)
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = handgrad.modle


# Numbers.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_those_of_the_model_in_plain_torch(run: str, precision: str, rows: list[list[int]]) -> None:
    """Ten rows of ten lengths at once; each errs no more than twice what plain torch errs with it alone, against float64.
    Behind a row's end stands NaN."""
    model = handgrad.load(run, device="cpu", precision=precision)
    found = model.logits(rows)
    assert found.shape == (len(rows), max(LENGTHS), 257) and found.dtype == model.dtype
    ours = theirs = 0.0
    for row, logits in zip(rows, found, strict=True):
        exact = twin_logits(model, row, torch.float64)
        assert logits[len(row) :].isnan().all()
        ours = max(ours, (logits[: len(row)] - exact).abs().max().item())
        theirs = max(theirs, (twin_logits(model, row, model.dtype) - exact).abs().max().item())
    assert 0 < ours <= 2 * theirs


def test_losses_are_minus_the_log_likelihoods(model: handgrad.Model, rows: list[list[int]]) -> None:
    several = [row for row in rows if len(row) > 1]
    losses, logits = model.losses(several), model.logits(several)
    for row, found, line in zip(several, losses, logits, strict=True):
        n = len(row) - 1
        expected = -line[:n].double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        # A loss is about 5 and float32 has 24 digits; the sum over 257 words takes a few of them.
        assert (found[:n] - expected).abs().max() < 1e-5
        assert found[n:].isnan().all()
    tokens = sum(len(row) - 1 for row in several)
    assert model.loss(several) == pytest.approx(losses.nansum().item() / tokens, rel=1e-6)


def test_weights_that_diverged_do_not_hide(run: str) -> None:
    model = handgrad.load(run, device="cpu")
    model.flat.fill_(math.nan)
    assert math.isnan(model.loss(["the river", "a"]))


def test_the_loss_of_the_validation_split_is_what_evaluate_says(
    run: str, shards: Path, model: handgrad.Model, capsys: pytest.CaptureFixture
) -> None:
    """From the command, from `handgrad.evaluate`, and from the split's tokens as one long row, cut into contexts."""
    found = handgrad.evaluate(run, device="cpu")
    assert handgrad.evaluate(model) == found == handgrad.evaluate(model, shards, micro_batch=8)
    capsys.readouterr()
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"loss              {found.loss:.4f} nats" in shown and f"perplexity        {found.perplexity:.2f}\n" in shown
    assert f"bits per byte     {found.bits_per_byte:.4f}\n" in shown and f"tokens {found.tokens} of" in shown
    (shard,) = open_dataset(shards).splits["validation"]
    tokens = shard.tokens[: found.tokens + 1].astype(np.int64)
    assert len(tokens) > 10 * 32
    # Only the last micro-batch has another shape: a rounding of float32.
    assert model.loss(tokens) == pytest.approx(found.loss, rel=1e-6)
    assert model.loss(torch.from_numpy(tokens)) == model.loss(tokens.tolist()) == model.loss([tokens])
    assert model.loss([int(tokens[0]), *tokens[1:].astype(np.uint16)]) == model.loss(tokens)  # as a tokenizer gives them
    assert handgrad.evaluate(run, eval_tokens=64, device="cpu").tokens == 64


def test_a_text_is_a_document(model: handgrad.Model) -> None:
    text = "the 東京"
    ids = model.tokens(text)
    assert ids == [model.tokenizer.end_of_text, *text.encode()]
    assert torch.equal(model.losses(text), model.losses(ids)) and model.losses(text).shape == (1, len(text.encode()))
    assert torch.equal(model.logits([text, "a"])[:1], model.logits([ids, [256, 97]])[:1])
    assert torch.equal(model.logits(torch.tensor([ids])), model.logits([ids]))


def test_memory_is_kept_and_grows_only_when_it_must(run: str, rows: list[list[int]]) -> None:
    model = handgrad.load(run, device="cpu")
    large = model.logits([row[:8] for row in rows])
    kept, storage = large.clone(), model._activation_memory.storage
    first = model.generate(["a", "b", "c"], max_tokens=5)
    writing = model._writing.memory.storage
    small = model.logits(rows[2])
    assert model._activation_memory.storage is storage and model._writing.memory.storage is writing
    assert large.nan_to_num().equal(kept.nan_to_num()), "results are tensors of their own"
    assert small.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr()
    model.losses([row * 3 for row in rows if len(row) > 9])
    assert model._activation_memory.storage.numel() > storage.numel()
    assert model.generate("a", max_tokens=5) == first[0] and model._writing.memory.storage is writing
    assert model.generate(["a", "b", "c"], max_tokens=5) == first


def test_what_does_not_fit_is_said_before(model: handgrad.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.machine.devices.available_bytes", lambda device: 1 << 20)
    before = model._writing.memory.storage.numel()
    with pytest.raises(DataError, match=r"writing 400 text\(s\) at once needs \d+ MiB, cpu has 1 MiB free"):
        model.generate(["a"] * 400, batch=400)
    assert model._writing.memory.storage.numel() in (0, before)
    with pytest.raises(DataError, match="logits of 100 x 32 tokens needs 3 MiB"):
        model.logits([[1] * 32] * 100)
    monkeypatch.undo()
    assert model.generate("a", max_tokens=2)


# Texts.


@pytest.fixture
def command(run: str, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The text of `handgrad sample RUN --prompt ...` after its prompt."""

    def written(prompt: str, *arguments: str) -> str:
        capsys.readouterr()
        assert main(["sample", run, "--device", "cpu", "--prompt", prompt, *arguments]) == 0
        return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")

    return written


def test_texts_are_those_of_the_command(model: handgrad.Model, command: Callable[..., str]) -> None:
    greedy = model.generate("the river", max_tokens=60, temperature=0)
    assert greedy == command("the river", "--max-tokens", "60", "--temperature", "0") and len(greedy) > 20
    drawn = {"max_tokens": 40, "temperature": 1.1, "top_k": 90, "top_p": 0.97, "min_p": 0.001, "repetition_penalty": 1.2}
    flags = [item for name, value in drawn.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    assert model.generate("the river", **drawn, seed=7) == command("the river", *flags, "--seed", "7")
    assert model.generate("the river", **drawn, seed=7) != model.generate("the river", max_tokens=40, seed=7)
    assert model.generate(max_tokens=9, stop="e") == command("", "--max-tokens", "9", "--stop", "e")


@pytest.mark.filterwarnings("ignore:the prompt is cropped")
def test_many_texts_are_those_of_their_seeds(model: handgrad.Model) -> None:
    """In any batch, and streamed."""
    prompts = ["the", "a bright", "", "crow " * 9]
    alone = [model.generate(prompt, max_tokens=30, seed=3 + number) for number, prompt in enumerate(prompts)]
    assert len(set(alone)) == 4
    for batch in (1, 3, 8):
        assert model.generate(prompts, max_tokens=30, seed=3, batch=batch) == alone
        assert model._writing.last is not None and model._writing.size[0] == min(batch, 4), "memory for those at once"
    pieces = list(model.stream("the", max_tokens=np.int32(30), seed=np.int64(3)))
    assert "".join(pieces) == alone[0] and len(pieces) > 5 and all(pieces)
    cut = list(model.stream("the", max_tokens=30, seed=3, stop=[alone[0][4:6]]))
    assert "".join(cut) == alone[0][: alone[0].index(alone[0][4:6])]
    assert model.generate([]) == []


def test_a_stream_ends_when_another_text_begins(model: handgrad.Model) -> None:
    """And does not go on with the other's memory."""
    stream = model.stream("the", max_tokens=30, seed=3)
    next(stream)
    expected = model.generate("a", max_tokens=5)
    with pytest.raises(UsageError, match="this stream ended"):
        next(stream)
    assert model.generate("a", max_tokens=5) == expected


def test_threads_take_turns(model: handgrad.Model, rows: list[list[int]]) -> None:
    """As behind a web server. Each call writes into the model's memory."""
    texts = ["the", "a much longer text of words", "and", "one more"]
    losses = [model.losses(texts[number:]) for number in range(len(texts))]
    logits = [model.logits(row) for row in rows[: len(texts)]]
    written = [model.generate(text, max_tokens=20, seed=3) for text in texts]

    def same(number: int) -> bool:
        again, as_before = model.losses(texts[number:]), model.generate(texts[number], max_tokens=20, seed=3)
        equal = torch.equal(again.nan_to_num(), losses[number].nan_to_num())
        return equal and torch.equal(model.logits(rows[number]), logits[number]) and as_before == written[number]

    with ThreadPoolExecutor(len(texts)) as pool:
        assert all(pool.map(same, [*range(len(texts))] * 5))


# What cannot be.


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda m: m.logits([[1] * 33]), "expected at most 32 tokens, the model's context, found 33"),
        (lambda m: m.logits([1, 257]), "token ids from 0 to 256, found 257"),
        (lambda m: m.logits([[1], [-1]]), "token ids from 0 to 256, found -1"),
        (lambda m: m.logits(torch.zeros(1, 3)), r"expected token ids, found 0\.0"),
        (lambda m: m.logits([]), "expected tokens, found none"),
        (lambda m: m.logits([[1], []]), r"expected at least 1 token\(s\) in row 1, found 0"),
        (lambda m: m.losses([[1, 2], [1]]), r"expected at least 2 token\(s\) in row 1, found 1"),
        (lambda m: m.loss(""), r"expected at least 2 token\(s\) in row 0, found 1"),
        (lambda m: m.generate("a", temperature=-1), "temperature must be 0"),
        (lambda m: m.generate("a", max_tokens=0), "max_tokens must be 1 or more, and whole, found 0"),
        (lambda m: m.generate("a", max_tokens=3.5), "max_tokens must be 1 or more, and whole, found 3.5"),
        (lambda m: m.generate("a", temperature=None), "temperature must be a number, found None"),
        (lambda m: m.generate("a", top_k=2.5), "top_k must be a whole number, 0 "),
        (lambda m: m.generate("a", seed="x"), "seed must be at least 0 and below"),
        (lambda m: m.generate("a", stop=["x", ""]), "stop must be some text"),
        (lambda m: m.generate("a", batch=0), "batch must be 1 or more, and whole, found 0"),
        (lambda m: m.generate("a", batch=1.5), "batch must be 1 or more, and whole, found 1.5"),
        (lambda m: m.generate("a", stop=5), "stop must be a text, or several, found 5"),
        (lambda m: m.generate(["a", 5]), "prompts must be a text, or several, found 5"),
        (lambda m: m.stream(b"a"), "prompts must be a text, or several, found b'a'"),
        (lambda m: m.logits(1.5), "expected token ids, found 1.5"),
        (lambda m: m.logits(None), "expected tokens, found none"),
        (lambda m: m.stream("a", seed=-1), "seed must be at least 0"),
        (lambda m: handgrad.evaluate(m, micro_batch=0), "micro-batch 1 or more"),
    ],
)
def test_one_line_for_what_cannot_be(model: handgrad.Model, ask: Callable[[handgrad.Model], object], told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        ask(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": "fp8"}, "precision must be one of auto, fp32, bf16, fp16, tf32; found 'fp8'"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda, mps; found 'gpu'"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"tokenizer": "bytes"}, "leave --tokenizer out"),
    ],
)
def test_what_cannot_be_loaded(run: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        handgrad.load(run, **options)
    with pytest.raises(HandgradError, match="expected weights at"):
        handgrad.load(Path(run) / "samples")


# Configurations.


def test_settings_are_the_flags_of_the_command(tmp_path: Path) -> None:
    from handgrad.commands.arguments import run_config
    from handgrad.commands.flags import add_run_arguments
    from handgrad.commands.parser import Parser

    parser = Parser("x")
    add_run_arguments(parser)
    expected = run_config(parser.parse(["tiny", "--data", "d", "--steps", "7", "--learning-rate", "1e-3"]))
    found = handgrad.preset("tiny", data=Path("d"), steps=7, learning_rate=1e-3)
    assert found == expected and isinstance(found, RunConfig)
    with pytest.raises(UsageError, match=r"unknown setting 'stpes' \(did you mean steps\?\)"):
        handgrad.preset("tiny", stpes=7)
    with pytest.raises(UsageError, match="steps must be a whole number, found 'many'"):
        handgrad.preset("tiny", steps="many")
    with pytest.raises(UsageError, match="try --tokens-per-step 1024"):
        handgrad.Training("tiny", tokens_per_step=1000, out=tmp_path / "none")
    with pytest.raises(UsageError, match="say what to train"):
        handgrad.train(out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_recipe_and_a_model_by_name(shards: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small_run(shards, tmp_path / "run")))
    with handgrad.Training(config=str(recipe), model="tiny", seed=5, quiet=True) as run:
        assert (run.config.channels, run.config.num_heads, run.config.seed, run.config.steps) == (64, 4, 5, 12)
        assert run.folder == tmp_path / "run"


# Data, and other programs.


def test_prepare_writes_once_and_opens(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", words=900)
    data = handgrad.prepare(text, tmp_path / "data", tokenizer="bytes", validation_fraction=0.2)
    again = handgrad.prepare(text, tmp_path / "data", tokenizer="bytes", validation_fraction=0.2)
    assert data.identity == again.identity and data.tokens("validation") > 0.15 * data.tokens("train")
    with pytest.raises(HandgradError, match="expected the dataset asked for at"):
        handgrad.prepare(text, tmp_path / "data", tokenizer="gpt2")


def test_data_that_do_not_fit(model: handgrad.Model, run: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", words=900)
    handgrad.prepare(text, tmp_path / "bpe", tokenizer="bpe:300")
    with pytest.raises(DataError, match="another tokenizer"):
        handgrad.evaluate(model, tmp_path / "bpe")
    handgrad.export(run, tmp_path / "hf")
    with pytest.raises(UsageError, match="knows no data"):
        handgrad.evaluate(tmp_path / "hf")


@pytest.mark.parametrize(("to", "name"), [("hf", ""), ("llmc", "model.bin")])
def test_to_other_programs_and_back(
    model: handgrad.Model, run: str, rows: list[list[int]], tmp_path: Path, to: str, name: str
) -> None:
    done = handgrad.export(run, tmp_path / to, to=to)
    back = handgrad.load(done.folder / name, device="cpu", tokenizer="bytes")
    assert (
        back.origin["from"] == {"hf": "hf", "llmc": "llm.c"}[to]
        and model.origin["from"] == "checkpoint"
        and model.origin["step"] == 12
    )
    assert back.logits(rows[1]).equal(model.logits(rows[1]))
    with pytest.raises(UsageError, match="to must be one of hf, peft, llmc, gguf; found 'onnx'"):
        handgrad.export(run, tmp_path / "again", to="onnx")
    with pytest.raises(UsageError, match="dtype must be one of fp32, bf16"):
        handgrad.export(run, tmp_path / "again", dtype="fp64")
