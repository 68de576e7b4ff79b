"""Runs of adapters: they learn, their base stays; resumed bit by bit, the same on several ranks, merged when used."""

import json
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import lora
from benchmarks.turns import PeerFailed
from handgrad.api.model import load
from handgrad.api.training import Training
from handgrad.cli import main
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.loss import held_out_loss
from handgrad.interop.export import export_llmc, export_model
from handgrad.interop.sources import open_weights
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import Replicas
from handgrad.models import parameter_table
from handgrad.run.assemble import allocate
from handgrad.run.open import open_run, train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, to_dict
from handgrad.storage.checkpoint import find
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records, same_bits, tensors

LLAMA = "kv_heads=1,tied,qkv_bias"
LORA = "rank=4,alpha=8"
RUN = {"steps": 12, "eval_every": 6, "eval_tokens": 512, "sample_every": 6, "sample_tokens": 8}
RUN |= {"learning_rate": 4e-3, "weight_decay": 0.0, "overfit_one_batch": True}


@pytest.fixture(scope="module")
def bases(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    return trained_bases(shards, tmp_path_factory.mktemp("bases"), LLAMA)


def trained_bases(shards: Path, folder: Path, llama: str) -> dict[str, RunConfig]:
    """Short runs of every weight, by architecture; `llama`: the family's numbers."""
    found = {}
    for name in ("llama", "gpt2"):
        sizes = {"architecture": name, "llama": llama if name == "llama" else ""}
        found[name] = replace(small_run(shards, folder / name), **sizes, steps=80, eval_every=0, sample_tokens=0)
        train(found[name])
    return found


def adapting(base: RunConfig, out: Path, **settings: object) -> RunConfig:
    return replace(base, out=str(out), init_from=base.out, lora=LORA, **{**RUN, **settings})


@pytest.mark.nightly(but=["llama-bf16", "gpt2-fp32"])
@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("llama", "bf16"), ("gpt2", "fp32")])
def test_it_learns_and_resumes_bit_by_bit(bases: dict[str, RunConfig], tmp_path: Path, name: str, precision: str) -> None:
    whole = adapting(bases[name], tmp_path / "whole", precision=precision, sample_tokens=8)
    with open_run(whole) as run:
        before = run.training.state.views["frozen"].clone()
        run.begin()
        run.advance(whole.steps)
        assert run.training.state.views["frozen"].equal(before) and before.any()
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.02
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    same_bits(whole.out, again.out, 12)
    stored = tensors(Path(whole.out), 12)
    assert {key.rpartition("_")[2] for key in stored} == {"A", "B"}


