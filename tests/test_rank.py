"""The arena: the page's table is what the records say, and each way to cheat is refused with one line."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from arena import rank
from arena.rank import (
    ABOUT,
    ENTRIES,
    EQUAL,
    NOT_REPLAYED,
    PAGE,
    RULES,
    SCORE,
    Rules,
    check_entry,
    main,
    ranked,
    table,
    training_flops,
    with_table,
)
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import HandgradError
from handgrad.joins.audit.chain import links
from handgrad.run.checkpointing import sources_sha256
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage.run_files import AUDIT_FILE
from tests.figure_values import RECORDS
from tests.figures import has_history
from tests.forging import lines_of, redo, write_lines

SOURCES_AT = rank.sources_at  # the small arena replaces it
INSTRUCTIONS = torch.backends.cpu.get_cpu_capability()
WORDS = (
    f'author = "a test"\ncommit = "{"0" * 40}"\ninstructions = "{INSTRUCTIONS}"\nchanged = "nothing"\nlearnt = "little"\n'
)


OTHERS = {"link": "f" * 64, "seed": 1, "excess": 0.1, "error": 0.1, "entropy": 0.1, "links": "equal"}  # another run's score


class Ground:
    """A small arena: the stories, the rules, an honest run and its entry."""

    def __init__(self, folder: Path):
        self.folder, self.entries = folder, folder / "entries"
        data = self.stories("data")
        config = RunConfig(
            data=str(folder / "data"), out=str(folder / "runs" / "honest"), num_layers=1, num_heads=1, channels=16,
            sequence_length=32, steps=4, tokens_per_step=64, micro_batch=2, eval_every=0, eval_tokens=64, sample_tokens=0,
            audit_every=2, device="cpu", precision="fp32", learning_rate=1e-3,
        )  # fmt: skip
        self.config, most = config, training_flops(config, 257)
        known = {"data_sha256": data.identity, "tokenizer_sha256": data.tokenizer.sha256}
        sizes = {"documents": 400, "held_out": 20, "tokenizer": "bytes", "vocab_size": 257, "most_bytes": 20_000}
        self.rules = Rules(flops=most, most_steps=10, **known, **sizes)
        self.enter("honest")

    def stories(self, name: str, **settings: object):
        options = {"tokenizer": "bytes", "documents": 400, **settings}
        return prepare(PrepareOptions("stories", self.folder / name, workers=1, **options)).dataset

    def enter(self, name: str, **settings: object) -> Path:
        """Trains, and enters the record."""
        run = dataclasses.replace(self.config, out=str(self.folder / "runs" / name), **settings)
        train(run)
        return self.enter_chain(name, Path(run.out) / AUDIT_FILE)

    def enter_chain(self, name: str, chain: Path) -> Path:
        entry = self.entries / name
        entry.mkdir(parents=True)
        shutil.copy(chain, entry)
        (entry / ABOUT).write_text(WORDS)
        return entry

    def forge(self, name: str, edit: Callable[[list[dict]], object], *, hashes: bool = True) -> Path:
        """The honest entry with its chain edited; `hashes` are made right again."""
        entry = self.enter_chain(name, self.entries / "honest" / AUDIT_FILE)
        lines = lines_of(entry)
        edit(lines)
        (redo if hashes else write_lines)(entry, lines)
        return entry

    def put(self, name: str, file: str, content: str) -> Path:
        entry = self.enter_chain(name, self.entries / "honest" / AUDIT_FILE)
        (entry / file).write_text(content)
        return entry


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "sources_at", lambda commit: sources_sha256())  # as if the tree were clean
        yield Ground(tmp_path_factory.mktemp("arena"))


def keep(lines: list[dict], count: int) -> None:
    del lines[count:]


def put(line: dict, part: str, name: str, to: object) -> None:
    line[part][name] = to


def foreign(name: str, **settings: object) -> Callable[[Ground], Path]:
    """Trains on other stories."""

    def enter(ground: Ground) -> Path:
        ground.stories(f"data-{name}", **settings)
        return ground.enter(name, data=str(ground.folder / f"data-{name}"))

    return enter


ATTACKS = {
    "budget": (lambda g: g.enter("budget", steps=6), "train fewer steps or a smaller network"),
    "width": (lambda g: g.enter("width", channels=32), "train fewer steps or a smaller network"),
    "steps": (lambda g: g.enter("steps", steps=12, channels=4, num_heads=1), "10 steps"),
    "muon": (lambda g: g.enter("muon", optimizer="muon"), "train fewer steps or a smaller network"),
    "other stories": (foreign("other", seed=1), "expected data"),
    "more stories": (foreign("more", documents=500), "expected data"),
    "another validation": (foreign("validation", validation_fraction=0.1), "expected data"),
    "another tokenizer": (foreign("tokenizer", tokenizer="bpe:300"), "expected tokenizer"),
    "init-from": (
        lambda g: g.enter("weights", init_from=str(g.folder / "runs" / "honest")),
        "expected weights drawn from the seed",
    ),
    "init-from, hidden": (
        lambda g: g.forge("hidden", lambda lines: put(lines[0], "config", "init_from", "weights")),
        "expected weights drawn from the seed",
    ),
    "another seed": (lambda g: g.enter("lottery", seed=7), "expected seed 1337, found 7"),
    "an edited link": (
        lambda g: g.forge("edited", lambda lines: lines[2].update(loss=(0.1).hex()), hashes=False),
        "was edited",
    ),
    "a removed link": (lambda g: g.forge("removed", lambda lines: lines.pop(1), hashes=False), "was removed"),
    "stopped early": (lambda g: g.forge("early", lambda lines: keep(lines, 2), hashes=False), "links from 0 to 2 of 4"),
    "own code": (lambda g: g.forge("code", lambda lines: put(lines[0], "versions", "sources", "f" * 64)), "commit of main"),
    "a GPU": (lambda g: g.forge("gpu", lambda lines: put(lines[0], "versions", "device", "cuda: H200")), "--device cpu"),
    "another's score": (lambda g: g.put("score", SCORE, json.dumps(OTHERS)), "is of another run"),
    "a further file": (lambda g: g.put("file", "weights.bin", "x"), "take it out"),
    "a large entry": (lambda g: g.put("large", ABOUT, WORDS + "#" * 20_000), "larger --audit-every"),
    "a table of its own": (lambda g: g.put("text", ABOUT, WORDS.replace("little", "a | b")), "expected learnt as a line"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(attack: str, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """By the record alone, before any training."""
    enter, expected = ATTACKS[attack]
    entry = enter(ground)
    capsys.readouterr()
    assert main([], ground.rules, ground.entries) != 0
    shown = capsys.readouterr()
    shutil.rmtree(entry)
    assert shown.out == "" and shown.err.count("\n") == 1 and f"refused: {entry}" in shown.err and expected in shown.err


def test_the_weights_of_a_run_score_its_entry(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """In the place of a replay: its chain is the entry's."""
    by_run = ["--replay", "honest", "--run", str(ground.folder / "runs" / "honest")]
    assert main(by_run, ground.rules, ground.entries) == 0, capsys.readouterr().err
    score = ground.entries / "honest" / SCORE
    first = json.loads(score.read_text())
    assert first["links"] == "not replayed" and first["seed"] and first["excess"] > 0 and first["entropy"] > 30
    assert rank.score_text(first) in table(ranked(ground.rules, ground.entries), ground.rules)
    score.unlink()


