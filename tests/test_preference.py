"""Direct preference optimisation: its gradient beside autograd's, its rows and references, its runs."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from handgrad.cli import main
from handgrad.data.chat import Conversation
from handgrad.data.preferences import pair_batches, pair_of, read_references, record_references, references_path
from handgrad.data.prepare import prepare
from handgrad.data.recipe import PrepareOptions
from handgrad.data.shards import SPLITS, open_dataset
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.evaluation.preferences import answer_sums
from handgrad.interop.sources import open_weights
from handgrad.joins import preference
from handgrad.joins.preference import Preference
from handgrad.ops import cpu, reference
from handgrad.reports import comparing, reading, results
from handgrad.run.assemble import assemble
from handgrad.run.loop import Run
from handgrad.run.open import open_run, train
from handgrad.run.packing import evaluation_packing
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check, read_toml
from handgrad.tools.references import add_references
from tests.conftest import small_run, train_in_two
from tests.test_operations import close, randn
from tests.test_runs import records, same_bits

LENGTH = 64
PAIRS = [
    {"prompt": f"What is {n}+1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {n + 1 + n % 3 + 1}, I think."}
    for n in range(60)
]


@pytest.fixture(scope="module")
def base(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A model of bytes, barely trained."""
    config = replace(small_run(shards, tmp_path_factory.mktemp("base") / "run"), sequence_length=LENGTH, sample_tokens=0)
    train(replace(config, steps=6, eval_every=0))
    return config


