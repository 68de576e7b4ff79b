"""Distillation: its gradient beside autograd's, its memory, its runs."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import handgrad
from handgrad.cli import main
from handgrad.data.prepare import prepare
from handgrad.data.recipe import PrepareOptions
from handgrad.data.shards import open_dataset
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.evaluation.outcome import NOTHING, outcome_of
from handgrad.joins import distill
from handgrad.ops import cpu, reference
from handgrad.run.loop import Run
from handgrad.run.open import open_run, train
from handgrad.run.packing import TEACHER, training_batches
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.storage import checkpoint
from handgrad.tools.forecast import forecast
from tests.conftest import small_run
from tests.test_operations import close, equal_autograd, nan, randn
from tests.test_packed_runs import chats, documents  # noqa: F401
from tests.test_runs import records, same_bits

BOTH = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


def divergence(z: Tensor, y: Tensor, *, reverse: bool) -> Tensor:
    """torch's KL(q || p), or in reverse KL(p || q), of p = softmax(z) and q = softmax(y)."""
    log_p, log_q = z.log_softmax(1), y.log_softmax(1)
    inputs, targets = (log_q, log_p) if reverse else (log_p, log_q)
    return F.kl_div(inputs, targets, reduction="none", log_target=True).sum(1)


def capped(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


# The gradient.


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(1, 2, 128), (9, 57, 128), (5, 128, 128)])
@BOTH
def test_the_gradient(ops: ModuleType, N: int, V: int, Vp: int, softcap: float, reverse: bool) -> None:
    def definition(logits_to_dlogits_inout: Tensor, teacher_logits: Tensor, **_: Any) -> dict[str, Tensor]:
        z = capped(logits_to_dlogits_inout[:, :V], softcap)
        return {"losses": divergence(z, capped(teacher_logits[:, :V], softcap * 2), reverse=reverse)}

    sizes = {"N": N, "V": V, "Vp": Vp, "softcap": softcap, "teacher_softcap": 2 * softcap, "reverse": reverse}
    ran = equal_autograd(ops, "distill_forward_backward", definition, **sizes)
    assert (ran.of_inputs["logits_to_dlogits_inout"][:, V:] == 0).all()


