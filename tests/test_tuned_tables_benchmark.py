"""benchmarks/tuned_tables.py: two steps on one state in turns, the table that it needs, and the line of `doctor`;
benchmarks/tune.py takes a run as it goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tuned_tables
from benchmarks.contenders import Settings, tokens_of
from benchmarks.record import continued, write_record
from handgrad.errors import DataError, UsageError
from handgrad.run.open import train
from handgrad.settings.config import RunConfig

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_both_steps_work_on_one_state(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has no table: steps of both are numbered through, and the second one has the heuristic's choices."""
    used: list[Any] = []
    monkeypatch.setattr(tuned_tables, "use_rows", used.append)
    monkeypatch.setattr(tuned_tables, "planned", lambda: (7, 5))
    made: list[tuple[str, int]] = []
    turn = tuned_tables.Turns.turn

    def counted(self: tuned_tables.Turns, name: str, seconds: float) -> dict[str, Any]:
        made.append((name, self.number))
        return turn(self, name, seconds)

    monkeypatch.setattr(tuned_tables.Turns, "turn", counted)
    sizes = {"model": "tiny", "micro_batch": 2, "sequence_length": 16, "vocab_size": 301, "device": "cpu"}
    settings = Settings(**sizes, micro_steps=2, precision=precision)
    figures = tuned_tables.measure(settings.config(), tokens_of(settings), {"a row": []}, 2, 0.0)
    assert used == [{"a row": []}, {}]
    assert made == [(name, 4 + n) for n, name in enumerate(("table", "heuristic") * 3)], "a step a turn at 0 s"
    assert figures["products"] == 7 and figures["products_in_the_table"] == 5
    for name in ("table", "heuristic"):
        turns = [turn["milliseconds"] for turn in figures[f"{name}_by_turn"]]
        assert len(turns) == 2 and figures[f"{name}_milliseconds_per_step"] == pytest.approx(sum(turns) / 2)
    lost = 1 - figures["table_milliseconds_per_step"] / figures["heuristic_milliseconds_per_step"]
    assert figures["speed_lost_without_the_table"] == pytest.approx(lost)


def test_a_table_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvmath")
    cublaslt = pytest.importorskip("handgrad.ops.cuda.cublaslt")
    with pytest.raises(UsageError, match=r"there is no table .*none\.json; `python -m benchmarks.tune MODEL` writes one"):
        tuned_tables.rows_of(str(tmp_path / "none.json"))
    monkeypatch.setattr(cublaslt, "frozen_algorithms", cublaslt.frozen_algorithms)
    (tmp_path / "some.json").write_text(json.dumps({"algorithms": {"a row": ["0"] * 8}}))
    tuned_tables.use_rows(tuned_tables.rows_of(str(tmp_path / "some.json")))
    assert cublaslt.frozen_algorithms() == {"a row": ["0"] * 8} and tuned_tables.planned() == (0, 0)


def test_a_record_goes_on_where_its_figures_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_COMMIT", "one")
    path = tmp_path / "record.json"
    assert continued(path, CPU, {"turns": 4}) is None
    write_record(path, CPU, turns=4, figures={"a": 1})
    assert continued(path, CPU, {"turns": 4}) == {"a": 1}
    with pytest.raises(DataError, match="has turns 4, here it is 5: the figures do not compare"):
        continued(path, CPU, {"turns": 5})
    monkeypatch.setenv("HANDGRAD_COMMIT", "two")
    with pytest.raises(DataError, match="has commit 'one', here it is 'two'"):
        continued(path, CPU, {"turns": 4})
    path.write_text("[]")
    with pytest.raises(DataError, match="is no record of a benchmark"):
        continued(path, CPU, {})


def test_a_begun_run_is_tuned_as_it_goes_on(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In its precision and packing, with the words of its data; lanes change no GEMM."""
    pytest.importorskip("nvmath")
    tune = pytest.importorskip("benchmarks.tune")
    train(dataclasses.replace(config, precision="bf16", packing="masked", lanes=2, steps=1))
    with pytest.raises(UsageError, match="expected a CUDA GPU to tune for"):
        tune.main(["tiny", "--device", "cpu"])
    monkeypatch.setattr("handgrad.machine.devices.resolve_device", lambda name, rank=0: torch.device("cuda"))
    found = list[tuple[str, str, int, int]]()

    def stop(config: RunConfig, vocab_size: int, *, graphs: bool) -> None:
        found.append((config.precision, config.packing, config.lanes, vocab_size))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "with_precision", lambda config, device: config)
    monkeypatch.setattr(tune, "choose_backend", lambda *_: None)
    monkeypatch.setattr(tune, "stepper_of", stop)
    capsys.readouterr()
    arguments = ["tiny", "--table", "table.json", "--data", config.data, "--precision"]
    for more in (["auto", "--out", config.out], ["fp32", "--vocab-size", "300"]):
        with pytest.raises(KeyboardInterrupt):
            tune.main([*arguments, *more])
    assert found == [("bf16", "masked", 0, 257), ("fp32", "stream", 0, 300)], "the last one of a new run"
    told = capsys.readouterr().out
    assert f"vocabulary 257 words, from {config.data}\nbegun      {config.out}, which keeps the settings of" in told