@pytest.fixture(scope="module")
def pairs(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs prepared by the command, with references under the base."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    out = folder / "shards"
    asked = ["--preferences", "--reference", base.out, "--validation-fraction", "0.2", "--workers", "1"]
    assert main(["prepare", str(folder / "pairs.jsonl"), *asked, "--out", str(out)]) == 0
    return out


def preferring(base: RunConfig, pairs: Path, out: Path, **settings: object) -> RunConfig:
    more = {
        "steps": 8,
        "tokens_per_step": 8 * LENGTH,
        "eval_every": 4,
        "eval_tokens": 1 << 20,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
    }
    return replace(base, out=str(out), **{"data": str(pairs), "init_from": base.out, **more, **settings})


# The gradient.


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_a_weight_for_each_token(ops: ModuleType, softcap: float) -> None:
    """dL/dlogits of L = sum of w (-log p), with weights below 0 and a token without a target."""
    N, V, Vp = 7, 57, 64
    logits, weights = randn(N, Vp), torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    targets = torch.arange(N).index_fill(0, torch.tensor([3]), -1)
    leaf = logits.clone().requires_grad_()
    z = softcap * torch.tanh(leaf / softcap) if softcap else leaf
    (F.cross_entropy(z[:, :V], targets, ignore_index=-1, reduction="none") * weights).sum().backward()
    losses, found = torch.empty(N, dtype=torch.float64), logits.clone()
    ops.classifier_forward_backward(losses, found, targets, weights, vocab_size=V, softcap=softcap, untrained=True)
    assert leaf.grad is not None
    close(found, leaf.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_weights_are_the_losss_gradient(smoothing: float) -> None:
    """The losses of three pairs and their gradient equal autograd's, through torch's logsigmoid."""
    about, T = Preference(0.3, smoothing), 5
    losses, references = randn(6 * T).abs().requires_grad_(), -randn(6, seed=2).abs().float()
    sums = -losses.view(6, T).sum(1) - references.double()
    margins = about.beta * (sums[0::2] - sums[1::2])
    expected = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    expected.sum().backward()
    weights, found = torch.empty(6 * T, dtype=torch.float64), torch.empty(3, dtype=torch.float64)
    preference.weigh(weights, found, losses.detach(), references, torch.ones(1, dtype=torch.float64), about)
    close(found, expected.detach())
    assert losses.grad is not None
    close(weights, losses.grad)
    preference.weigh(weights, found, losses.detach(), references, torch.full((1,), 8.0, dtype=torch.float64), about)
    close(weights, 8 * losses.grad)


def test_a_steps_gradient_is_that_of_differences(base: RunConfig, pairs: Path) -> None:
    """The derivative of the validation's loss along a step's gradient, in float32."""
    settings = {"objective": "dpo", "device": "cpu", "precision": "fp32", "packing": "stream"}
    config = check(preferring(base, pairs, Path("unused"), **settings))
    dataset = open_dataset(pairs)
    batches = pair_batches(dataset, "train", LENGTH, config.seed)
    training = assemble(resolve(config, dataset.tokenizer.vocab_size), batches)
    weights = open_weights(base.out)
    for row in training.design.parameters:
        row.stored(training.state.views["parameters"]).copy_(weights.weight(row))
    training.stepper.begin(0)
    state = training.state
    gradient, flat = state.gradients.clone().view(-1), state.views["parameters"]
    count = config.tokens_per_step // LENGTH // 2

    def loss() -> float:
        model = training.design.shape, training.validation_ops, state.weights, state.activations
        sums = torch.from_numpy(answer_sums(*model, batches, 2 * count))
        references = torch.from_numpy(batches.references_of(0, 2 * count))
        return preference.losses_of(preference.margins_of(sums, references, 0.1), 0.0).mean().item()

    direction = gradient[: flat.numel()] / gradient.norm()
    before, h = flat.clone(), 0.05
    ends = []
    for sign in (1, -1):
        flat.copy_(before + sign * h * direction)
        ends.append(loss())
    slope = (ends[0] - ends[1]) / (2 * h)
    assert slope == pytest.approx(float(gradient.norm()) * training.design.batch.gradient_tokens / count, rel=0.02)


# The rows.


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, "expected an object with chosen and rejected, found the keys prompt, chosen"),
        ([1], "expected an object with chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "expected two different answers, found equal ones in row 1"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "found an empty message 2 in rejected of row 1"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "expected a list of messages, found 3 in chosen of row 1"),
        (
            {
                side: [{"role": "user", "content": side}, {"role": "assistant", "content": "x"}]
                for side in ("chosen", "rejected")
            },
            "expected one prompt for both answers, found two in row 1",
        ),
        (
            {
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [{"role": "user", "content": "a"}],
            },
            "expected a message of the assistant, found none in rejected of row 1",
        ),
    ],
)
def test_a_row_that_is_no_pair(row: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        pair_of(row, "row 1")


def test_every_form_of_a_row() -> None:
    talk = [{"role": "user", "content": "a"}]
    answers = [[{"role": "assistant", "content": side}] for side in "bc"]
    rows = (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": talk, "chosen": answers[0], "rejected": answers[1]},
        {"chosen": talk + answers[0], "rejected": talk + answers[1]},
        {"prompt": "a", "chosen": talk + answers[0], "rejected": talk + answers[1]},
    )
    expected = tuple((("user", "a"), ("assistant", side)) for side in "bc")
    assert [pair_of(row, "row 1") for row in rows] == [expected] * 4
    assert Conversation(expected[0], "row 1", answer_only=True).text == "user\na\nassistant\nb\n"


def test_batches_hold_pairs_and_their_references(pairs: Path) -> None:
    dataset = open_dataset(pairs)
    batches, references = pair_batches(dataset, "train", LENGTH, 7), read_references(dataset, "train")
    n = batches.samples_per_epoch
    assert n == 96 and (batches.locate_all(0, n)[::2] ^ 1).tolist() == batches.locate_all(0, n)[1::2].tolist()
    for epoch in (0, 1):
        assert sorted(batches.locate_all(epoch * n, n)) == list(range(n))
    both = batches.locate_all(0, 2 * n).tolist()
    assert both[:n] != both[n:] == batches.locate_all(n, n).tolist()
    inputs, targets = (torch.zeros(4, LENGTH, dtype=torch.int64) for _ in range(2))
    out = torch.zeros(4)
    batches.fill(inputs, targets, 2, out)
    assert out.tolist() == references[batches.locate_all(2, 4)].tolist()
    decode = dataset.tokenizer.decode
    for row in range(4):
        answer, text = decode([t for t in targets[row].tolist() if t >= 0]), decode(inputs[row].tolist())
        assert answer.startswith("It is ") and ("I think" in answer) == bool(row % 2) and "What is" in text
    with pytest.raises(UsageError, match="try --sequence-length"):
        pair_batches(dataset, "train", 16, 7)


def test_references_belong_to_their_data_and_model(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    dataset = open_dataset(pairs)
    assert add_references(dataset, base.out) is dataset  # it has them
    path = references_path(dataset.splits["train"][0])
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-4] + np.float32(0).tobytes())
        with pytest.raises(DataError, match=r"expected SHA-256 .* prepare --preferences"):
            read_references(open_dataset(pairs), "train")
    finally:
        path.write_bytes(content)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    bare = prepare(PrepareOptions(str(tmp_path / "pairs.jsonl"), tmp_path / "bare", tokenizer="bytes", preferences=True))
    with pytest.raises(DataError, match=r"expected pairs with references in .*, found none; run `handgrad prepare"):
        read_references(bare.dataset, "train")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--preferences"], "--preferences goes with --reference MODEL, found it without"),
        (["--reference", "x"], "--reference goes with --preferences, found it without"),
        (
            ["--preferences", "--reference", "x", "--chat"],
            "--preferences reads pairs of answers, found it with --chat; leave one out",
        ),
    ],
)
def test_prepare_refuses(arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIRS[0]))
    assert main(["prepare", str(tmp_path / "pairs.jsonl"), *arguments, "--out", str(tmp_path / "out")]) != 0
    assert problem in capsys.readouterr().err


