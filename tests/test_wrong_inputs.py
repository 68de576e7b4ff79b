"""Inputs in the wrong place: each gets one line with the command or the flag that works."""

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.commands.arguments import parse
from handgrad.data import prepare as preparing
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.tokenizer_loading import of_folder
from handgrad.errors import ConfigError, UsageError
from handgrad.reports import page as pages
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.conftest import write_text
from tests.data.chats import made_tokenizer, talk, write_folder
from tests.interop.models import make_checkpoint
from tests.test_commands import SMALL, refused
from tests.test_report import make_run, start_line


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text file in the working folder, and a folder `texts` with another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    write_text(tmp_path / "texts" / "one.txt")
    return write_text(tmp_path / "my book.txt")


def test_text_in_the_place_of_a_preset(text: Path, capsys: pytest.CaptureFixture) -> None:
    """The line names the command to run first, and that command works."""
    line = refused(capsys, 64, "train", text.name)
    assert "`handgrad prepare 'my book.txt' --out 'shards/my book'`" in line and "--data" in line
    assert "`handgrad prepare texts --out shards/texts`" in refused(capsys, 64, "train", "texts")
    with pytest.raises(UsageError, match="handgrad prepare texts --out shards/texts"):
        handgrad.train("texts")
    assert "unknown preset 'nothing'" in refused(capsys, 64, "train", "nothing")
    assert main(["prepare", "texts", "--out", "shards/texts", "--tokenizer", "bytes", "--workers", "1"]) == 0
    capsys.readouterr()
    assert "`handgrad train --data shards/texts`" in refused(capsys, 64, "train", "shards/texts")


def test_text_in_the_place_of_shards(text: Path, capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, 65, "train", *SMALL, "--data", text.name)
    assert "`handgrad prepare 'my book.txt' --out 'shards/my book'`" in line
    assert "`handgrad prepare texts --out shards/texts`" in refused(capsys, 65, "train", *SMALL, "--data", "texts")
    assert not Path("runs").exists(), "a refused command writes nothing"


ROWS = {"talks": {"messages": talk("a", "b")}, "rows": {"text": "Once"}, "fields": {"id": "1", "body": "Once upon a time"}}


