"""Several data sets by weight: which sample comes from where, the same bits wherever a run stops, changed weights."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import handgrad
from handgrad.cli import main
from handgrad.data.batches import Batches
from handgrad.data.mixture import (
    BLOCK,
    MIXTURE,
    MixedBatches,
    Mixture,
    Phase,
    named_sets,
    normalised,
    open_data,
    phases_of,
    shares,
)
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import Dataset, open_dataset
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.run.open import open_run, train
from handgrad.run.packing import training_batches
from handgrad.settings.config import RunConfig, read_toml, to_toml
from handgrad.storage.checkpoint import find, open_checkpoint
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import elsewhere, interrupt_at, records, same_bits

WEIGHTS = [["4", "1"], ["1", "1", "1"], ["0.7", "0.2999", "1e-4"], ["1/3", "2/3"], ["5", "1", "3", "1", "2"], ["1"]]


@pytest.fixture(scope="module")
def sets(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three sets of bytes of different sizes: web, code, math; and one of conversations."""
    folder = tmp_path_factory.mktemp("sets")
    shutil.copytree(shards, folder / "web")
    for name, words, count in (("code", "def return if else for in while", 900), ("math", "sum product root of a b", 500)):
        picks = np.random.default_rng(count).choice(words.split(), count)
        (folder / f"{name}.txt").write_text("\n".join(" ".join(line) for line in picks.reshape(-1, 10)) + "\n")
        prepare(PrepareOptions(str(folder / f"{name}.txt"), folder / name, tokenizer="bytes", workers=1))
    prepare(PrepareOptions("questions", folder / "chats", tokenizer="bytes", documents=80, validation_fraction=0.2))
    return folder


@pytest.fixture
def mixed(sets: Path, tmp_path: Path) -> RunConfig:
    return replace(small_run(sets, tmp_path / "run"), data=data_of(sets, web="0.7", code="0.3"), sample_tokens=0)


def data_of(sets: Path, **weights: str) -> str:
    return ",".join(f"{sets / name}={weight}" for name, weight in weights.items())


class Uncounted:
    """Batches that nobody reads."""

    samples_per_epoch, trains_all = 10, True


def phases(*each: tuple[int, dict[str, str]], seed: int = 7) -> MixedBatches:
    """The samples of phases that begin at these samples."""
    found = [Phase(0, normalised(weights)) for _, weights in each]
    batches: Any = {name: Uncounted for _, weights in each for name in weights}
    return MixedBatches(batches, found, [first for first, _ in each], seed)


def places(batches: MixedBatches, samples: Any) -> list[tuple[str, int]]:
    return [(name, given[name]) for name, given in map(batches.given, samples)]


# Which sample comes from where.