# The runs.


def test_a_run_prefers_what_was_chosen(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    """It begins at the first model, whose margins are 0, so the loss at ln 2."""
    train(preferring(base, pairs, tmp_path / "run", steps=40))
    validations = records(tmp_path / "run", ("validation",))
    assert validations[0]["loss"] == pytest.approx(np.log(2), abs=1e-5) and abs(validations[0]["margin"]) < 1e-4
    assert validations[-1]["accuracy"] == 1.0 and validations[-1]["margin"] > 0.2
    assert validations[-1]["loss"] < 0.6
    first = records(tmp_path / "run", ("step",))[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5) and first["pairs"] == 4 and "trained_tokens" not in first


def test_a_stopped_run_ends_at_the_same_bits(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    whole, stopped = (preferring(base, pairs, tmp_path / name, save_every=3) for name in ("whole", "stopped"))
    train(whole)
    train_in_two(stopped, 5)
    same_bits(Path(whole.out), Path(stopped.out), 8)


def test_adapters_prefer_too(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    train(preferring(base, pairs, tmp_path / "run", lora="rank=4,alpha=8", learning_rate=1e-2, steps=20))
    validations = records(tmp_path / "run", ("validation",))
    assert validations[0]["loss"] == pytest.approx(np.log(2), abs=1e-5) and validations[-1]["margin"] > 0.05


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"init_from": ""}, "objective dpo needs init_from: the model of the references, found ''"),
        ({"micro_batch": 1}, "needs micro_batch: a multiple of 2, found 1"),
        ({"packing": "whole"}, "needs packing: stream, found 'whole'"),
        ({"dropout": 0.1}, "needs dropout: 0, found 0.1"),
    ],
)
def test_a_run_refuses(settings: dict, problem: str, base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem), open_run(preferring(base, pairs, tmp_path / "run", **settings)):
        pass


