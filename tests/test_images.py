"""Pictures from files to a model and back: shards, training, losses apart, sheets of samples, export, bad input."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import handgrad
from handgrad.cli import main
from handgrad.commands import demo
from handgrad.data import pieces, sprites
from handgrad.data.codes import FIRST_CODE, GREYS, Codes, codes_tokenizer, parts_of, text_of
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import Dataset, open_dataset
from handgrad.evaluation.loss import floor_of
from handgrad.generation.generate import END_OF_TEXT, Continuation, SamplingOptions, document
from handgrad.generation.pictures import decoder_of
from handgrad.memory.rows import named
from handgrad.models import gpt2
from handgrad.ops import reference
from handgrad.reports.page import write_report
from handgrad.run import autosize
from handgrad.run.open import train
from handgrad.settings.config import ModelShape
from tests.conftest import make_model, small_run
from tests.test_sampling import make_buffers

ROOT = Path(__file__).parents[1]
SIDE, RED, BLUE, GREEN = 6, (200, 0, 0), (0, 0, 200), (0, 150, 0)


def draw(path: Path, number: int, ink: tuple[int, int, int]) -> None:
    pixels = np.full((SIDE, SIDE, 3), GREEN, np.uint8)
    pixels[number % 3 : number % 3 + 3, 1:5] = ink
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures of three colours in two classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(30):
        draw(folder / "cat" / f"{number:02}.png", number, RED)
        draw(folder / "dog" / f"{number:02}.png", number, BLUE)
    return folder


@pytest.fixture(scope="module")
def shards(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("pictured") / "shards"
    return handgrad.prepare(pictures, out, codes="palette:3", size=str(SIDE), validation_fraction=0.2)


@pytest.fixture(scope="module")
def run(shards: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_run(shards.folder, tmp_path_factory.mktemp("pictured") / "run")
    sizes = {"sequence_length": SIDE * SIDE + 1, "tokens_per_step": 8 * (SIDE * SIDE + 1), "steps": 150}
    train(replace(config, **sizes, learning_rate=1e-2, eval_every=150, save_every=150, sample_every=75))
    return Path(config.out)


def documents(dataset: Dataset, split: str) -> list[np.ndarray]:
    (shard,) = dataset.splits[split]
    return np.split(shard.tokens, shard.document_starts[1:])


def test_shards_hold_each_picture_and_its_class(shards: Dataset, pictures: Path) -> None:
    codes = shards.codes
    assert codes is not None and codes.classes == ("cat", "dog") and {*codes.colours} == {RED, BLUE, GREEN}
    every = [*documents(shards, "train"), *documents(shards, "validation")]
    texts = {shards.tokenizer.decode(one[1:]) for one in every}
    assert len(every) == 60 and all(len(one) == 2 + SIDE * SIDE for one in every)
    for path in pictures.rglob("*.png"):
        pixels = np.array(Image.open(path))
        picked = [np.flatnonzero((np.array(codes.colours) == pixel).all(1))[0] for pixel in pixels.reshape(-1, 3)]
        ids = [*shards.tokenizer.encode(f"<{path.parent.name}>"), *picked]
        assert shards.tokenizer.decode(ids) in texts


def test_other_kinds_of_pictures_are_counted(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Not text beside them, as labels and captions are."""
    shutil.copytree(pictures, tmp_path / "in")
    for name in ("a.gif", "b.GIF", "c.bmp", "captions.txt"):
        (tmp_path / "in" / name).touch()
    words = ["--codes", "palette:3", "--size", "6", "--out", str(tmp_path / "out")]
    assert main(["prepare", "--images", str(tmp_path / "in"), *words]) == 0
    assert "left out   3 files of other kinds: 2 .gif, 1 .bmp\n" in capsys.readouterr().out


def test_pictures_with_a_class_share_a_micro_batch(shards: Dataset) -> None:
    """Seven would fit into a step, of which a micro-batch of two or more divides no number."""
    size = autosize.Size(0, 1, 1, 8, 1024, 7 * (SIDE * SIDE + 1), 8, 1e-3, 1)
    config = autosize.fitted(size, shards, {})
    assert config.micro_batch == 4 and config.tokens_per_step == 4 * (SIDE * SIDE + 1)
    config = autosize.fitted(size, shards, {"tokens_per_step": 32})
    assert config.sequence_length == SIDE * SIDE + 1, "a shorter row would cut pictures; the run is refused"


