"""Runs over rows of documents: the same bits on any number of ranks, in any number of launches; the setting, settled and
refused; validation over the tokens that are trained."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from handgrad.api.actions import evaluate
from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.batches import Batches, validation_batches
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import open_dataset
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.evaluation.load import checkpoint_weights
from handgrad.run import loop
from handgrad.run.open import train
from handgrad.run.packing import identity_of, packing_lines
from handgrad.settings.config import RunConfig, check, differences, to_dict
from handgrad.storage.checkpoint import find, open_checkpoint
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records

LLAMA = {"architecture": "llama", "llama": "kv_heads=1,qkv_bias,qk_norm"}
NETWORKS = {"gpt2": {}, "modern": {"architecture": "modern"}, "llama": LLAMA}


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of about 400 documents of 2 to 60 bytes: several to a row."""
    folder, draw = tmp_path_factory.mktemp("documents"), np.random.default_rng(5)
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(draw.choice(words, draw.integers(1, 12))) for _ in range(400)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = PrepareOptions(str(folder / "texts.jsonl"), folder / "bytes", tokenizer="bytes", validation_fraction=0.2)
    prepare(options)
    return folder / "bytes"


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 200 conversations, of which the assistant's words alone are trained."""
    folder = tmp_path_factory.mktemp("chats") / "bytes"
    prepare(PrepareOptions("questions", folder, tokenizer="bytes", documents=200, validation_fraction=0.2, workers=1))
    return folder


@pytest.fixture
def packed(documents: Path, tmp_path: Path) -> RunConfig:
    return replace(small_run(documents, tmp_path / "run"), packing="whole")


# The same bits.


