"""Runs of adapters beside weights in fp8: they learn, resume bit by bit, do not depend on ranks or recompute levels; their
weights are rounded once; their checkpoints are models and adapters like any."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from handgrad.api.model import load
from handgrad.api.training import Training
from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.interop.export import export_model, export_peft
from handgrad.interop.sources import open_weights
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import Replicas
from handgrad.models import parameter_table
from handgrad.run.assemble import Assembly, allocate
from handgrad.run.open import open_run, train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, to_dict
from handgrad.storage.checkpoint import find
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_fp8_runs import manifest, train_until
from tests.test_lora_runs import LORA, adapting as adapting_in_16_bits, trained_bases
from tests.test_packed_runs import documents  # noqa: F401 - a fixture
from tests.test_runs import elsewhere, records, same_bits, tensors

LLAMA = "kv_heads=1,tied,qkv_bias,feed_forward=96"
FP8 = {"precision": "fp8", "fp8_window": 3, "fp8_count_every": 1}


@pytest.fixture(scope="module")
def bases(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    return trained_bases(shards, tmp_path_factory.mktemp("bases"), LLAMA)


def adapting(base: RunConfig, out: Path, **settings: object) -> RunConfig:
    return adapting_in_16_bits(base, out, **{**FP8, **settings})


def rows_of(training: Assembly) -> dict[str, torch.Tensor]:
    """The frozen weights in fp8."""
    return {name: training.state.views[f"{name}.rows"].view(torch.uint8) for name in training.design.fp8_only}


@pytest.mark.nightly(but=["llama-auto"])
@pytest.mark.parametrize(("name", "backend"), [("llama", "auto"), ("llama", "reference"), ("gpt2", "auto")])
def test_it_learns_what_bf16_learns_and_resumes_bit_by_bit(
    bases: dict[str, RunConfig], tmp_path: Path, name: str, backend: str
) -> None:
    whole = adapting(bases[name], tmp_path / "whole", backend=backend)
    with open_run(whole) as run:
        before = {weight: rows.clone() for weight, rows in rows_of(run.training).items()}
        assert before and all(rows.any() for rows in before.values())
        run.begin()
        run.advance(whole.steps)
        assert all(rows.equal(before[weight]) for weight, rows in rows_of(run.training).items())
    bf16 = replace(whole, out=str(tmp_path / "bf16"), precision="bf16")
    train(bf16)
    losses, plain = ([record["loss"] for record in records(config.out, ("step",))] for config in (whole, bf16))
    assert losses[-1] < losses[0] - 0.02
    assert all(abs(a - b) < 0.25 * (plain[0] - plain[-1]) for a, b in zip(losses, plain, strict=True))
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    same_bits(whole.out, again.out, 12)
    assert {key.rpartition("_")[2] for key in tensors(Path(whole.out), 12)} == {"A", "B"}


def test_a_weight_has_the_scale_that_every_step_would_give_it(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """Counted in every step like other tensors, it never saturates, and its scale stays."""
    config = adapting(bases["llama"], tmp_path / "run", steps=5, save_every=1, keep_checkpoints=0)
    train(config)
    scales = [{name: row for name, row in manifest(config, step)["fp8"].items() if "weight" in name} for step in (1, 5)]
    assert len(scales[0]) == 8
    assert [row[0][:2] for row in scales[0].values()] == [row[0][:2] for row in scales[1].values()]
    for line in records(config.out, ("fp8",)):
        weights = {name: found for name, found in line["tensors"].items() if "weight" in name}
        assert len(weights) == 4 and all(
            found["largest_amax"] > 0 == found["clipped_fraction"] for found in weights.values()
        )


@pytest.mark.nightly(but=["gpt2-current"])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recompute_levels_give_the_same_bits(bases: dict[str, RunConfig], tmp_path: Path, name: str, scaling: str) -> None:
    settings = {"steps": 3, "sample_tokens": 0, "fp8_scaling": scaling}
    configs = [adapting(bases[name], tmp_path / f"level{level}", recompute=level, **settings) for level in (0, 1, 2, 3)]
    for config in configs:
        train(config)
    for config in configs[1:]:
        same_bits(configs[0].out, config.out, 3)
        assert manifest(configs[0], 3)["fp8"] == manifest(config, 3)["fp8"]


def test_ranks_do_not_matter(bases: dict[str, RunConfig], launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    base = bases["llama"]
    sizes = {"num_heads": 2, "channels": 32, "architecture": "llama", "llama": LLAMA}
    settings = {**sizes, **FP8, "steps": 4, "micro_batch": 4, "init_from": base.out, "lora": LORA}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    for ranks, zero in ((2, 1), (4, 2), (2, 0)):
        out = tmp_path / f"run{ranks}{zero}"
        launcher.run(ranks, arguments(shards, out, zero=zero, **settings))
        same_run(tmp_path / "alone", out, 4)


def test_rows_of_documents(bases: dict[str, RunConfig], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whole documents to a row; the same bits after a stop, and at another level of recomputation."""
    folder = request.getfixturevalue("documents")
    settings = {"packing": "whole", "data": str(folder), "steps": 6, "overfit_one_batch": False, "save_every": 2}
    whole = adapting(bases["llama"], tmp_path / "whole", **settings)
    train(whole)
    again = elsewhere(whole, "again")
    train_until(again, 4, crash=True)
    train(again)
    same_bits(whole.out, again.out, 6)
    level = replace(whole, out=str(tmp_path / "level"), recompute=2)
    train(level)
    same_bits(whole.out, level.out, 6)