@pytest.mark.parametrize(("name", "flags"), [("talks", "--chat "), ("rows", ""), ("fields", "--text-field body ")])
def test_rows_in_the_place_of_shards(
    name: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The named command has the flags that the file's first row asks for, and works; so for a folder of such files."""
    monkeypatch.chdir(tmp_path)
    for path in (Path(f"{name}.jsonl"), Path("folder") / "rows.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{json.dumps(ROWS[name])}\n" * 40)
    command = f"handgrad prepare {name}.jsonl {flags}--out shards/{name}"
    assert f"`{command}`" in refused(capsys, 65, "train", *SMALL, "--data", f"{name}.jsonl")
    assert f"`{command}`" in refused(capsys, 64, "train", f"{name}.jsonl")
    assert f"`handgrad prepare folder {flags}--out shards/folder`" in refused(
        capsys, 65, "train", *SMALL, "--data", "folder"
    )
    assert main([*shlex.split(command)[1:], "--workers", "1"]) == 0
    capsys.readouterr()
    Path("folder/words.txt").write_text("text\n")  # which --chat refuses
    Path("broken.jsonl").write_text('{"messages')
    for other in ("folder", "broken.jsonl"):
        plain = f"`handgrad prepare {other} --out shards/{other.removesuffix('.jsonl')}`"
        assert plain in refused(capsys, 65, "train", *SMALL, "--data", other)


def test_a_source_that_is_nearly_named(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture) -> None:
    """The file or the folder beside it is named; no file of another kind is."""
    Path("chats.jsonl").write_text("{}")
    Path("photo.jpeg").write_text("")
    for wrong, right in (("chats.json", "chats.jsonl"), ("text", "texts"), ("./my book.tx", "my book.txt")):
        assert f"no such file or folder (did you mean {right}?); sources" in refused(capsys, 65, "prepare", wrong)
    for wrong in ("photo.jpg", "another.txt", "nowhere/chats.json"):
        assert "no such file or folder; sources" in refused(capsys, 65, "prepare", wrong)


def test_weights_in_the_place_of_a_model_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As other trainers name them: the line says --init-from, for a name on the Hub as well."""
    monkeypatch.chdir(tmp_path)
    run, _ = make_checkpoint(Path("my model"), "bytes")
    assert main(["export", str(run), "--to", "hf", "theirs"]) == 0
    for name in (str(run), f"{run}/checkpoints/step_00000040", "theirs"):
        wanted = f"`handgrad train --init-from {shlex.quote(name)}`, with --data"
        assert f"found weights: {wanted}" in refused(capsys, 64, "train", name, "--data", "x")
        assert f"found {name!r}; weights to start from are named by {wanted}" in refused(
            capsys, 64, "train", "--model", name
        )
    hub = "`handgrad plan --init-from Owner/Name-1B`, with --data"
    assert f"weights to start from are named by {hub}" in refused(capsys, 64, "plan", "--model", "Owner/Name-1B")
    Path("empty").mkdir()
    for name in ("empty", "runs/nothing"):
        assert f"unknown preset '{name}'" in refused(capsys, 64, "train", name)
    assert "did you mean d12?" in refused(capsys, 64, "train", "--model", "d122")


def test_conversations_and_text(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture) -> None:
    """One prepared as the other: the line says to add --chat, or to leave it out. To train it is no setting."""
    for name, row in ROWS.items():
        Path(f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    assert "; add --chat to the command, which prepares conv" in refused(capsys, 65, "prepare", "talks.jsonl")
    assert "; leave --chat out to prepare text" in refused(capsys, 65, "prepare", "rows.jsonl", "--chat")
    assert '; write it as {"messages": ' in refused(capsys, 65, "prepare", "fields.jsonl", "--chat")
    for other in ("texts", "stories", "tinystories"):
        assert ", or leave --chat out to prepare text" in refused(capsys, 64, "prepare", other, "--chat")
    line = refused(capsys, 64, "train", *SMALL, "--data", "talks.jsonl", "--chat")
    assert "'--chat' (that is done when the data are prepared: `handgrad prepare --chat`)" in line


def test_a_folder_of_them(finished: RunConfig, shards: Path, capsys: pytest.CaptureFixture) -> None:
    """In the place of a run or of shards: the line names one in it."""
    line = refused(capsys, 65, "sample", str(Path(finished.out).parent))
    assert f"found a folder of runs; name one of them, as {finished.out}" in line
    runs, other = str(Path(finished.out).parent), ["prepare", str(shards.parent / "text.txt"), "--out", "nowhere"]
    for code, command in (
        (65, ["checkpoints", runs]),
        (65, ["export", runs, "x", "--to=hf"]),
        (64, [*other, f"--tokenizer={runs}"]),
    ):
        assert f"; name one of the runs in it, as {finished.out}\n" in refused(capsys, code, *command)
    assert "; give a run folder, the --out of `handgrad train`" in refused(capsys, 65, "checkpoints", str(shards))
    line = refused(capsys, 65, "train", *SMALL, "--data", str(shards.parent))
    assert f"name one of the prepared folders in it, as --data {shards}" in line


def test_a_folder_that_is_prepared(
    shards: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In the place of a text it is named with the command that trains; in that of --out another one is."""
    monkeypatch.chdir(text.parent)
    ready = f"which is prepared already; `handgrad train --data {shards}` trains on it"
    assert ready in refused(capsys, 65, "prepare", str(shards), "--out", "out")
    shutil.copytree(shards, "shards/first")
    assert "choose another folder, as 'shards/my book'\n" in refused(capsys, 64, "prepare", text.name)
    Path("shards/my book").mkdir()
    for source in (text.name, "stories"):
        assert "found something else; choose another folder\n" in refused(capsys, 64, "prepare", source)
    assert not Path("out").exists()


def test_several_files(text: Path, capsys: pytest.CaptureFixture) -> None:
    """A shell that has expanded a glob."""
    line = refused(capsys, 64, "prepare", text.name, "texts/one.txt", "--out", "shards")
    assert "one argument too many: 'texts/one.txt'; several files are one SOURCE: their folder, or a glob in quotes" in line
    assert "unknown argument '--nothing'" in refused(capsys, 64, "prepare", text.name, "--nothing")


def test_a_text_in_the_place_of_an_option(capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, 64, "sample", "runs/a", "Once upon a time")
    assert "one argument too many: 'Once upon a time'; give a text as --prompt TEXT" in line
    line = refused(capsys, 64, "chat", "runs/a", "Hello")
    assert "one argument too many: 'Hello'; give a message as --prompt TEXT" in line


@pytest.mark.parametrize("name", ["out", "data"])
def test_a_path_that_is_no_utf_8(name: str, shards: Path, capsys: pytest.CaptureFixture) -> None:
    """Linux takes any bytes. safetensors does not, so that such a run could not resume."""
    given = {"data": str(shards), "out": "runs/a"} | {name: os.fsdecode(b"fa\xe7ade")}
    line = refused(capsys, 64, "train", *SMALL, "--data", given["data"], "--out", given["out"])
    assert f"{name} must be a path in UTF-8, found b'fa\\xe7ade'; rename the folder" in line
    assert not os.path.lexists(given["out"]), "a refused command writes nothing"


def test_a_recipe_or_a_run_in_the_place_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "config.toml"
    recipe.write_text("steps = 3\n")
    assert f"`handgrad train --config {recipe}`" in refused(capsys, 64, "train", str(recipe))
    there = f"`handgrad train --config {recipe} --out {tmp_path}`"
    assert there in refused(capsys, 64, "train", str(tmp_path)), "the recipe names no folder, or another"


def test_the_tokenizer_is_named_before_the_batch(
    finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The data of a run, or of its weights, prepared with another tokenizer and too short for a step."""
    prepare(PrepareOptions(str(write_text(tmp_path / "t.txt")), tmp_path / "bpe", tokenizer="bpe:300", workers=1))
    shape = ["--num-layers", "2", "--num-heads", "2", "--channels", "32", "--tokens-per-step", "1048576", "--device", "cpu"]
    data = ["--data", str(tmp_path / "bpe")]
    line = refused(capsys, 78, "train", "tiny", *shape, *data, "--out", finished.out)
    assert f"{finished.out} was trained with another tokenizer (bytes, 257 words) than {tmp_path / 'bpe'} (bpe, 300" in line
    assert "--tokenizer bytes" in line and f"--data {finished.data}" in line
    line = refused(capsys, 65, "train", *shape, *data, "--init-from", finished.out, "--out", str(tmp_path / "new"))
    assert f"{finished.out} was trained with another tokenizer (bytes" in line and "--tokenizer bytes" in line
    assert not (tmp_path / "new").exists()


def test_the_tokenizer_to_prepare_with_is_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of weights whose tokenizer has no name: the option in the error, given to `prepare`, makes shards that fit."""
    theirs, imported, own = (str(tmp_path / name) for name in ("their model", "imported", "own"))
    text, folder = write_text(tmp_path / "text.txt"), write_folder(made_tokenizer(None), tmp_path / "somebody")
    llama = {"architecture": "llama", "llama": "kv_heads=1,tied"}
    weights, _ = make_checkpoint(tmp_path / "random", of_folder(folder), sizes=(2, 2, 32, 256), **llama)
    assert main(["export", str(weights), "--to", "hf", theirs]) == 0 and main(["import", theirs, "--out", imported]) == 0

    def prepared(*option: str) -> list[str]:
        out = str(tmp_path / f"shards {len(list(tmp_path.glob('shards *')))}")
        assert main(["prepare", str(text), *option, "--out", out, "--workers", "1"]) == 0
        return ["--data", out]

    assert main(["train", *SMALL, *prepared("--tokenizer", "bpe:280"), "--out", own]) == 0
    others = prepared("--tokenizer", "bytes")
    for source in (theirs, imported, own):
        begin = ["train", "--init-from", source, "--steps", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
        line = refused(capsys, 65, *begin, *others)
        option = shlex.split(line.partition("prepare the text with ")[2])
        assert option == ["--tokenizer", source]
        assert main([*begin, "--allow-changes", *prepared(*option)]) == 0
        shutil.rmtree(tmp_path / "run")


@pytest.mark.fault(20)
def test_other_data_of_the_same_tokenizer(finished: RunConfig, tmp_path: Path) -> None:
    """Folders in the message, digests only in the log of a run that goes on."""
    other = tmp_path / "other"
    prepare(PrepareOptions(str(write_text(tmp_path / "t.txt", 5000)), other, tokenizer="bytes", workers=1))
    changed = dataclasses.replace(finished, data=str(other))
    with pytest.raises(ConfigError, match=f"trained on other data than {other}: {finished.data}; give that --data") as told:
        train(changed)
    assert not re.search("[0-9a-f]{64}", str(told.value))
    train(changed, allow_changes=True)
    assert re.search(
        "configuration changed: data: [0-9a-f]{64} -> [0-9a-f]{64}", (Path(finished.out) / "log.txt").read_text()
    )


def test_a_report_leaves_out_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`handgrad report runs/*`: a line for each folder without a run; an error only if none is left."""
    monkeypatch.setattr(pages, "choose_plots", lambda runs: [])
    runs = tmp_path / "runs"
    for name in ("a", "b"):
        make_run(runs / name)
    (runs / "empty").mkdir()
    (runs / "notes.txt").write_text("mine")
    make_run(runs / "new", [start_line()])
    out = tmp_path / "page.html"
    assert main(["report", *map(str, sorted(runs.iterdir())), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n" and "<title>a · b – handgrad</title>" in out.read_text()
    empty, new, notes = shown.err.splitlines()
    assert empty.startswith(f"left out   {runs / 'empty'} holds no metrics.jsonl")
    assert new.startswith(f"left out   {runs / 'new'} has no finished step yet")
    assert notes.startswith(f"left out   {runs / 'notes.txt'} is a file")
    assert "empty holds no metrics" in refused(capsys, 65, "report", str(runs / "empty"), str(runs / "new"))
    (tmp_path / "all").mkdir()
    runs.rename(tmp_path / "all" / "runs")
    assert "lists them" in refused(capsys, 65, "report", str(tmp_path / "all"))


def test_a_folder_of_runs_stands_for_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In their order, beside other runs; files and folders of other kinds in it are no mistakes."""
    monkeypatch.setattr(pages, "choose_plots", lambda runs: [])
    make_run(tmp_path / "single")
    for name in ("seed=2", "seed=1"):
        make_run(tmp_path / "seeds" / name)
    (tmp_path / "seeds" / "notes.json").write_text("{}")
    (tmp_path / "seeds" / "plots").mkdir()
    assert main(["report", str(tmp_path / "seeds")]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path}/seeds/report.html\n" and not shown.err
    assert "<title>seed=1 · seed=2 – handgrad</title>" in (tmp_path / "seeds" / "report.html").read_text()
    rows = handgrad.compare(tmp_path / "single", tmp_path / "seeds")
    assert [row["run"] for row in rows] == ["single", "seed=1", "seed=2"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds" / "report.html").unlink()
    (tmp_path / "seeds").rename("runs")
    capsys.readouterr()
    assert main(["report"]) == 0 and capsys.readouterr().out == "runs/report.html\n", "of `runs`, unless others are named"
    assert parse("watch", []).runs == ["runs"]


def test_a_run_is_named_by_its_folder_alone(finished: RunConfig, capsys: pytest.CaptureFixture) -> None:
    """`train --out RUN`, and other settings for it, are answered with the command that resumes it, which works."""
    recipe = f"{finished.out}/config.toml"
    assert f"is a run; resume it by `handgrad train --config {recipe}`" in refused(
        capsys, 64, "train", "--out", finished.out
    )
    line = refused(capsys, 78, "train", *SMALL, "--data", finished.data, "--out", finished.out)
    assert f"use the old settings (--config {recipe})" in line
    assert main(["train", "--config", recipe]) == 0
    moved = Path(finished.out).rename(f"{finished.out}_moved")
    line = refused(capsys, 64, "train", "--out", str(moved))
    assert f"; resume it by `handgrad train --config {moved}/config.toml --out {moved}`" in line


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_other_commands_than_train_recommend_themselves(
    command: str, finished: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With a run, shards or a text where a preset stands, or with nothing; what they name works."""
    monkeypatch.chdir(Path(finished.out).parent)
    recipe = f"{finished.out}/config.toml"
    settings = f"take its settings by `handgrad {command} --config {recipe}`"
    assert settings in refused(capsys, 64, command, finished.out)
    shutil.copytree(finished.data, "shards/mine")
    data = f"`handgrad {command} --data shards/mine`"
    assert data in refused(capsys, 64, command, "shards/mine") and data in refused(capsys, 64, command)
    if command == "plan":
        assert settings in refused(capsys, 64, command, "--out", finished.out)
        assert main([command, "--config", recipe]) == main([command, "--data", "shards/mine"]) == 0
    write_text(Path("my.txt"))
    assert f"then `handgrad {command} --data` with that --out" in refused(capsys, 64, command, "my.txt")


def test_a_run_that_is_not_there_was_not_audited_either(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for command in (["verify"], ["diff", str(tmp_path)]):
        line = refused(capsys, 65, command[0], str(tmp_path / "nothing"), *command[1:])
        assert f"found nothing at {tmp_path / 'nothing'}; check the name" in line


def test_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """One short reason, not the library's story of it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(capsys, 65, "import", "someone/no-such-model", "--out", str(tmp_path / "out"))
    assert "found neither (no connection, no copy here); check the name and the connection" in line


def test_another_kind_of_file_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "run")
    line = refused(capsys, 64, "report", str(tmp_path / "run"), "--out", str(tmp_path / "compared.pdf"))
    assert line.endswith(f"try --out {tmp_path / 'compared.html'}\n")


def forbidden(source: str) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", source)


def test_what_a_command_may_do_follows_from_what_is_there(
    finished: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A remedy that cannot be followed is none."""
    run = finished.out
    weights = next(Path(run).glob("checkpoints/*/model.safetensors"))
    line = refused(capsys, 65, "evaluate", run, "--data", str(weights))
    assert line.endswith(f"found the file {weights}; give a folder that `handgrad prepare` has made\n"), "it is no text"
    assert refused(capsys, 65, "evaluate", run, "--data", run).endswith(
        f"it is a run, whose data {run}/config.toml names\n"
    )
    line = refused(capsys, 65, "plan", "--config", run)
    assert line.endswith(f"config file {run} cannot be read: Is a directory; a run's is RUN/config.toml\n")
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "find_local", forbidden)
        line = refused(capsys, 74, "prepare", str(tmp_path), "--out", str(tmp_path / "out"))
    assert line == f"handgrad: reading {tmp_path} failed: Permission denied; check its permissions\n", "not writing out"
    line = refused(capsys, 64, "watch", run, "--host", "no.such.host.invalid")
    assert line.endswith("; name another --host, or none for this machine alone\n")


def test_a_value_that_begins_like_a_flag(capsys: pytest.CaptureFixture) -> None:
    line = refused(capsys, 64, "sample", "run", "--stop", "-x")
    assert line.startswith("handgrad: --stop needs a value, found none: ")
    assert line.endswith("; one that begins with - stands behind an =, as --stop=VALUE\n")
    line = refused(capsys, 64, "diff", "a", "--", "b", "--tensors", "3")
    assert line == "handgrad: -- ends the flags, and '3' came after it; leave it out\n"