@pytest.mark.parametrize("reverse", [False, True])
@BOTH
def test_weights_and_untrained_tokens(ops: ModuleType, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight for each token, and no loss without a target, in blocks of two rows."""
    for module in (reference.classifier, cpu.classifier):
        monkeypatch.setattr(module, "CLASSIFIER_BLOCK_ELEMENTS", 2 * 64)
    N, V, Vp = 7, 57, 64
    logits, teacher, weights = randn(N, Vp), randn(N, Vp, seed=1), torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    targets = torch.arange(N).index_fill(0, torch.tensor([3]), -1)
    leaf, trained = logits.clone().requires_grad_(), (targets >= 0).double()
    expected = divergence(capped(leaf[:, :V], 5.0), teacher[:, :V], reverse=reverse) * trained
    (expected * weights).sum().backward()
    losses, found = nan(N), logits.clone()
    options = {"vocab_size": V, "softcap": 5.0, "untrained": True, "reverse": reverse}
    ops.distill_forward_backward(losses, found, teacher, targets, weights, **options)
    assert leaf.grad is not None
    close(losses, expected.detach())
    close(found, leaf.grad)


@BOTH
def test_a_certain_teacher_is_a_target(ops: ModuleType) -> None:
    """A teacher that is sure of the target makes the forward divergence the cross-entropy, bit for bit."""
    N, V = 6, 128
    logits, targets, scale = randn(N, V), torch.arange(N) * 3, torch.full((1,), 0.25, dtype=torch.float64)
    teacher = torch.full((N, V), -1e4, dtype=torch.float64).scatter_(1, targets[:, None], 0.0)
    results = []
    for name, more in (("classifier", ()), ("distill", (teacher,))):
        losses, found = nan(N), logits.clone()
        getattr(ops, f"{name}_forward_backward")(losses, found, *more, targets, scale, vocab_size=V)
        results.append((losses, found))
    assert all(torch.equal(plain, taught) for plain, taught in zip(*results, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@BOTH
def test_a_student_like_its_teacher_has_nothing_to_learn(ops: ModuleType, reverse: bool) -> None:
    logits, targets, scale = randn(4, 64), torch.zeros(4, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    losses, found = nan(4), logits.clone()
    ops.distill_forward_backward(losses, found, logits.clone(), targets, scale, vocab_size=57, reverse=reverse)
    assert (losses == 0).all() and (found == 0).all()


# The memory.


def taught(by: RunConfig, out: Path, **settings: Any) -> RunConfig:
    more = {"objective": "distill", "teacher": by.out, "num_layers": 1, "sample_tokens": 0, "packing": "stream"}
    return replace(small_run(Path(by.data), out), **more | settings)


@pytest.fixture(scope="module")
def teacher(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A model of bytes with capped logits, barely trained."""
    config = replace(small_run(shards, tmp_path_factory.mktemp("teacher") / "run"), architecture="modern", sample_tokens=0)
    config = replace(config, steps=20, eval_every=0, num_heads=4, channels=64, learning_rate=1e-2)
    train(config)
    return config


def test_the_plan_has_the_teacher(teacher: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights in an allocation of their own; of its activations, only what the loss head reads outlives its forward."""
    config = check(taught(teacher, Path("unused"), precision="fp32"))
    design, alone = (resolve(each, 257) for each in (config, replace(config, teacher="", objective="tokens")))
    elements = sum(row.elements for row in design.teacher.parameters)
    assert design.plan.size_bytes["teacher"] >= 4 * elements and "teacher" not in alone.plan.size_bytes
    outlive = [b.name for b in design.plan.buffers if b.name.startswith(distill.PREFIX) and b.lifetimes[-1][-1] >= 0]
    assert outlive == [distill.WEIGHTS, *(distill.PREFIX + name for name in ("scratch", "lnf", "logits"))]
    buffers = {buffer.name: buffer.padded_bytes for buffer in design.plan.buffers}
    own = sum(size for name, size in buffers.items() if name.startswith(distill.PREFIX) and name != distill.WEIGHTS)
    assert design.plan.size_bytes["activations"] < max(alone.plan.size_bytes["activations"] + own / 3, own)
    assert design.flops_per_token == alone.flops_per_token + design.teacher.shape.flops_per_token / 3
    seconds, of_alone = (
        forecast(each, 257, "h100").seconds for each in (config, replace(config, teacher="", objective="tokens"))
    )
    assert seconds == pytest.approx(of_alone * design.flops_per_token / alone.flops_per_token)
    words = ["--num-layers", "1", "--channels", "32", "--num-heads", "2", "--sequence-length", "32"]
    assert main(["plan", *words, "--teacher", teacher.out, "--data", teacher.data]) == 0
    assert "\n  teacher  " in capsys.readouterr().out


# The runs.


def logits_of(run: str | Path, tokens: Tensor) -> Tensor:
    return handgrad.load(run, device="cpu").logits(tokens.tolist()).double()


@pytest.mark.parametrize("divergence_name", ["forward", "reverse"])
@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
def test_the_first_loss_and_its_gradient(
    teacher: RunConfig, tmp_path: Path, architecture: str, divergence_name: str
) -> None:
    """The logits of both models give the same loss, and its derivative along the gradient is the gradient's norm."""
    student = replace(small_run(Path(teacher.data), tmp_path / "student"), architecture=architecture, num_layers=1)
    train(replace(student, steps=1, eval_every=0, sample_tokens=0))
    settings = {"architecture": architecture, "init_from": student.out, "precision": "fp32", "clip_norm": 0.0}
    config = taught(teacher, tmp_path / "run", **settings, teacher_divergence=divergence_name, head_chunk_tokens=48)
    with open_run(config) as run:
        assert isinstance(run, Run)
        stepper, state = run.training.stepper, run.training.state
        count, batches = config.tokens_per_step // config.sequence_length, training_batches(config, run.dataset)
        tokens, targets = (torch.zeros(count, config.sequence_length, dtype=torch.int64) for _ in range(2))
        batches.fill(tokens, targets, 0)
        z, y = (logits_of(one, tokens).flatten(0, 1) for one in (student.out, teacher.out))
        expected = divergence(z, y, reverse=divergence_name == "reverse").mean().item()

        def loss() -> float:
            stepper.begin(0)
            return state.losses_of_step.item() / config.tokens_per_step

        assert loss() == pytest.approx(expected, rel=1e-5)
        gradient, flat = state.gradients.clone(), state.views["parameters"]
        direction, before, h = gradient[: flat.numel()] / gradient.norm(), flat.clone(), 0.02
        ends = []
        for sign in (1, -1):
            flat.copy_(before + sign * h * direction)
            ends.append(loss())
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(gradient.norm().item(), rel=0.02)


def test_a_student_that_starts_as_its_teacher(teacher: RunConfig, tmp_path: Path) -> None:
    """It has nothing to learn, but for the rounding of two caps."""
    same = {name: getattr(teacher, name) for name in ("architecture", "techniques", "num_layers", "num_heads", "channels")}
    train(taught(teacher, tmp_path / "run", **same, init_from=teacher.out, steps=2, weight_decay=0.0))
    step = records(tmp_path / "run", ("step",))[0]
    assert abs(step["loss"]) < 1e-6 and step["norm"] < 1e-5


def test_a_student_learns(teacher: RunConfig, tmp_path: Path) -> None:
    train(taught(teacher, tmp_path / "run", steps=60, learning_rate=1e-2, warmup_steps=0))
    losses = [step["loss"] for step in records(tmp_path / "run", ("step",))]
    assert losses[-1] < losses[0] / 4
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"\nteacher    {teacher.out} (checkpoint of step 20), model.safetensors SHA-256 " in log
    assert "the training loss is KL(teacher || student)\n" in log
    (run,) = records(tmp_path / "run", ("run",))
    assert run["teacher"].startswith(f"{teacher.out} (checkpoint of step 20)")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Training: the divergence from a teacher." in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.nightly(but=["{'lora': 'rank=4,alpha=8'}", "{'dropout': 0.1}"])
@pytest.mark.parametrize("settings", [{}, {"lora": "rank=4,alpha=8"}, {"dropout": 0.1}, {"recompute": 3}], ids=str)
def test_a_stopped_run_ends_at_the_same_bits(teacher: RunConfig, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Also of adapters, with dropout and with recomputed blocks. A checkpoint holds nothing of the teacher."""
    if "lora" in settings:
        train(taught(teacher, tmp_path / "base", teacher="", objective="tokens", num_layers=3, steps=2))
        settings = settings | {"init_from": str(tmp_path / "base"), "num_layers": 3}
    whole, stopped = (taught(teacher, tmp_path / name, save_every=3, **settings) for name in ("whole", "stopped"))
    train(whole)
    with open_run(stopped) as run:
        run.begin()
        run.advance(5)
        run.save()
    train(stopped)
    same_bits(whole.out, stopped.out, 12)
    stored = checkpoint.find(whole.out)
    assert stored.manifest["identity"][TEACHER] and not any("teacher" in name for name in stored.manifest["files"])
    losses = [step["loss"] for step in records(whole.out, ("step",))]
    assert losses[-1] < losses[0]


def test_packed_conversations(teacher: RunConfig, chats: Path, tmp_path: Path) -> None:  # noqa: F811
    """The teacher reads positions of documents, which the student lacks; untrained tokens count for neither."""
    positions = replace(small_run(chats, tmp_path / "positions"), sample_tokens=0, steps=4)
    train(positions)
    settings = {"data": str(chats), "architecture": "llama", "teacher": positions.out, "packing": "whole", "steps": 30}
    config = taught(teacher, tmp_path / "run", **settings)
    train(config)
    steps = records(config.out, ("step",))
    assert steps[-1]["loss"] < steps[0]["loss"] / 2 and steps[0]["trained_tokens"] < config.tokens_per_step


def test_documents_are_read_apart(documents: Path, tmp_path: Path) -> None:  # noqa: F811
    """The logits of both models for each document alone give the first step's loss."""
    of_documents = replace(small_run(documents, tmp_path / "teacher"), sample_tokens=0, steps=8, packing="whole")
    train(of_documents)
    settings = {"architecture": "llama", "packing": "whole", "init_from": "", "precision": "fp32"}
    config = taught(of_documents, tmp_path / "run", **settings)
    rows = config.tokens_per_step // config.sequence_length
    tokens, targets = (torch.zeros(rows, config.sequence_length, dtype=torch.int64) for _ in range(2))
    starts = torch.zeros(rows, config.sequence_length, dtype=torch.int32)
    train(config)
    with open_run(config) as run:
        assert isinstance(run, Run)
        training_batches(config, run.dataset).fill(tokens, targets, 0, starts)
    student = replace(config, out=f"{config.out}_start", learning_rate=0.0, steps=1, eval_every=0)
    train(student)
    total, count = 0.0, 0
    for row in range(rows):
        for start in starts[row].unique().tolist():
            (here,) = (starts[row] == start).nonzero(as_tuple=True)
            z, y = (logits_of(one, tokens[row, here][None])[0] for one in (student.out, of_documents.out))
            trained = targets[row, here] >= 0
            total += divergence(z, y, reverse=False)[trained].sum().item()
            count += int(trained.sum())
    assert len(starts.unique()) > 3
    assert records(config.out, ("step",))[0]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "olmo"])
def test_teachers_of_every_network(teacher: RunConfig, tmp_path: Path, architecture: str) -> None:
    """Two heads a layer, with windows where the network has them."""
    more = {"gemma3": "kv_heads=1,head_width=16,feed_forward=48,window=8,full_every=2"} if architecture == "gemma3" else {}
    more |= {"olmo": "kv_heads=1,feed_forward=48,window=8,full_every=2"} if architecture == "olmo" else {}
    other = replace(small_run(Path(teacher.data), tmp_path / "other"), architecture=architecture, sample_tokens=0, **more)
    train(replace(other, steps=2, eval_every=0))
    config = taught(teacher, tmp_path / "run", teacher=other.out)
    with open_run(config) as run:
        assert isinstance(run, Run)
        tokens, targets = (torch.zeros(8, config.sequence_length, dtype=torch.int64) for _ in range(2))
        training_batches(config, run.dataset).fill(tokens, targets, 0)
        run.begin()
        run.advance(1)
        run.save()
    z, y = logits_of_start(config, tokens), logits_of(other.out, tokens).flatten(0, 1)
    first = records(config.out, ("step",))[0]["loss"]
    assert first == pytest.approx(divergence(z, y, reverse=False).mean().item(), rel=1e-4)


def logits_of_start(config: RunConfig, tokens: Tensor) -> Tensor:
    """The logits that a run's weights give before its first step."""
    start = replace(config, out=f"{config.out}_start", learning_rate=0.0, steps=1, eval_every=0)
    train(start)
    return logits_of(start.out, tokens).flatten(0, 1)


def test_a_run_keeps_to_its_teacher(teacher: RunConfig, tmp_path: Path) -> None:
    """The weights' hash is the identity, not their path; `verify` replays the run with them."""
    config = taught(teacher, tmp_path / "run", audit_every=4)
    with open_run(config) as run:
        run.begin()
        run.advance(8)
        run.save()
    other = replace(teacher, out=str(tmp_path / "other"), seed=5)
    train(other)
    with pytest.raises(ConfigError, match=r"learns from a teacher with SHA-256 \w{12}, found \w{12} at .*other; name the"):
        train(replace(config, teacher=other.out))
    moved = tmp_path / "moved"
    moved.symlink_to(teacher.out)
    train(replace(config, teacher=str(moved)))
    assert main(["verify", config.out]) == 0
    moved.unlink()
    assert main(["verify", config.out]) != 0
    assert main(["verify", config.out, "--teacher", teacher.out]) == 0
    assert main(["verify", config.out, "--teacher", other.out]) != 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"teacher": ""}, "objective distill needs teacher: the model to learn from, found ''"),
        ({"objective": "tokens"}, "objective tokens needs teacher: none; learning from one is objective distill, found '/"),
        ({"objective": "dpo", "init_from": "x"}, "objective dpo needs teacher: none; learning from one"),
        ({"precision": "fp8"}, "objective distill needs precision: bf16, fp16 or fp32, found 'fp8'"),
        (
            {"sequence_length": 64},
            r"expected a sequence_length of at most the 32 positions of the teacher .*, found 64; try",
        ),
    ],
)
def test_a_run_refuses(settings: dict[str, Any], problem: str, teacher: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem), open_run(check(taught(teacher, tmp_path / "run", **settings))):
        pass
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(teacher: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A few words, and then a few more words. " * 400)
    prepare(PrepareOptions(str(tmp_path / "text.txt"), tmp_path / "bpe", tokenizer="bpe:300"))
    with pytest.raises(
        DataError, match=r"was trained with another tokenizer \(bytes, 257 words\) than .*--tokenizer bytes"
    ):
        train(taught(teacher, tmp_path / "run", data=str(tmp_path / "bpe")))


def test_no_weights_and_no_teacher(teacher: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected weights at .*nothing: a run, a checkpoint, .*; found nothing"):
        train(taught(teacher, tmp_path / "run", teacher=str(tmp_path / "nothing")))


def test_a_teacher_alone_is_the_objective(teacher: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--num-layers", "1", "--channels", "32", "--num-heads", "2", "--sequence-length", "32", "--micro-batch", "4"]
    words += ["--tokens-per-step", "128", "--steps", "2", "--sample-tokens", "0", "--device", "cpu"]
    assert main(["train", *words, "--data", teacher.data, "--teacher", teacher.out, "--out", str(out)]) == 0
    assert checkpoint.find(str(out)).manifest["config"]["objective"] == "distill"
    assert open_dataset(Path(teacher.data)).tokenizer.sha256 == checkpoint.find(str(out)).manifest["identity"]["tokenizer"]
    assert "training loss" not in (out / "log.txt").read_text().split("result")[1]
    assert "at the start" not in (out / "log.txt").read_text().split("result")[1]


def test_a_divergence_is_judged_by_its_own_size(teacher: RunConfig, tmp_path: Path) -> None:
    """It begins below the loss of a guess, ends at 0, and is no perplexity."""
    config = taught(teacher, tmp_path / "run")
    losses = [(step, 0.5 - 0.03 * step) for step in range(1, 11)]
    settings = {"uniform": 10.8, "floor": None, "usual_rate": 1e-3, "best_saved": None}
    plain = replace(config, teacher="", objective="tokens")
    told, of_plain = (outcome_of(each, losses, [], **settings) for each in (config, plain))
    assert told is not None and of_plain is not None
    assert told.kind != NOTHING and "perplexity" not in told.text and of_plain.kind == NOTHING