@pytest.mark.nightly(but=["gpt2-chats-auto-settings0", "modern-documents-whole-settings2"])
@pytest.mark.parametrize(
    ("network", "data", "packing", "settings"),
    [
        ("gpt2", "chats", "auto", {"dropout": 0.1}),
        ("gpt2", "documents", "masked", {"precision": "fp8", "recompute": 1}),
        ("modern", "documents", "whole", {"precision": "bf16", "recompute": 2}),
        ("llama", "chats", "masked", {"reduce_precision": "bf16"}),
        ("llama", "chats", "whole", {"precision": "fp8", "recompute": 2}),
    ],
)
def test_ranks_and_kills_do_not_matter(
    network: str,
    data: str,
    packing: str,
    settings: dict,
    launcher: Launcher,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """One rank, and four that are killed and go on as two."""
    documents = request.getfixturevalue(data)
    settings = {**NETWORKS[network], "packing": packing, "steps": 4, "eval_every": 2, "save_every": 2, **settings}
    settings["num_layers"] = 1
    launcher.run(1, arguments(documents, tmp_path / "alone", **settings))
    command = arguments(documents, tmp_path / "run", **settings)
    launcher.start(4, command, "kill:0:3").wait()
    launcher.run(2, command)
    same_run(tmp_path / "alone", tmp_path / "run", 4)
    steps = records(tmp_path / "run", ("step",))
    if (data, packing) == ("documents", "masked"):
        assert not any("trained_tokens" in step for step in steps), "all are trained"
    else:
        assert all(0 < step["trained_tokens"] < 512 for step in steps)
        assert len({step["trained_tokens"] for step in steps}) > 1


def test_it_learns_and_evaluates_as_it_validates(packed: RunConfig) -> None:
    train(packed)
    steps, (first, last) = records(packed.out, ("step",)), records(packed.out, ("validation",))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5 and last["loss"] < first["loss"] and last["bits_per_byte"] is None
    header = (Path(packed.out) / "log.txt").read_text()
    ((padding, trained),) = re.findall(r"packing    whole: .* ([\d.]+)% of the rows is padding, ([\d.]+)% of", header)
    assert 5 < float(padding) < 50 and float(trained) < 100 - float(padding)
    found = evaluate(packed.out, eval_tokens=packed.eval_tokens, device="cpu")
    assert found.loss == last["loss"] and found.tokens < packed.eval_tokens and found.bits_per_byte is None


@pytest.mark.parametrize("packing", ["stream", "masked", "whole"])
def test_the_header_says_how_much_of_the_chats_is_trained(packed: RunConfig, chats: Path, packing: str) -> None:
    line, *_ = packing_lines(replace(packed, data=str(chats), packing=packing), open_dataset(chats))
    assert line.startswith(f"packing    {packing}: ") and line.endswith("% of the targets are trained")


def test_the_header_says_which_documents_no_row_holds(packed: RunConfig, chats: Path) -> None:
    dataset = open_dataset(chats)
    shards = dataset.splits["train"]
    lengths = sorted(n for s in shards for n in np.diff([*s.document_starts.tolist(), s.token_count]).tolist())
    for length, cut in (
        (lengths[-1] - 1, 0),
        (lengths[-1] - 2, lengths.count(lengths[-1])),
        (lengths[0] - 2, len(lengths)),
    ):
        lines = packing_lines(replace(packed, data=str(chats), packing="whole", sequence_length=length), dataset)
        told = f"cut        {cut} of {len(lengths)} documents are longer than a row, the longest has {lengths[-1]} tokens;"
        assert len(lines) == 1 + (cut > 0) and lines[-1].startswith(told) == (cut > 0)
        flag = re.search(r"; --sequence-length (\d+) takes all whole", lines[-1])
        assert flag is None or lengths[-1] - 1 <= int(flag[1]) < 2 * (lengths[-1] - 1)


def test_other_data_are_evaluated_as_suits_them(packed: RunConfig, documents: Path, chats: Path) -> None:
    config = replace(packed, packing="stream", steps=1, warmup_steps=0, eval_every=1)
    train(config)
    stream, whole = load(config.out, device="cpu"), load(config.out, device="cpu")
    whole.packing = "whole"
    own, other = evaluate(stream, device="cpu"), evaluate(stream, str(chats), device="cpu")
    assert own.bits_per_byte and other.bits_per_byte is None
    assert other == evaluate(whole, str(chats), device="cpu") and other.tokens < own.tokens / 2
    assert evaluate(whole, str(documents), device="cpu").loss != own.loss, "a packed run's text is packed"
    stream.eval_stride = 8  # as in a run's validations, which rows of whole documents cannot have
    with pytest.raises(UsageError, match=r"as rows are packed whole, found eval_stride 8; try --eval-stride 0$"):
        evaluate(stream, str(chats), device="cpu")
    assert evaluate(stream, str(chats), device="cpu", eval_stride=0) == other


def test_a_validation_is_the_mean_over_trained_tokens(packed: RunConfig, chats: Path) -> None:
    """By hand: the sum of the losses of every row's trained tokens."""
    config = replace(packed, data=str(chats), steps=1, warmup_steps=0, eval_every=1, save_every=1)
    train(config)
    dataset = open_dataset(config.data)
    batches = validation_batches(dataset, config.sequence_length, packing="whole")
    assert batches is not None
    samples = batches.samples_of(config.eval_tokens)
    tokens, targets = torch.zeros(2, samples, 32, dtype=torch.int64)
    starts = torch.zeros(samples, 32, dtype=torch.int32)
    batches.fill(tokens, targets, 0, starts)
    folder = Path(config.out) / "checkpoints" / "step_00000001"
    model = load_twin(folder)
    total, trained = 0.0, 0
    for row in range(samples):
        for start in starts[row].unique().tolist():
            own = (starts[row] == start) & (targets[row] >= 0)
            alone = starts[row] == start
            if own.any():
                wanted = targets[row, alone].where(targets[row, alone] >= 0, -100)
                total += float(model(tokens[row, alone][None], wanted[None]).detach()) * int(own.sum())
                trained += int(own.sum())
    (validation,) = records(config.out, ("validation",))
    assert trained == batches.trained_tokens(0, samples) < samples * 32
    assert validation["loss"] == pytest.approx(total / trained, rel=1e-5)


def load_twin(folder: Path):
    from benchmarks.twin import Twin
    from handgrad.models import parameter_table

    source = checkpoint_weights(open_checkpoint(folder))
    twin, table = Twin(source.shape, padded=True).double(), parameter_table(source.shape)
    flat = torch.zeros(max(row.offset + row.elements for row in table), dtype=torch.float64)
    for row in table:
        row.stored(flat).copy_(source.weight(row))
    twin.load(table, flat)
    return twin


def test_micro_batches_add_up_to_the_same_losses(packed: RunConfig, tmp_path: Path) -> None:
    losses = []
    for micro_batch in (8, 1):
        config = replace(packed, micro_batch=micro_batch, steps=3, eval_every=0, out=str(tmp_path / f"by{micro_batch}"))
        train(config)
        losses.append([step["loss"] for step in records(config.out, ("step",))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_replay_repeats_an_audited_run(packed: RunConfig, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(packed, data=str(chats), packing="auto", steps=4, save_every=2, eval_every=0, audit_every=1)
    train(replace(config, keep_checkpoints=0))
    assert main(["verify", config.out]) == 0
    assert "4 links and 2 checkpoints equal, bit by bit" in capsys.readouterr().out


# The setting.


def test_auto_is_settled_by_the_data_and_kept(packed: RunConfig, chats: Path) -> None:
    config = replace(packed, packing="auto", steps=2, warmup_steps=0, eval_every=0, sample_tokens=0)
    train(replace(config, steps=1))
    stored = open_checkpoint(Path(config.out) / "checkpoints" / "step_00000001").manifest["config"]
    assert stored["packing"] == "stream"
    chat = replace(config, data=str(chats), out=config.out + "-chat")
    train(chat)
    assert 'packing = "whole"' in (Path(chat.out) / "config.toml").read_text()
    train(replace(config, data=str(chats)), allow_changes=True)  # its packing stays that of its beginning
    assert 'packing = "stream"' in (Path(config.out) / "config.toml").read_text()
    assert records(config.out, ("validation",))[-1]["bits_per_byte"] is None
    (step,) = [step for step in records(config.out, ("step",)) if step["step"] == 2]
    assert 0 < step["trained_tokens"] < config.tokens_per_step, "what the user says is not trained"


def test_an_older_run_was_a_stream() -> None:
    older = to_dict(RunConfig())
    del older["packing"]
    assert differences(older, to_dict(replace(RunConfig(), lanes=1, packing="stream"))) == ["lanes: 0 -> 1"]
    assert differences(older, to_dict(replace(RunConfig(), packing="whole"))) == ["packing: 'stream' -> 'whole'"]


def shift_boundaries(folder: Path) -> None:
    """Moves each document's start but the first by a token, in both splits, and adjusts the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            path = (folder / shard["file"]).with_suffix(".idx")
            starts = np.fromfile(path, "<u4")
            starts[1:] += 1
            path.write_bytes(starts.tobytes())
            shard["index_sha256"] = hashlib.sha256(starts.tobytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.fault(46)
@pytest.mark.parametrize("packing", ["stream", "masked", "whole"])
def test_other_boundaries_are_other_data(
    packing: str, packed: RunConfig, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Row 46. Refused on resume, and by `verify`. A run that cuts its rows from the stream does not read them."""
    data = Path(shutil.copytree(documents, tmp_path / "data"))
    config = replace(packed, data=str(data), packing=packing, steps=2, warmup_steps=0, eval_every=0, audit_every=1)
    train(config)
    shift_boundaries(data)
    if packing == "stream":
        train(config)
        assert main(["verify", config.out]) == 0
        return
    with pytest.raises(ConfigError, match=f"was trained on other data than {data} holds now; restore it"):
        train(config)
    assert main(["verify", config.out]) == 65 and "was trained on documents" in capsys.readouterr().err


def test_a_run_of_before_boundaries_counted_goes_on(packed: RunConfig, documents: Path) -> None:
    """Its checkpoint and its chain name tokens and tokenizer alone."""
    config = replace(packed, packing="masked", steps=2, warmup_steps=0, eval_every=0, audit_every=1)
    with pytest.MonkeyPatch.context() as older:
        older.setattr(
            loop, "identity_of", lambda config, dataset, teacher: identity_of(replace(config, packing="stream"), dataset)
        )
        train(config)
    assert "documents" not in find(config.out).manifest["identity"]
    assert main(["verify", config.out]) == 0
    train(replace(config, steps=3), allow_changes=True)
    assert len(find(config.out).manifest["identity"]["documents"]) == 64


def test_what_a_packing_does_not_go_with(packed: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packing whole has no eval_stride, found 8; try 0, or --packing stream"):
        check(replace(packed, eval_stride=8))
    check(replace(packed, packing="masked", eval_stride=8))
    check(replace(packed, dropout=0.1))
    with pytest.raises(UsageError, match="packing must be one of auto, stream, masked, whole"):
        check(replace(packed, packing="mixed"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("train", "val"):
        words = np.zeros(1000, "<u2").tobytes()
        (bare / f"text_{name}_000000.bin").write_bytes(np.array([20240520, 1, 1000, *[0] * 253], "<i4").tobytes() + words)
    with pytest.raises(DataError, match=r"expected a manifest with document boundaries beside .*, found none"):
        train(replace(packed, data=str(bare)))


def test_a_stream_has_no_trained_tokens_in_its_record(packed: RunConfig) -> None:
    config = replace(packed, packing="stream", steps=1, warmup_steps=0, eval_every=1)
    train(config)
    assert all("trained_tokens" not in step for step in records(config.out, ("step",)))
    assert "packing " not in (Path(config.out) / "log.txt").read_text()


def test_a_step_without_a_trained_token_is_an_event(packed: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Batches.fill

    def silent(batches, inputs, targets, first_sample, *starts):
        fill(batches, inputs, targets, first_sample, *starts)
        targets[:] = torch.where(torch.arange(first_sample, first_sample + len(targets))[:, None] // 8 == 1, -1, targets)

    count = Batches.trained_tokens
    trained = lambda batches, first, samples: 0 if first == 8 else count(batches, first, samples)  # noqa: E731
    monkeypatch.setattr(Batches, "fill", silent)
    monkeypatch.setattr(Batches, "trained_tokens", trained)
    config = replace(packed, steps=3, warmup_steps=0, eval_every=0, max_skips=1, save_every=1, keep_checkpoints=0)
    train(config)
    assert [event["text"] for event in records(config.out, ("event",))] == [
        "step 2 made no update: none of its tokens is trained"
    ]
    (second,) = [step for step in records(config.out, ("step",)) if step["step"] == 2]
    assert (second["loss"], second["skipped"], second["trained_tokens"]) == (0.0, "none of its tokens is trained", 0)