@pytest.mark.nightly(but=["gpt2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_checkpoint_is_a_model_like_any(bases: dict[str, RunConfig], tmp_path: Path, name: str) -> None:
    """Merged it has the loss that the run measured beside its base; exported and started from, the same weights."""
    config = adapting(bases[name], tmp_path / "run")
    train(config)
    model, base = load(config.out, device="cpu"), load(bases[name].out, device="cpu")
    changed = [row.name for row in model.table if not row.view(model.flat).equal(row.view(base.flat))]
    matrices = [row.name for row in model.table if row.group == "matrix"]
    assert changed == matrices
    measured = [record["loss"] for record in records(config.out, ("validation",))][-1]
    tensors_of = model.shape, model.ops, model.weights, model.forward_buffers(4, 32)
    found = held_out_loss(*tensors_of, open_dataset(config.data), eval_tokens=512)
    assert abs(found.loss - measured) < 1e-5 and abs(base.loss("the river") - model.loss("the river")) > 1e-3
    further = replace(bases[name], init_from=config.out, out=str(tmp_path / "further"), steps=81)
    with open_run(further) as run:
        assert run.training.state.parameters.equal(model.flat)
    if name == "gpt2":
        export_model(find(config.out), tmp_path / "hf")
        exported = open_weights(str(tmp_path / "hf"))
        for row in parameter_table(exported.shape):
            assert exported.weight(row).equal(row.stored(model.flat)), row.name
        export_llmc(find(config.out), tmp_path / "llmc")


def test_a_base_that_changed_is_told(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    base = tmp_path / "base"
    export_model(find(bases["gpt2"].out), base)
    config = replace(adapting(bases["gpt2"], tmp_path / "run", steps=4), init_from=str(base))
    train(config)
    kept = base.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"step_00000004 holds adapters of .*/base, and expected weights at .*put those"):
        open_weights(config.out)
    export_model(find(bases["gpt2"].out), base, torch.bfloat16)
    for use in (lambda: open_weights(config.out), lambda: train(config), lambda: load(config.out)):
        with pytest.raises(DataError, match=r"base, which has changed: expected model\.safetensors with SHA"):
            use()
    shutil.rmtree(base)
    kept.rename(base)
    train(config)  # its steps are done


def test_ranks_do_not_matter(bases: dict[str, RunConfig], launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    base = bases["llama"]
    sizes = {"num_heads": 2, "channels": 32, "architecture": "llama", "llama": LLAMA}
    settings = {**sizes, "steps": 4, "micro_batch": 4, "init_from": base.out, "lora": LORA}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    for ranks, zero in ((2, 1), (4, 2), (2, 0)):
        out = tmp_path / f"run{ranks}{zero}"
        launcher.run(ranks, arguments(shards, out, zero=zero, **settings))
        same_run(tmp_path / "alone", out, 4)


def test_one_layer_on_two_ranks(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """One bucket alone has gradients."""
    sizes = {"num_layers": 1, "num_heads": 2, "channels": 32}
    base = arguments(shards, tmp_path / "base", **sizes, steps=2)
    launcher.run(1, base)
    settings = {**sizes, "steps": 2, "init_from": tmp_path / "base", "lora": "rank=2,on=up"}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    launcher.run(2, arguments(shards, tmp_path / "run", **settings))
    alone, shared = (tensors(tmp_path / name, 2) for name in ("alone", "run"))
    assert alone.keys() == shared.keys() and all(alone[name].equal(shared[name]) for name in alone)


def test_the_recipe(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """A few steps of it on another model; the best is kept."""
    base, out = bases["llama"], tmp_path / "on"
    settings = {"init-from": base.out, "data": base.data, "out": out, "sequence-length": 32, "tokens-per-step": 256}
    settings |= {"steps": 2, "eval-every": 1, "sample-tokens": 0, "eval-tokens": 512, "device": "cpu"}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--config", "finetune_lora", *flags]) == 0
    assert find(f"{out}/best").manifest["config"]["lora"] == "rank=16,alpha=32"
    assert load(f"{out}/best", device="cpu").generate("the river", max_tokens=3)


def test_training_in_steps_gives_the_merged_model(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    config = adapting(bases["llama"], tmp_path / "run", steps=3, sample_tokens=0)
    with Training(**to_dict(config)) as training:
        training.steps(3)
        now, again = training.model(), training.model()
        assert now.flat.equal(again.flat)
        training.save()
    assert load(config.out, device="cpu").flat.equal(now.flat)


@pytest.mark.nightly
def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Plans and a few steps of all contenders, at a tiny size on a CPU."""
    given = ["lora", "--shapes=tiny-llama", "--device=cpu", "--precision=fp32", "--sequence-length=16", "--micro-batch=1"]
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [*given, "--rounds=2", "--lora=rank=2", f"--out={out}"])
    lora.main()
    figures = json.loads(out.read_text())["figures"]["tiny-llama"]
    assert figures["lora"]["trained_parameters"] < figures["full"]["trained_parameters"] / 10
    assert all(row["tokens_per_second"] > 0 for row in figures.values())
    more = figures["lora"]["plan_bytes"].keys() - figures["full"]["plan_bytes"].keys()
    assert more == {"frozen weights", "adapters at work"}
    assert figures["lora-fp8"]["plan_bytes"]["frozen weights"] < figures["lora"]["plan_bytes"]["frozen weights"]
    assert abs(figures["lora-fp8"]["loss"] - figures["lora"]["loss"]) < 0.1
    assert "tiny-llama      lora" in capsys.readouterr().out


def test_the_benchmark_within_caps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A contender without memory does not fit; one that fails otherwise says nothing about memory."""
    asked = list[str]()

    class Card:
        """A contender's process: adapters run in 8 GiB, in fp8 in 4, all else in 16."""

        def __init__(self, name: str, command: list[str]):
            cap = float(next(part for part in command if part.startswith("--cap=")).removeprefix("--cap="))
            self.enough = cap >= {"lora-fp8": 4, "lora": 8, "full": 16}[name]
            asked.append(f"{name} {cap:g}")

        def ask(self, line: str) -> dict:
            if not self.enough:
                raise PeerFailed("out of memory; a smaller --micro-batch may fit")
            return {"seconds": 1.0, "loss": 2.0, "allocated_bytes": 1, "reserved_bytes": 1}

        def close(self) -> None:
            pass

    monkeypatch.setattr(lora, "Peer", Card)
    monkeypatch.setattr(sys, "argv", ["lora", "--shapes=tiny-llama", "--device=cpu", "--precision=fp32", "--cap=4,8,16"])
    lora.main()
    full, adapters, in_fp8 = capsys.readouterr().out.splitlines()[-3:]
    assert full.endswith("  4 GiB: no    8 GiB: no    16 GiB: fits")
    assert adapters.endswith("  4 GiB: no    8 GiB: fits  16 GiB: fits")
    assert in_fp8.endswith("  4 GiB: fits  8 GiB: fits  16 GiB: fits")
    assert asked == [f"{name} {cap}" for cap in (4, 8, 16) for name in ("full", "lora", "lora-fp8")]


def test_a_cap_is_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context counts; a CPU has no cap, and that is not called a lack of memory."""
    fractions = list[float]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *of: fractions.append(of))
    monkeypatch.setattr(lora.devices, "resolve_device", torch.device)
    lora.limit_memory(Namespace(cap="8", device="cuda"))
    lora.limit_memory(Namespace(cap="", device="cuda"))
    assert fractions == [((8 - lora.CONTEXT_GIB) / 140, 0)]
    with pytest.raises(UsageError, match="--cap limits the memory of a GPU, found --device cpu"):
        lora.limit_memory(Namespace(cap="8", device="cpu"))


def test_tasks_and_a_replay_see_the_adapters(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """Tasks during a run use memory of the training's, and give what the merged weights give."""
    questions = tmp_path / "lambada.jsonl"
    questions.write_text(
        "".join(json.dumps({"text": f"the old {w} walks over the stone"}) + "\n" for w in ("crow", "hill"))
    )
    config = adapting(bases["llama"], tmp_path / "run", eval_tasks=f"lambada={questions}", audit_every=6)
    train(replace(config, precision="fp32"))
    assert main(["evaluate", config.out, "--tasks", f"lambada={questions}"]) == 0
    begin, *_, trained, merged = [record["metrics"]["perplexity"][0] for record in records(config.out, ("evaluation",))]
    assert abs(trained - merged) < 1e-4 * merged and abs(begin - merged) > 1e-3 * merged
    assert main(["verify", config.out]) == 0


def test_a_flipped_bit_of_the_base_is_seen(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    """In the checksum that ranks compare."""
    config = adapting(bases["llama"], tmp_path / "run", lanes=2, micro_batch=2)
    state, _ = allocate(resolve(config, 257, ranks=2))
    replicas, sums = Replicas(state, Ranks(0, 2), 1), []
    for flips in range(3):
        state.views["frozen"].view(torch.int32)[7] ^= 1 << 20 if flips else 0
        replicas.update_checksum()
        sums.append(int(replicas.own_checksum))
    assert sums[0] == sums[2] != sums[1]


def test_the_base_is_found_from_anywhere(
    bases: dict[str, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that was given from one folder, in another; and where everything has moved, by the name again."""
    monkeypatch.chdir(Path(bases["llama"].out).parent)
    config = replace(adapting(bases["llama"], tmp_path / "run", steps=1, sample_tokens=0), init_from="llama")
    train(config)
    merged = load(config.out, device="cpu").flat
    monkeypatch.chdir(tmp_path)
    assert load(config.out, device="cpu").flat.equal(merged)
    shutil.copytree(bases["llama"].out, tmp_path / "llama")
    monkeypatch.setattr("handgrad.interop.adapters.PLACE", "nowhere")
    assert load(config.out, device="cpu").flat.equal(merged)


def test_fewer_positions_than_the_base(bases: dict[str, RunConfig], tmp_path: Path) -> None:
    config = adapting(bases["gpt2"], tmp_path / "run", steps=1, sample_tokens=0, sequence_length=16)
    train(config)
    model, base = load(config.out, device="cpu"), load(bases["gpt2"].out, device="cpu")
    assert model.shape.sequence_length == 16 and model.weights.wpe.equal(base.weights.wpe[:16])