@pytest.mark.nightly(but=["5 1 3 1 2", "1", "0.7 0.2999 1e-4"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=" ".join)
def test_any_number_of_samples_keeps_the_weights(weights: list[str]) -> None:
    """Every set gives its samples in its own order. At the end of a block it is off by at most half a sample for each set,
    elsewhere by at most a quarter of a block more; and a rare set comes at all."""
    named = {f"set {index}": weight for index, weight in enumerate(weights)}
    exact, bound, counts = normalised(named), Fraction(len(weights), 2), Counter[str]()
    batches = phases((0, named))
    for sample in range(12_000):
        name, given = batches.given(sample)
        assert given == counts, "what a walk over all samples counts"
        counts[name] += 1
        more = 0 if (sample + 1) % BLOCK == 0 else Fraction(BLOCK, 4)
        assert all(abs(counts[name] - exact[name] * (sample + 1)) <= bound + more for name in exact)
    assert counts.keys() == exact.keys() and sum(exact.values()) == 1
    for samples in (10**9, 10**15):
        assert sum(shares(exact.values(), samples)) == samples


def test_a_place_does_not_depend_on_the_samples_asked_before() -> None:
    weights = {"a": "0.8", "b": "0.2"}
    batches, order = phases((0, weights)), np.random.default_rng(1).permutation(500).tolist()
    in_order = places(batches, range(500))
    assert places(batches, order) == [in_order[sample] for sample in order]
    assert places(phases((0, weights)), [499]) == in_order[499:]
    assert places(phases((0, weights), seed=8), range(500)) != in_order
    blocks = [tuple(name for name, _ in in_order[start : start + 30]) for start in range(0, 480, BLOCK)]
    assert len({*blocks}) > 12, "the sets follow no pattern"


def test_a_set_goes_on_where_the_phase_before_has_left_it() -> None:
    """One is added, one is removed and comes again; phases begin within blocks and at their edges."""
    changes = [
        (0, {"a": "2", "b": "1"}),
        (45, {"a": "1", "b": "1", "c": "1"}),
        (96, {"a": "1", "c": "3"}),
        (130, {"b": "1"}),
    ]
    seen = places(phases(*changes), range(200))
    for name in "abc":
        assert [number for one, number in seen if one == name] == [*range(sum(one == name for one, _ in seen))]
    assert {name for name, _ in seen[96:130]} == {"a", "c"} and {name for name, _ in seen[130:]} == {"b"}
    assert seen[:45] == places(phases(*changes[:1]), range(45)), "the weights that come later change nothing before"


def test_a_sample_is_the_sets_own(mixed: RunConfig) -> None:
    """In batches of any size, and over several epochs of the small set."""
    dataset = open_data(mixed.data)
    batches = training_batches(replace(mixed, packing="stream"), dataset)
    assert isinstance(batches, MixedBatches)
    alone = {
        one.identity: Batches(one.splits["train"], 32, mixed.seed) for one in map(open_dataset, named_sets(mixed.data))
    }
    tokens, targets = (torch.empty(1500, 32, dtype=torch.int64) for _ in range(2))
    batches.fill(tokens, targets, 5)
    some = torch.empty(3, 32, dtype=torch.int64)
    for row in (0, 700, 1497):
        batches.fill(some, torch.empty_like(some), 5 + row)
        assert torch.equal(some, tokens[row : row + 3])
    for row, (name, number) in enumerate(places(batches, range(5, 1505))):
        window = alone[name].window(number).astype(np.int64)
        assert np.array_equal(tokens[row], window[:-1]) and np.array_equal(targets[row], window[1:])
    _, given = batches.given(1505)
    epochs = sorted(count / alone[name].samples_per_epoch for name, count in given.items())
    assert epochs[0] < 1.5 < 2 < epochs[1]


# The setting.


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("web,code", UsageError, "data must name each set with its weight, like --data .*, found 'WEB'"),
        ("web=0.5,code", UsageError, "data must name each set with its weight, like --data .*, found 'CODE'"),
        *(
            (f"web={weight},code=1", UsageError, f"the weight of WEB must be a number above 0, .* found '{weight}'")
            for weight in ("0", "-1", "nan", "inf", "", "1e999999", "1/0", "half")
        ),
        ("web=1,web=1", UsageError, "data names WEB twice; give it once, with the sum of its weights"),
        ("web=1,twin=1", UsageError, "WEB and TWIN in data hold the same tokens; give one, with the sum of their weights"),
        (
            "web=1,gpt2=1",
            DataError,
            r"one tokenizer .* bytes \(257 words\) in WEB and gpt2 \(50257 words\) in GPT2; prepare",
        ),
        ("web=1,absent=1", DataError, "expected a folder of token shards, found none at ABSENT"),
        ("web=1,silent=1", DataError, "expected a validation split in every set of data, found none in SILENT; prepare it"),
    ],
)
def test_sets_that_do_not_go_together_are_refused(
    data: str, error: type[Exception], message: str, mixed: RunConfig, sets: Path
) -> None:
    """In one line, before anything is written."""
    if "twin" in data and not (sets / "twin").exists():
        shutil.copytree(sets / "web", sets / "twin")
    if "gpt2" in data:
        prepare(PrepareOptions(str(sets / "code.txt"), sets / "gpt2", tokenizer="gpt2", workers=1))
    if "silent" in data:
        shutil.copytree(sets / "math", sets / "silent")
        manifest = json.loads((sets / "silent/manifest.json").read_text())
        manifest["splits"]["validation"] |= dict.fromkeys(("tokens", "documents", "text_tokens", "text_bytes"), 0)
        manifest["splits"]["validation"]["shards"] = []
        (sets / "silent/manifest.json").write_text(json.dumps(manifest))
    data = ",".join(f"{sets / entry}" for entry in data.split(","))
    message = re.sub(r"\b[A-Z]{3,}2?\b", lambda name: str(sets / name[0].lower()), message)
    with pytest.raises(error, match=message) as refused:
        train(replace(mixed, data=data))
    assert "\n" not in str(refused.value) and not Path(mixed.out).exists()


