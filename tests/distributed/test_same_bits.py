"""The bits of a run depend on its lanes, not on the number of processes that share them, nor on when they stop."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.runs import Launcher, arguments, same_run, saved_steps, settings_of
from tests.techniques import toggled
from tests.test_old_checkpoints import with_full_sized_state
from tests.test_runs import records, tensors

NEW = "residual_scalars,input_scalars,value_embeddings"

LONG = {"steps": 30, "eval_every": 10, "eval_stride": 12, "save_every": 10, "sample_tokens": 3}
FP8 = {"precision": "fp8", "fp8_window": 3, "fp8_count_every": 2, "fp8_head": "forward,dgrad,wgrad", "recompute": 1}
KINDS: dict[str, dict[str, object]] = {
    "fp32": LONG,
    "bf16": {"precision": "bf16"},
    "fp8": {**FP8, "steps": 6, "eval_every": 3},
    "fp8-current": {**FP8, "fp8_scaling": "current", "fp8_margin": 1, "steps": 6, "eval_every": 3},
    "rounded": {"reduce_precision": "bf16"},  # on their way between lanes
    "dropout": {"dropout": 0.3, "steps": 6, "eval_every": 3},
    "bf16-alone": {"precision": "bf16", "master_weights": "false"},
    "moments": {"precision": "bf16", "moments": "bf16"},
    "16-bits": {"precision": "bf16", "master_weights": "false", "moments": "bf16"},
    "growing": {"tokens_per_step": 256, "batch_schedule": "2:512,5:1536"},  # 1, 2 and 6 micro-steps a lane
    "rounded-bf16": {"precision": "bf16", "reduce_precision": "bf16", "recompute": 2, "skip_loss_z": 4.0},
}

ONCE = ["fp32-2-1", "fp8-4-1", "fp8-current-2-1", "dropout-2-1", "growing-2-1"]
ONCE += ["rounded-bf16-2-1", "16-bits-4-0"]  # which have the settings of "bf16", "rounded", "bf16-alone" and "moments"


def last_step(settings: dict) -> int:
    return int(settings.get("steps", 8))


@pytest.fixture(scope="module")
def alone(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory):
    """The runs of a single process, each made when it is first asked for."""
    made: dict[str, Path] = {}

    def run(**settings: object) -> Path:
        key = repr(sorted(settings.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            launcher.run(1, arguments(shards, made[key], **settings))
        return made[key]

    return run


@pytest.mark.nightly(but=ONCE)
@pytest.mark.parametrize(
    ("kind", "ranks", "zero"),
    [
        *(("fp32", 2, 1), ("fp32", 4, 0), ("bf16", 4, 1), ("bf16", 2, 0)),
        *(("fp8", 2, 0), ("fp8", 4, 1), ("fp8-current", 2, 1), ("fp8-current", 4, 0)),
        *(("rounded", 2, 0), ("rounded", 4, 1)),
        *(("bf16-alone", 2, 1), ("bf16-alone", 4, 0), ("moments", 2, 1), ("moments", 4, 0)),
        *(("rounded-bf16", 2, 1), ("dropout", 2, 1)),
        *(("growing", 2, 1), ("growing", 4, 0), ("16-bits", 4, 0)),
        *(("fp32", 2, 0), ("fp32", 4, 1), ("fp8", 2, 1), ("rounded", 2, 1), ("growing", 4, 1)),
    ],
)
def test_ranks_do_not_matter(kind: str, ranks: int, zero: int, launcher: Launcher, shards: Path, tmp_path: Path, alone):
    settings = KINDS[kind]
    launcher.run(ranks, arguments(shards, tmp_path / "run", zero=zero, **settings))
    same_run(alone(**settings), tmp_path / "run", last_step(settings))
    logged = [[line["tensors"] for line in records(run, ("fp8",))] for run in (alone(**settings), tmp_path / "run")]
    assert logged[0] == logged[1] and len(logged[0]) == 3 * kind.startswith("fp8")
    norms = [record["norm"] for record in records(tmp_path / "run", ("step",))]
    assert min(norms) > 0.5, "every step must clip"


@pytest.mark.nightly(but=["2-fp8"])
@pytest.mark.parametrize(("ranks", "kind"), [(4, "fp32"), (2, "fp32"), (2, "rounded-bf16"), (2, "fp8")])
def test_shared_gradients_do_not_matter(ranks: int, kind: str, launcher: Launcher, shards: Path, tmp_path: Path, alone):
    """zero 2, with so many blocks that their gradients take turns in the ring."""
    settings = {**KINDS[kind], "steps": 6, "eval_every": 3, "num_layers": 8, "lanes": ranks, "micro_batch": 16 // ranks}
    launcher.run(ranks, arguments(shards, tmp_path / "run", zero=2, **settings))
    same_run(alone(**settings), tmp_path / "run", 6)


@pytest.mark.nightly(but=["modern fp8"])
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"lanes": 8}, [(2, 0), (4, 1)]),
        ({"micro_batch": 4, "precision": "bf16", "reduce_precision": "bf16"}, [(2, 1), (4, 2)]),
        ({"architecture": "modern", "micro_batch": 4}, [(2, 1), (4, 2)]),
        ({"architecture": "modern", "micro_batch": 4, "num_layers": 5, "techniques": toggled(NEW)}, [(2, 1), (4, 2)]),
        ({"architecture": "modern", "micro_batch": 4, **FP8}, [(2, 1), (4, 2)]),
    ],
    ids=["fp32", "rounded", "modern", "new", "modern fp8"],
)
def test_muon_on_ranks(settings: dict, ranks: list, launcher: Launcher, shards: Path, tmp_path: Path):
    """Its whole matrices belong to lanes. Shares of a bucket differ; rank 0 of 4 has nothing of a block of 8 lanes. In fp32
    the last ranks go on from a checkpoint of before schema 3."""
    settings = {"optimizer": "muon", "steps": 6, "eval_every": 3, "save_every": 3, "num_layers": 3, **settings}
    for size, zero in ((1, 1), *ranks):
        last = tmp_path / str(size)
        launcher.run(size, arguments(shards, last, zero=zero, **settings))
        same_run(tmp_path / "1", last, 6)
    shutil.rmtree(last / "checkpoints" / "step_00000006")
    if "precision" not in settings:
        with_full_sized_state(last / "checkpoints" / "step_00000003")
    launcher.run(2, arguments(shards, last, zero=1, **settings))  # continues with step 3
    same_run(tmp_path / "1", last, 6)


def test_a_batch_grows_on_other_ranks_than_before(launcher: Launcher, shards: Path, tmp_path: Path, alone) -> None:
    """Four ranks stop where the second stage begins, two where the third does, one goes on."""
    settings = KINDS["growing"]
    for size, fault, codes in ((4, "signal:1:1", [75] * 4), (2, "signal:0:4", [75] * 2), (1, "none", [0])):
        started = launcher.start(size, arguments(shards, tmp_path / "run", **settings), fault)
        assert started.wait() == codes, started.errors
    assert {2, 5} <= {*saved_steps(tmp_path / "run")}
    same_run(alone(**settings), tmp_path / "run", 8)


@pytest.mark.fault(19)
def test_stopped_and_continued_on_other_ranks(launcher: Launcher, shards: Path, tmp_path: Path, alone) -> None:
    """Two ranks, one of which is told to stop; then one, told to stop; then four. What they share differs, too."""
    for size, zero, fault, codes in ((2, 1, "signal:1:6", [75, 75]), (1, 0, "signal:0:16", [75]), (4, 1, "none", [0] * 4)):
        started = launcher.start(size, arguments(shards, tmp_path / "run", zero=zero, **LONG), fault)
        assert started.wait() == codes, started.errors
        if size == 2:
            assert started.fired == [False, True]
            assert "stopped by SIGTERM after step 7, saved step 7" in started.ranks[0].errors
            assert saved_steps(tmp_path / "run") == [7]
    same_run(alone(**LONG), tmp_path / "run", 30)


def test_the_first_start_decides_the_lanes(launcher: Launcher, shards: Path, tmp_path: Path, alone) -> None:
    run, command = tmp_path / "run", arguments(shards, tmp_path / "run", lanes=None)
    started = launcher.start(2, command, "signal:0:4")
    assert started.wait() == [75, 75], started.errors
    assert settings_of(run, 5)["lanes"] == 2
    refused = launcher.start(4, command)
    assert refused.wait() == [78] * 4, refused.errors
    assert [rank.told for rank in refused.ranks[1:]] == [[], [], []]
    assert len(refused.ranks[0].told) == 1 and "start 1, 2 processes" in refused.ranks[0].told[0]
    launcher.run(1, command)
    assert settings_of(run, 8)["lanes"] == 2
    same_run(alone(lanes=2), run, 8)


@pytest.mark.parametrize("lanes", [None, 4])
def test_three_ranks_are_refused(lanes: int | None, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    started = launcher.start(3, arguments(shards, tmp_path / "run", lanes=lanes))
    assert started.wait() == [78] * 3, started.errors
    told = [line for rank in started.ranks for line in rank.told]
    assert len(told) == 1 and "start" in told[0] and not (tmp_path / "run").exists()


def test_other_lanes_give_other_bits(alone) -> None:
    """So that the equalities above mean something."""
    a, b = alone(lanes=2), alone()
    found, other = tensors(a, 8), tensors(b, 8)
    assert found.keys() == other.keys() and any(not found[name].equal(other[name]) for name in found)


def test_what_may_be_rounded_on_its_way_is(alone) -> None:
    a, b = alone(**KINDS["rounded"]), alone()
    assert records(a, ("step",)) != records(b, ("step",))
