"""The lists of techniques: defaults, `--without` and `--with`, and what older configurations meant."""

import dataclasses
import json
from pathlib import Path

import pytest

from handgrad.commands.arguments import parse
from handgrad.errors import UsageError
from handgrad.evaluation.load import checkpoint_config
from handgrad.networks import modern as techniques
from handgrad.networks.modern import EARLIER, NONE, TECHNIQUES, changed, default, listed, of_stored
from handgrad.run.settings import run_config
from handgrad.settings.config import ModelShape, RunConfig, check, differences, read_toml, to_dict, to_toml

ON, OFF = default(), [name for name, on in TECHNIQUES.items() if not on]


def chosen(*arguments: str) -> list[str]:
    return parse("train", ["m4", *arguments]).run_config.techniques.split(",")


def test_a_model_has_the_defaults_unless_told() -> None:
    assert chosen() == ON and ModelShape(57, 9, 2, 2, 8, "modern").techniques == ",".join(ON)
    assert chosen("--without", "rotary, softcap") == [name for name in ON if name not in ("rotary", "softcap")]
    assert chosen("--with", OFF[-1], "--without", ON[0]) == [*ON[1:], OFF[-1]]
    assert chosen("--techniques", f"{OFF[0]},{ON[1]}") == [ON[1], OFF[0]], "in the order of the table"
    assert chosen("--without", ",".join(ON)) == [NONE] and not ModelShape(57, 9, 2, 2, 8, "modern", NONE).has(ON[0])
    for gpt2 in (["tiny"], ["m4", "--model", "d12"], ["m4", "--architecture", "gpt2"]):
        assert parse("train", gpt2).run_config.techniques == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["m4", "--without", "rotery"], r"without must be one of rotary, .*; found 'rotery' \(did you mean rotary\?\)"),
        (["m4", "--with", "rotary"], "with names rotary, which is there already"),
        (["m4", "--without", "value_embeddings"], "without names value_embeddings, which is not there"),
        (["m4", "--without", "rotary,rotary"], "without names rotary, which is not there"),
        (["m4", "--techniques", "rotary,bias"], "techniques must be one of .*; found 'bias'"),
        (["tiny", "--without", "rotary"], "without is for --architecture modern, found 'rotary' with gpt2"),
        (["tiny", "--with", "rotary"], "with is for --architecture modern, found 'rotary' with gpt2"),
    ],
)
def test_a_name_that_changes_nothing_is_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        parse("train", arguments)
    assert "\n" not in str(error.value)


def test_a_stored_configuration_names_all_that_the_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that other defaults mean the same."""
    config = run_config("m4", "", "", {"with": OFF[0], "without": ON[2]})
    (tmp_path / "config.toml").write_text(to_toml(config))
    monkeypatch.setattr(techniques, "default", list)
    again = run_config("", str(tmp_path / "config.toml"), "", {})
    assert again == config and "without" not in to_dict(config)
    assert run_config("m4", "", "", {}).techniques == NONE


@pytest.mark.parametrize("without", ["", "rotary,softcap"])
def test_an_older_configuration_has_what_there_was(without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what it left out: of the techniques of its day, whatever the defaults are now."""
    left = [name for name in EARLIER if name not in without.split(",")]
    old = {name: value for name, value in to_dict(RunConfig(architecture="modern")).items() if name != "techniques"}
    old |= {"without": without}
    new = to_dict(RunConfig(architecture="modern", techniques=listed(left)))
    monkeypatch.setattr(techniques, "default", lambda: list(TECHNIQUES))
    assert of_stored(old)["techniques"].split(",") == left
    assert of_stored(new | {"without": "qk_norm"}) == new, "a list is whole"
    assert differences(old, new) == [] and len(differences(old, new | {"techniques": "none"})) == 1
    lines = [f"{name} = {json.dumps(value)}" for name, value in old.items()]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    assert read_toml(str(tmp_path / "config.toml"))["techniques"].split(",") == left
    stored = type("Stored", (), {"manifest": {"config": old}, "folder": tmp_path})()
    assert checkpoint_config(stored).techniques.split(",") == left


def test_an_older_gpt2_is_as_it_was() -> None:
    old = {name: value for name, value in to_dict(RunConfig()).items() if name != "techniques"} | {"without": ""}
    assert differences(old, to_dict(RunConfig())) == [] and check(RunConfig(**of_stored(old))) == RunConfig()


def test_lists_are_put_in_order() -> None:
    config = RunConfig(architecture="modern", techniques="softcap, rotary")
    assert config.techniques == "rotary,softcap" == dataclasses.replace(config, steps=3).techniques
    missing = ",".join(name for name in ON if name not in ("rotary", "softcap"))
    assert config.shape(57).variant == f"modern without {missing}, "
    more = dataclasses.replace(config, techniques=listed([*ON, OFF[0]]))
    assert more.shape(57).variant == f"modern with {OFF[0]}, "
    assert changed("rotary", added="softcap") == "rotary,softcap" and changed("rotary", "rotary") == NONE