def test_weights_are_shares_of_their_sum(mixed: RunConfig, sets: Path) -> None:
    """In any order and in any scale; of a single set the weight does not matter; a folder is a set whatever its name."""
    one, other = open_data(mixed.data), open_data(data_of(sets, code="3", web="7"))
    assert (
        isinstance(one, Mixture)
        and isinstance(other, Mixture)
        and one.identity == other.identity
        and one.phases == other.phases
    )
    assert type(open_data(f"{sets / 'web'}=5")) is Dataset
    odd = shutil.copytree(sets / "code", Path(mixed.out).parent / "a=1,b=2")
    assert named_sets(str(odd)) == {str(odd): 1}


def test_a_recipe_names_sets_as_the_flag_does(mixed: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(mixed))
    assert read_toml(str(tmp_path / "recipe.toml"))["data"] == mixed.data


# A run.


@pytest.mark.nightly(but=["{'batch_schedule': '3:512', 'lanes': 2}"])
@pytest.mark.parametrize(
    "settings", [{}, {"batch_schedule": "3:512", "lanes": 2}, {"precision": "bf16", "dropout": 0.1}], ids=str
)
def test_a_mixed_run_that_stops_has_the_bits_of_an_unbroken_one(
    settings: dict, mixed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = replace(mixed, **settings)
    whole = elsewhere(mixed, "whole")
    train(whole)
    for stop in (5, 9):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_at(patch, stop)
            train(mixed)
    train(mixed)
    same_bits(whole.out, mixed.out, mixed.steps)


def test_ranks_do_not_matter(sets: Path, launcher: Launcher, tmp_path: Path) -> None:
    data = data_of(sets, web="0.5", code="0.3", math="0.2")
    for ranks in (1, 2, 4):
        launcher.run(ranks, arguments(data, tmp_path / str(ranks), sequence_length=16, steps=6, eval_every=3, save_every=3))
        same_run(tmp_path / "1", tmp_path / str(ranks), 6)


def test_conversations_and_text_go_together(sets: Path, mixed: RunConfig) -> None:
    """Rows hold whole documents; a text trains all its tokens, a conversation what the assistant says."""
    config = replace(mixed, data=data_of(sets, chats="1", math="1"), sequence_length=64, tokens_per_step=512)
    train(config)
    assert records(config.out, ("run",))[0]["packing"] == "whole"
    batches = training_batches(replace(config, packing="whole"), open_data(config.data))
    counted = [record["trained_tokens"] for record in records(config.out, ("step",))]
    assert counted == [batches.trained_tokens(8 * step, 8) for step in range(config.steps)]
    assert {*records(config.out, ("validation",))[-1]["sets"]} == {"chats", "math"}


def test_every_set_is_validated_apart(mixed: RunConfig, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the record, on the console, by `evaluate` and in Python; their mean by the weights chooses the best checkpoint."""
    train(replace(mixed, keep_best=True))
    printed = capsys.readouterr().out
    last = records(mixed.out, ("validation",))[-1]
    web, code = last["sets"]["web"], last["sets"]["code"]
    assert last["loss"] == pytest.approx(0.7 * web + 0.3 * code, rel=1e-12) and web != code
    assert f"step 12: validation loss {last['loss']:.4f} (web {web:.4f}, code {code:.4f}), the best so far" in printed
    assert re.search(r"\n +web: .* training tokens, 0.7 of the samples, 0\.\d+ epochs of it in all\n +code: ", printed)
    for name in ("web", "code"):
        found = handgrad.evaluate(mixed.out, data=sets / name, eval_tokens=mixed.eval_tokens, micro_batch=mixed.micro_batch)
        assert found.loss == last["sets"][name] and not found.sets
    found = handgrad.evaluate(mixed.out, eval_tokens=mixed.eval_tokens, micro_batch=mixed.micro_batch)
    assert (found.loss, found.sets["web"].loss, found.sets["code"].loss) == (last["loss"], web, code)
    assert main(["evaluate", mixed.out, "--eval-tokens", str(mixed.eval_tokens), "--micro-batch", "4"]) == 0
    assert re.search(rf"\nloss of web +{web:.4f} nats per token, .*\nloss of code +{code:.4f} ", capsys.readouterr().out)
    main(["runs", str(Path(mixed.out).parent)])
    assert f"loss     run: web {web:.4f}, code {code:.4f}" in capsys.readouterr().out
    page = Path(mixed.out) / "page.html"
    main(["report", mixed.out, "--out", str(page)])
    assert re.search(
        rf"<th[^>]*>web</th><th[^>]*>code</th>.*<td[^>]*>{web:.4f}</td><td[^>]*>{code:.4f}</td>",
        page.read_text(),
        re.DOTALL,
    )


# Other weights on the way.


def audited(config: RunConfig) -> RunConfig:
    return replace(config, audit_every=1, keep_checkpoints=0, eval_every=0)


def stopped(config: RunConfig, steps: int, *, allow_changes: bool = False) -> None:
    with open_run(config, allow_changes=allow_changes, console="nothing") as run:
        run.begin()
        run.advance(steps)
        run.save()


def test_other_weights_are_a_change_of_the_run(mixed: RunConfig, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, then logged with their step, kept by the checkpoints that follow; a replay reproduces both phases."""
    first, then = audited(mixed), replace(audited(mixed), data=data_of(sets, code="1", web="1"))
    stopped(first, 5)
    message = (
        f"{mixed.out} was trained on other data than {then.data}: {first.data}; give that --data, choose another --out, or"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        train(then)
    train(then, allow_changes=True)
    (event,) = records(mixed.out, ("event",))
    assert event["text"] == f"configuration changed: data: {first.data} -> {then.data}, after step 5" and event["step"] == 5
    before, after = phases_of(open_checkpoint(find(mixed.out).folder).manifest["identity"])
    assert (before.first_step, after.first_step) == (0, 5) and {*after.weights.values()} == {Fraction(1, 2)}
    assert main(["verify", mixed.out]) == 0
    assert "12 links and 4 checkpoints equal, bit by bit, of steps 0 to 5, 5 to 12" in capsys.readouterr().out
    for span in (("--from", "0", "--to", "4"), ("--from", "4", "--to", "8"), ("--from", "8"), ("--segments", "2")):
        assert main(["verify", mixed.out, *span]) == 0
    train(replace(then, steps=14), allow_changes=True)  # keeps both phases
    assert len(phases_of(open_checkpoint(find(mixed.out).folder).manifest["identity"])) == 2


def test_changed_weights_survive_a_kill(mixed: RunConfig, sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = replace(mixed, data=data_of(sets, web="0.1", code="0.9"))
    for config in (mixed, elsewhere(mixed, "whole")):
        stopped(config, 4)
    train(elsewhere(then, "whole"), allow_changes=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 10)
        train(then, allow_changes=True)
    train(then)
    same_bits(elsewhere(mixed, "whole").out, mixed.out, mixed.steps)


def test_sets_come_and_go(mixed: RunConfig, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one set to three to another one; a replay is given all of them."""
    config = audited(mixed)
    stopped(replace(config, data=str(sets / "web")), 3)
    stopped(replace(config, data=data_of(sets, web="0.5", code="0.3", math="0.2")), 7, allow_changes=True)
    train(replace(config, data=str(sets / "code")), allow_changes=True)
    seen = phases_of(open_checkpoint(find(mixed.out).folder).manifest["identity"])
    assert [(phase.first_step, len(phase.weights)) for phase in seen] == [(0, 1), (3, 3), (7, 1)]
    assert main(["verify", mixed.out, "--data", data_of(sets, web="1", code="1", math="1")]) == 0
    assert "bit by bit, of steps 0 to 3, 3 to 7, 7 to 12" in capsys.readouterr().out
    assert main(["verify", mixed.out, "--data", data_of(sets, web="1", code="1")]) != 0
    identity = open_dataset(sets / "math").identity[:12]
    assert f"expected the run's set {identity} in {data_of(sets, web='1', code='1')}, found none" in capsys.readouterr().err


def test_a_run_on_one_set_records_what_it_always_did(shards: Path, config: RunConfig) -> None:
    train(config)
    manifest = open_checkpoint(find(config.out).folder).manifest
    assert {*manifest["identity"]} == {"data", "tokenizer"} and MIXTURE not in manifest["identity"]
    assert all("sets" not in record for record in records(config.out, ("validation",)))


@pytest.mark.parametrize("damaged", ["x", [[0]], [["x", {}]], [[0, {"a": "0"}]], [[0, {"a": 1}]], 3], ids=str)
def test_damaged_weights_of_a_checkpoint_are_refused(damaged: Any) -> None:
    with pytest.raises(DataError, match="expected the weights of a run's sets, found"):
        phases_of({"data": "a", MIXTURE: damaged})