def test_several_processes_write_the_same_shards(
    pictures: Path, shards: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"codes": "palette:3", "size": "6x6", "validation_fraction": 0.2}
    other = prepare(PrepareOptions(str(pictures), tmp_path / "other", workers=2, **sizes)).dataset
    assert other.identity == shards.identity
    monkeypatch.setattr(pieces, "PICTURES_PER_UNIT", 7)
    small = prepare(PrepareOptions(str(pictures), tmp_path / "small", workers=1, **sizes)).dataset
    assert small.identity == shards.identity, "in units of any size"


def test_a_row_is_a_picture(run: Path, tmp_path: Path) -> None:
    log = (run / "log.txt").read_text()
    assert "packing    whole" in log and "0.0% of the rows is padding" in log
    assert re.search(r"step 150, the model writes: <(cat|dog)>\[6 x 6 picture\]", log)
    sheet = Image.open(run / "samples" / "step_00000150.png")
    assert sheet.size == (132, 132), "22 times as large"
    page = write_report([run], tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2


def test_losses_apart_add_to_the_whole(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", str(run)]) == 0
    told = capsys.readouterr().out
    tokens, whole, pixel, bits, other = (
        float(re.search(pattern, told)[1])  # type: ignore[index]
        for pattern in (
            r"validation tokens (\d+) of",
            r"loss +([\d.]+) nats per token",
            r"pixels +([\d.]+) nats per pixel",
            r"([\d.]+) bits per dimension",
            r"classes +([\d.]+) nats per token",
        )
    )
    (recorded,) = re.findall(r"step 150: validation loss ([\d.]+)", (run / "log.txt").read_text())
    assert tokens == 12 * 37 and whole == float(recorded) == pytest.approx((36 * pixel + other) / 37, abs=2e-4)
    assert bits == pytest.approx(pixel / math.log(2) / 3, abs=1e-4)
    assert other > 0.5 > 3 * pixel, "a class is a coin, a picture nearly known"


@pytest.fixture
def sample(run: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> Callable[..., tuple[list[str], np.ndarray]]:
    def sampled(*arguments: str) -> tuple[list[str], np.ndarray]:
        path = tmp_path / "sheet.png"
        assert main(["sample", str(run), "--image-out", str(path), "--temperature", "0", *arguments]) == 0
        return capsys.readouterr().out.splitlines(), np.array(Image.open(path))

    return sampled


@pytest.mark.parametrize(("name", "ink"), [("cat", RED), ("1", BLUE)])
def test_a_picture_of_a_class(sample: Callable[..., tuple[list[str], np.ndarray]], name: str, ink: tuple) -> None:
    lines, sheet = sample("--class", name, "--samples", "4")
    assert [line.split()[:2] for line in lines[:4]] == [
        [str(n), "<cat>" if name == "cat" else "<dog>"] for n in (1, 2, 3, 4)
    ]
    colours = {tuple(pixel) for pixel in sheet.reshape(-1, 3)}
    assert colours == {GREEN, ink, (255, 255, 255)}, "the gaps are white"


def test_a_picture_is_continued_from_its_upper_rows(
    sample: Callable[..., tuple[list[str], np.ndarray]], tmp_path: Path
) -> None:
    """Rows that the model would never draw stay; the default is half."""
    odd = np.array([[RED, BLUE] * 3, [BLUE, RED] * 3] * 3, np.uint8)
    Image.fromarray(odd).save(tmp_path / "odd.png")
    for rows, more in ((4, ("--rows", "4")), (3, ())):
        _, sheet = sample("--class", "dog", "--image-in", str(tmp_path / "odd.png"), *more)
        drawn = sheet[::22, ::22]
        assert np.array_equal(drawn[:rows], odd[:rows]) and not np.array_equal(drawn[rows], odd[rows])


def test_without_a_file_a_line_tells_of_each_picture(run: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert main(["sample", str(run), "--temperature", "0", "--prompt", "<dog>", "--samples", "2"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == ["  1  <dog>", "  2  <dog>"], "no characters of codes"
    assert "pictures   not drawn, as this is no terminal; --image-out FILE.png writes them" in told.err


def test_an_exported_model_draws_in_transformers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(run), "--out", str(out)]) == 0
    loss = [line for line in evaluated(str(run), capsys) if line.startswith("loss")]
    data = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["data"]["folder"]
    assert [line for line in evaluated(str(out), capsys, "--data", data) if line.startswith("loss")] == loss
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    here = {'folder = "."': f"folder = {str(out)!r}", "picture.png": str(tmp_path / "picture.png")}
    for old, new in here.items():
        code = code.replace(old, new)
    exec(code, {})  # the card's own code
    assert Image.open(tmp_path / "picture.png").size == (SIDE, SIDE)
    for form in ("gguf", "llmc"):
        assert main(["export", str(run), "--to", form, "--out", str(tmp_path / form)]) != 0
        assert "pictures" in capsys.readouterr().err


def evaluated(model: str, capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["evaluate", model, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_sprites_have_a_floor(tmp_path: Path) -> None:
    dataset = handgrad.prepare("sprites", tmp_path / "shards", documents=300, validation_fraction=0.1)
    assert dataset.codes is not None and dataset.codes.captions
    nats, targets, first = 0.0, 0, 0
    for one in documents(dataset, "validation"):
        parts = [*parts_of(dataset.tokenizer.decode(one[1:]), dataset.codes)]
        (picture,) = (part for part in parts if not isinstance(part, str))
        (caption,) = (part.strip() for part in parts if isinstance(part, str))
        assert sprites.read(picture) == caption
        first += not isinstance(parts[0], str)
        nats += math.log(2) + spans()[caption, picture.tobytes()]
        targets += len(one) - 1
    assert 5 < first < 25, "of thirty, half begin with the picture"
    assert floor_of(dataset, "whole") == pytest.approx(nats / targets, rel=1e-9)


def spans() -> dict[tuple[str, bytes], float]:
    drawn = (sprites.sprite(0, number) for number in range(300))
    return {(one.caption, one.codes.astype(np.int64).tobytes()): one.nats for one in drawn}


def test_the_demo_counts_right_drawings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "DOCUMENTS", {"sprites": 200})
    monkeypatch.setattr(demo, "DRAWN", 2)
    assert main(["demo", "--images", "--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert "drawings   0 of 2 show what their captions say" in told
    assert re.search(r"validation loss [\d.]+ \(\+[\d.]+% above the source's entropy of 0.04", told)
    right = [f"{sprites.sprite(1, number).caption}\n" for number in range(2)]
    drawn = [text_of(sprites.sprite(1, number).codes) for number in range(2)]
    monkeypatch.setattr(handgrad.Model, "generate", lambda *_, **__: [drawn[0], drawn[0]])
    assert demo.pictures_right("runs/sprites") == 1, right


def test_the_chapters_code() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/images.md").read_text(), re.DOTALL)
    exec(code, {})


def test_captions_join_pictures(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A model with captions draws what a caption says, and describes what it sees."""
    rows = [
        {"image": str(path.relative_to(pictures)), "caption": "a red bar" if path.parent.name == "cat" else "a blue bar"}
        for path in pictures.rglob("*.png")
    ]
    joined = tmp_path / "captions.jsonl"
    joined.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = handgrad.prepare(pictures, tmp_path / "shards", codes="palette:3", size="6", join=joined)
    config = small_run(shards.folder, tmp_path / "run")
    sizes = {"sequence_length": 47, "tokens_per_step": 8 * 47, "steps": 250, "eval_every": 0, "sample_tokens": 0}
    train(replace(config, **sizes, learning_rate=1e-2, save_every=250))
    sheet = tmp_path / "sheet.png"
    command = ["sample", config.out, "--temperature", "0", "--image-out", str(sheet)]
    assert main([*command, "--prompt", "a blue bar"]) == 0
    assert {tuple(pixel) for pixel in np.array(Image.open(sheet)).reshape(-1, 3)} == {GREEN, BLUE}
    capsys.readouterr()
    assert main([*command, "--image-in", str(pictures / "cat" / "01.png")]) == 0
    assert capsys.readouterr().out.startswith("  1  a red bar\n")


CAPTIONED = "(b*n)?C{12}[bn]*E?|b+|b{187,}nC+"
FORMS = {  # C: a code, K: a class, b: a byte, n: a line's end, E: the end; a document begun with nothing, and with anything
    "alone": ({}, "C{12}E", "C{12}E"),
    "of a class": ({"classes": ("cat", "dog")}, "KC{12}E", "K?C{12}E"),
    "with a caption": ({"captions": True}, CAPTIONED, CAPTIONED),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_knows_nothing_finishes_each_picture(form: str) -> None:
    """All tokens are about equally likely to it. A document has its form wherever it begins, and the same tokens alone
    as in a batch, whose texts are in other states. Only captions may be longer than the text."""
    more, whole, continued = FORMS[form]
    codes = Codes(3, 4, GREYS[:20], **more)
    tokenizer = codes_tokenizer(codes)
    letters = "C" * 20 + "K" * len(codes.classes) + "".join("bn"[byte == 10] for byte in range(256)) * codes.captions
    model = make_model(ModelShape(tokenizer.vocab_size, 256, 1, 1, 16), 1, 256)
    weights = named(gpt2.Weights, {row.name: row.view(model.flat).float() for row in model.table}, 1)
    starts = ["", chr(FIRST_CODE + 7), text_of(np.arange(11))]
    starts += ["<dog>", f"<dog>{text_of(np.arange(5))}"] * bool(codes.classes) + ["red\n", "re", "\n"] * codes.captions
    prompts = [document(tokenizer, text) for text in starts * 5]

    def written(prompts: list[list[int]], batch: int, temperature: float) -> list[str]:
        options = SamplingOptions(temperature, repetition_penalty=1.1)
        buf = make_buffers(model.shape, batch, torch.float32, prefill_tokens=256)
        about = model.shape, reference, weights, buf, options
        decoder = decoder_of(tokenizer, *about, end_of_text=tokenizer.end_of_text)
        texts = [Continuation(prompt, 200, seed) for seed, prompt in enumerate(prompts)]
        for _ in decoder.generate(texts):
            pass
        letters_of = ["".join(letters[token] for token in [*text.prompt[1:], *text.tokens]) for text in texts]
        return [more + "E" * (text.stopped == END_OF_TEXT) for more, text in zip(letters_of, texts, strict=True)]

    found = written(prompts, 4, 1.5)
    assert not [text for text in found if not re.fullmatch(continued, text)]
    assert all(re.fullmatch(whole, text) for text in found[:: len(starts)]), found
    assert len({text for text in found if "C" in text}) > 2 * bool(codes.captions)
    assert all(re.fullmatch(continued, text) for text in written(prompts[: len(starts)], 3, 0))
    assert written(prompts[:4], 1, 1.5) == found[:4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prepare"], "SOURCE is missing; for example `handgrad prepare stories"),
        (["prepare", "a", "--images", "b"], "expected one source, found a and --images b; leave one out"),
        (["prepare", "--images", "{}", "--codes", "palette"], "expected --codes palette:COLOURS"),
        (["prepare", "--images", "{}", "--size", "0"], "expected --size ROWSxCOLUMNS or one number, 1 to 1024, found '0'"),
        (["prepare", "--images", "{}", "--codes", "palette:4", "--size", "6"], "expected at least 4 colours"),
        (["prepare", "--images", "{}", "--size", "8", "--codes", "palette:3", "--strict"], "6 x 6"),
        (["prepare", "--images", "{}", "--chat"], "--chat is for text, found it with pictures; leave it out"),
        (["prepare", "--images", "{}", "--tokenizer", "gpt2"], "--tokenizer is for text, found it with pictures"),
        (["prepare", "stories", "--join", "a.jsonl"], "--join is for files of pictures, found it without --codes"),
        (["prepare", "sprites", "--size", "8"], "--size is for files of pictures, found it without --codes"),
        (["prepare", "sprites", "--codes", "palette:3"], "--codes is for files of pictures, found it with sprites"),
        (["sample", "RUN", "--class", "bird", "--image-out", "x.png"], "expected a class of the model, found 'bird'"),
        (
            ["prepare", "--images", "{}", "--join", "no.jsonl"],
            "expected a file of captions, found no no.jsonl; check --join",
        ),
        (["sample", "RUN", "--image-out", "x.jpg"], "--image-out writes PNG, found x.jpg; name a FILE.png"),
        (["sample", "RUN", "--stop", "a"], "--stop and --max-tokens end a text, found one with a model of pictures"),
        (["sample", "RUN", "--max-tokens", "200"], "found one with a model of pictures; leave it out"),
        (["sample", "RUN", "--rows", "3"], "--rows goes with --image-in, found it without"),
        (["sample", "RUN", "--image-in", "none.png"], "none.png"),
        (["sample", "RUN", "--prompt", "hello", "--image-out", "x.png"], "expected classes and codes alone"),
        (["sample", "RUN", "--image-out", "no/folder.png"], "--image-out no/folder.png: there is no folder"),
    ],
)
def test_one_line_for_every_mistake(
    arguments: list[str], told: str, pictures: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert told in refused([part.replace("{}", str(pictures)).replace("RUN", str(run)) for part in arguments], capsys)
    assert not (tmp_path / "shards").exists()


def test_shards_of_another_palette_are_refused(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = handgrad.prepare(pictures, tmp_path / "other", codes="palette:2", size="6")
    assert open_dataset(other.folder).codes != open_dataset(json.loads(first_line(run))["data"]["folder"]).codes
    assert "was made with another tokenizer (palette)" in refused(
        ["evaluate", str(run), "--data", str(other.folder)], capsys
    )


def refused(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main(arguments) != 0
    line = capsys.readouterr().err
    assert line.startswith("handgrad: ") and line.count("\n") == 1, line
    return line


def first_line(run: Path) -> str:
    return (run / "metrics.jsonl").read_text().splitlines()[0]