def test_pairs_stand_alone(base: RunConfig, pairs: Path, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pairs are no part of several sets, found some in"):
        train(preferring(base, pairs, tmp_path / "run", data=f"{pairs}=0.5,{shards}=0.5"))


def test_pairs_are_needed(base: RunConfig, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="objective dpo needs pairs, found none"):
        train(preferring(base, shards, tmp_path / "run", objective="dpo"))


def test_pairs_are_no_text(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    """The loss of the next token would train the rejected answers."""
    with pytest.raises(DataError, match="objective tokens would train the rejected answers too"):
        train(preferring(base, pairs, tmp_path / "run", objective="tokens"))


def test_lost_references_are_made_again(base: RunConfig, pairs: Path) -> None:
    dataset = open_dataset(pairs)
    path = references_path(dataset.splits["validation"][0])
    content = path.read_bytes()
    path.unlink()
    try:
        add_references(dataset, base.out)
        assert path.read_bytes() == content
    finally:
        path.write_bytes(content)


def test_the_run_keeps_to_its_references(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    """Other references are other data."""
    config = preferring(base, pairs, tmp_path / "run", steps=8)
    with open_run(config) as run:
        assert isinstance(run, Run) and run.facts["identity"]["references"]["train_sha256"]
        run.begin()
        run.advance(4)
        run.save()
    dataset = open_dataset(pairs)
    assert dataset.manifest is not None
    model, sums = dataset.manifest["preferences"]["model"], {split: read_references(dataset, split) for split in SPLITS}
    record_references(dataset, sums, {**model, "source": "the same model in another place"})
    try:
        with open_run(config):
            pass
        record_references(dataset, {split: one + 1 for split, one in sums.items()}, model)
        with pytest.raises(ConfigError, match="was trained on other data than"):
            train(config)
        assert dataset.identity == open_dataset(pairs).identity
    finally:
        record_references(dataset, sums, model)


def test_what_is_said_of_a_run(base: RunConfig, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Header, result, report and evaluation speak of pairs; `verify` replays the run."""
    config = preferring(base, pairs, tmp_path / "run", audit_every=4)
    train(config)
    log = (tmp_path / "run" / "log.txt").read_text()
    objective = f"objective  dpo: 48 pairs, each answer in a row of its own; beta 0.1; references of {base.out}"
    assert f"{objective}\n" in log
    begun = preferring(base, pairs, tmp_path / "another", init_from=config.out, steps=1)
    train(begun)
    assert f"{objective}, NOT the weights that this run starts from" in (tmp_path / "another" / "log.txt").read_text()
    assert "result     reached validation loss" in log and "perplexity" not in log
    last = records(tmp_path / "run", ("validation",))[-1]
    assert main(["report", config.out]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Loss, nats per pair" in page and f"{last['accuracy']:.1%}" in page
    assert "nats per token" not in page and "Perplexity" not in page
    run = reading.read_run(tmp_path / "run", "run")
    (perplexity,) = (column.text(run) for column in comparing.COLUMNS if column.name == "perplexity")
    assert perplexity == results.DASH
    capsys.readouterr()
    assert main(["evaluate", config.out, "--micro-batch", "4"]) == 0
    lines = capsys.readouterr().out
    assert f"loss              {last['loss']:.4f} nats per pair" in lines and "validation pairs  12 in" in lines
    assert f"accuracy          {last['accuracy']:.1%}" in lines
    assert main(["verify", config.out]) == 0


def test_bare_settings_hold_the_longest_answer(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", "--init-from", base.out, "--data", str(pairs), "--out", str(out), "--steps", "2"]) == 0
    settings = read_toml(str(out / "config.toml"))
    assert settings["sequence_length"] == LENGTH and settings["objective"] == "dpo"
    assert settings["learning_rate"] == pytest.approx(base.learning_rate / 20)
    assert main(["plan", "--init-from", base.out, "--data", str(pairs)]) == 0


def test_in_python(base: RunConfig, tmp_path: Path) -> None:
    import handgrad

    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    dataset = handgrad.prepare(tmp_path / "pairs.jsonl", tmp_path / "out", preferences=True, reference=base.out)
    assert len(read_references(dataset, "validation")) % 2 == 0
    with pytest.raises(UsageError, match=r"expected text, found pairs in .*; `handgrad evaluate` compares"):
        handgrad.evaluate(base.out, dataset.folder, device="cpu")
    assert evaluation_packing("whole", dataset, other_data=True) == "stream", "a pair's answers stand in rows of their own"


def test_fewer_pairs_are_validated_when_asked(base: RunConfig, pairs: Path, tmp_path: Path) -> None:
    train(preferring(base, pairs, tmp_path / "run", eval_tokens=4 * LENGTH, steps=4))
    assert " on 2 pairs" in (tmp_path / "run" / "log.txt").read_text()


def test_references_need_the_models_tokens_and_context(
    base: RunConfig, pairs: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = replace(small_run(shards, tmp_path / "short"), sequence_length=16, sample_tokens=0, steps=2, eval_every=0)
    train(short)
    with pytest.raises(UsageError, match=r"expected answers of at most the 17 tokens that .* takes, found one of"):
        add_references(open_dataset(pairs), short.out)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    other = prepare(
        PrepareOptions(str(tmp_path / "pairs.jsonl"), tmp_path / "other", tokenizer="bpe:300", preferences=True)
    )
    with pytest.raises(DataError, match="expected pairs in the tokens of"):
        add_references(other.dataset, base.out)