@pytest.mark.nightly  # test_the_weights_of_a_run_score_its_entry, without training it again
def test_a_replay_scores_an_entry_and_refuses_a_forged_one(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """The hashes of the forged chain are right; its settings did not make its links."""
    words = ["--data", str(ground.folder / "data")]
    forged = ground.forge("forged", lambda lines: put(lines[0], "config", "learning_rate", 2e-3))
    assert main(["--replay", "forged", *words], ground.rules, ground.entries) == 65
    told = capsys.readouterr().err
    assert "differ from step 2 on" in told and told.startswith("refused: ") and told.count("\n") == 1
    shutil.rmtree(forged)

    assert main(["--replay", "honest", *words], ground.rules, ground.entries) == 0
    score = ground.entries / "honest" / SCORE
    first = json.loads(score.read_text())
    assert first["links"] == EQUAL and first["seed"] and first["excess"] > 0 and first["entropy"] > 30
    assert rank.score_text(first) in table(ranked(ground.rules, ground.entries), ground.rules)
    by_run = ["--replay", "honest", "--run", str(ground.folder / "runs" / "honest")]
    assert main(by_run, ground.rules, ground.entries) == 0 and json.loads(score.read_text()) == first
    score.write_text(json.dumps(first | {"excess": first["excess"] - 1e-9}))
    capsys.readouterr()
    assert main(by_run, ground.rules, ground.entries) == 65
    assert "one was edited" in capsys.readouterr().err


def test_other_instructions_explain_other_bits(ground: Ground) -> None:
    """A replay compares every link, and refuses a difference on a machine like the entry's alone."""
    entry = check_entry(ground.entries / "honest", ground.rules)
    mine = links(entry.record.lines)
    assert rank.compare(entry, mine) == EQUAL
    mine[1] = mine[1] | {"loss": (0.1).hex()}
    with pytest.raises(HandgradError, match="loss differ from step 2 on"):
        rank.compare(entry, mine)
    elsewhere = dataclasses.replace(entry, about=entry.about | {"instructions": "VSX"})
    assert rank.compare(elsewhere, mine).endswith(f"as may be: {INSTRUCTIONS} for VSX are others")


def test_training_stories_never_score(ground: Ground) -> None:
    with pytest.raises(HandgradError, match="draw another --seed"):
        rank.fresh_stories(ground.rules, 0)


def test_the_table_of_the_page_is_drawn_from_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone with all commits also: each entry's code is its commit's."""
    monkeypatch.setattr(rank, "sources_at", SOURCES_AT if has_history() else lambda commit: mock.ANY)
    entries = ranked(RULES, ENTRIES)
    assert len(entries) >= 5 and all(entry.score and entry.score["links"] in (EQUAL, NOT_REPLAYED) for entry in entries)
    page = PAGE.read_text()
    assert with_table(page, table(entries, RULES)) == page, "python -m arena.rank --write"


def test_the_budget_is_five_minutes_of_the_measured_rate() -> None:
    """To one digit."""
    demo = RECORDS["cpu-demo"]
    shape = RunConfig(**{name: demo["config"][name] for name in ("num_layers", "num_heads", "channels", "sequence_length")})
    tokens = demo["config"]["steps"] * demo["config"]["tokens_per_step"]
    rate = tokens * shape.shape(RULES.vocab_size).flops_per_token / demo["seconds_in_steps"]
    assert float(f"{300 * rate:.0e}") == RULES.flops


@pytest.mark.nightly
def test_this_version_prepares_the_stories_of_the_rules(tmp_path: Path) -> None:
    assert rank.training_data(RULES, tmp_path / "arena") == RULES.data_sha256


def test_an_entry_in_order_passes(ground: Ground) -> None:
    entry = check_entry(ground.entries / "honest", ground.rules)
    assert entry.flops == ground.rules.flops and entry.record.last_step == 4