@pytest.mark.nightly(but=["llama"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_checkpoint_is_a_model_like_any(bases: dict[str, RunConfig], tmp_path: Path, name: str) -> None:
    """Its adapters are merged with the weights as they were, not with the rounded ones."""
    config = adapting(bases[name], tmp_path / "run")
    with Training(**to_dict(config)) as training:
        training.steps(config.steps)
        within = training.model()
    model, base = load(config.out, device="cpu"), load(bases[name].out, device="cpu")
    changed = [row.name for row in model.table if not row.view(model.flat).equal(row.view(base.flat))]
    assert changed == [row.name for row in model.table if row.group == "matrix"]
    for row in model.table:
        rounding = (row.view(within.flat).float() - row.view(model.flat)).abs().max()
        largest = row.view(base.flat).abs().max()
        assert (0 < rounding <= 2**-4 * largest) if row.group == "matrix" else rounding <= 2**-8 * largest, row.name
    if name == "gpt2":
        export_model(find(config.out), tmp_path / "hf")
        exported = open_weights(str(tmp_path / "hf"))
        for row in parameter_table(exported.shape):
            assert exported.weight(row).equal(row.stored(model.flat)), row.name
    further = replace(bases[name], init_from=config.out, out=str(tmp_path / "further"), steps=81)
    with open_run(further) as run:
        assert run.training.state.parameters.equal(model.flat)


def test_its_adapters_leave_for_peft(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """The tensors of the checkpoint, to the bit."""
    from safetensors.torch import load_file

    config = adapting(bases["gpt2"], tmp_path / "run", steps=2)
    base = tmp_path / "base"
    export_model(find(bases["gpt2"].out), base)
    config = replace(config, init_from=str(base))
    train(config)
    export_peft(find(config.out), tmp_path / "peft")
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    stored = tensors(Path(config.out), 2)
    found = exported["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"]
    assert found.equal(stored["blocks.0.qkv_A"])


def test_tasks_texts_and_commands_see_the_run(
    bases: dict[str, RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Tasks and samples within the run read the rounded weights, as the commands read the weights as they were."""
    questions = tmp_path / "lambada.jsonl"
    words = ("crow", "hill")
    questions.write_text("".join(json.dumps({"text": f"the old {w} walks over the stone"}) + "\n" for w in words))
    config = adapting(bases["llama"], tmp_path / "run", eval_tasks=f"lambada={questions}", audit_every=6)
    train(config)
    assert [line["step"] for line in records(config.out, ("sample",))] == [6, 12]
    assert main(["evaluate", config.out, "--tasks", f"lambada={questions}"]) == 0
    begin, *_, trained, merged = [line["metrics"]["perplexity"][0] for line in records(config.out, ("evaluation",))]
    assert abs(trained - merged) < 0.1 * merged and abs(begin - merged) > abs(trained - merged)
    assert main(["verify", config.out]) == 0
    assert main(["evaluate", config.out, "--precision", "fp8"]) == 64
    told = capsys.readouterr().err
    assert "run has adapters, which are merged here, beside weights in fp8; use --precision bf16" in told


def test_a_flipped_bit_of_a_rounded_weight_is_seen(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """In the checksum that ranks compare."""
    config = adapting(bases["llama"], tmp_path / "run", lanes=2, micro_batch=2)
    state, _ = allocate(resolve(config, 257, ranks=2))
    replicas, sums = Replicas(state, Ranks(0, 2), 1), []
    for flips in range(3):
        state.views["blocks.1.proj_weight.rows"].view(torch.uint8)[7, 3] ^= 1 << 5 if flips else 0
        replicas.update_checksum()
        sums.append(int(replicas.own_checksum))
    assert sums[0] == sums[2] != sums[1]


def test_all_parts_in_bf16_is_a_run_in_bf16(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    kept = adapting(bases["llama"], tmp_path / "kept", steps=3, fp8_keep_bf16="qkv,proj,mlp", backend="reference")
    train(kept)
    plain = replace(kept, out=str(tmp_path / "plain"), precision="bf16")
    train(plain)
    same_bits(kept.out, plain.out, 3)


def test_dropout_stays_refused(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    config = adapting(bases["gpt2"], tmp_path / "run", dropout=0.1)
    with pytest.raises(UsageError, match=r"precision fp8 trains without dropout, found 0\.1; --precision bf16"):
        train(config)
