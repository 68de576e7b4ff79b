"""Pictures as an autoencoder's codes: bytes, the autoencoder, shards of its codes, a model of them, samples, bad input."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import handgrad
from handgrad.cli import main
from handgrad.data.codes import GREY, MISSING, codes_of, codes_tokenizer, text_of
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer import TOKENIZER_FILE
from handgrad.errors import DataError
from handgrad.evaluation.codec import open_codec, view_of
from handgrad.evaluation.loss import open_held_out
from handgrad.generation.pictures import picture_prompt
from handgrad.interop.sources import open_weights
from handgrad.reports.page import write_report
from handgrad.run import autosize
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import check
from tests.conftest import small_run
from tests.pictures import discs

SIDE, CODED = 8, 4  # rows and columns of a picture, and codes of it


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 pictures in two classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, pixels in enumerate(discs(96, SIDE, SIDE)):
        path = folder / ("round", "disc")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def coded(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an autoencoder's run `vq`, its data `bytes`, and `codes`, the same pictures in its codes."""
    folder = tmp_path_factory.mktemp("coded")
    sizes = {"size": SIDE, "validation_fraction": 0.2}
    handgrad.prepare(pictures, folder / "bytes", codes="rgb", **sizes)
    settings = {"data": str(folder / "bytes"), "out": str(folder / "vq"), "channels": 16, "steps": 20, "device": "cpu"}
    settings |= {"tokens_per_step": 3072, "micro_batch": 8}
    train(run_config("", "", "", settings | {"sample_every": 20, "eval_every": 20}))
    handgrad.prepare(pictures, folder / "codes", codes=str(folder / "vq"), **sizes)
    return folder


@pytest.fixture(scope="module")
def run(coded: Path) -> Path:
    """A model of the codes."""
    config = small_run(coded / "codes", coded / "run")
    length = CODED + 1
    sizes = {"sequence_length": length, "tokens_per_step": 8 * length, "steps": 10, "sample_every": 10}
    train(replace(config, **sizes, eval_every=10, save_every=10))
    return coded / "run"


def test_bytes_are_the_pictures(coded: Path, pictures: Path) -> None:
    dataset = open_dataset(coded / "bytes")
    codes = dataset.codes
    assert codes is not None and codes.size == (SIDE, SIDE)
    every = [part for split in dataset.splits for shard in dataset.splits[split] for part in rows(shard, 3 * SIDE * SIDE)]
    files = {np.array(Image.open(path)).tobytes() for path in pictures.rglob("*.png")}
    assert {codes.pixels(one.reshape(SIDE, 3 * SIDE)).tobytes() for one in every} == files


def rows(shard, length: int) -> np.ndarray:
    """The pictures of a shard without end-of-text, and without a class if it has one."""
    return np.stack(np.split(shard.tokens, shard.document_starts[1:]))[:, -length:]


def test_further_pictures_take_a_models_vocabulary(
    coded: Path, run: Path, pictures: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """Its codes, and all of its classes though they have pictures of one alone; so it can be evaluated on them."""
    out = tmp_path / "further"
    shutil.copytree(pictures / "disc", tmp_path / "one" / "disc")
    assert main(["prepare", "--images", str(tmp_path / "one"), "--codes", str(run), "--out", str(out)]) == 0
    further, whole = open_dataset(out), open_dataset(coded / "codes")
    assert further.tokenizer.sha256 == whole.tokenizer.sha256
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", str(out)]) == 0 and "nats per code" in capsys.readouterr().out
    assert (
        main(["prepare", "--images", str(pictures), "--codes", "palette:8", "--size", "8", "--out", str(tmp_path / "p")])
        == 0
    )
    assert main(["evaluate", str(run), "--data", str(tmp_path / "p")]) == 65
    assert f"prepare it with the model's: --codes {run}" in capsys.readouterr().err


def test_a_setting_of_the_autoencoder_keeps_the_rest(coded: Path) -> None:
    """The size of the pictures beside `--vqvae`, and the network beside `--num-layers`."""
    given = {"data": str(coded / "bytes"), "out": str(coded / "new"), "device": "cpu"}
    config = run_config("", "", "", given | {"vqvae": "codebook=64"})
    assert (config.vqvae, config.sequence_length) == ("size=8x8,codebook=64", 3 * SIDE * SIDE)
    config = run_config("", "", "", given | {"num_layers": 1})
    assert (config.architecture, config.num_layers, config.vqvae) == ("vqvae", 1, "size=8x8")
    assert run_config("", "", "", given | {"num_layers": 1, "architecture": "gpt2"}).architecture == "gpt2"
    for lanes in (1, 4, 64):
        config = check(run_config("", "", "", given | {"lanes": lanes}))
        assert (
            config.architecture == "vqvae" and config.micro_batch * lanes * config.sequence_length <= config.tokens_per_step
        )
    config = check(run_config("", "", "", given | {"architecture": "gpt2"}))
    assert (config.vqvae, config.sequence_length, config.num_layers) == ("", 3 * SIDE * SIDE, 4), "a picture's bytes a row"


def test_finetuning_takes_whole_pictures(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also above the limit of a device's rows of text."""
    monkeypatch.setattr(autosize, "CPU_LIMITS", (64, 128, 8))
    given = {"data": str(coded / "bytes"), "init_from": str(coded / "vq"), "out": str(coded / "tuned"), "device": "cpu"}
    config = run_config("", "", "", given)
    assert config.sequence_length == 3 * SIDE * SIDE and config.tokens_per_step % config.sequence_length == 0


def test_its_plan_shows_what_it_can_do(coded: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "--data", str(coded / "bytes"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "recompute 0" in out and "recompute 1" not in out and "H100" not in out
    assert main(["profile", "--data", str(coded / "bytes"), "--device", "cpu"]) == 64
    assert "profile knows the kernels of text, found vqvae" in capsys.readouterr().err


def test_an_autoencoder_suits_bytes(coded: Path) -> None:
    """Without a preset, and at the size of the pictures."""
    config = open_weights(str(coded / "vq")).config
    assert (config.architecture, config.vqvae, config.sequence_length) == ("vqvae", "size=8x8", 3 * SIDE * SIDE)


def test_it_samples_reconstructions(coded: Path) -> None:
    sheet = np.array(Image.open(coded / "vq" / "samples" / "step_00000020.png"))
    assert sheet.shape[0] > 3 * 2 * SIDE
    page = write_report([coded / "vq"], coded / "report.html").read_text()
    assert "PSNR" in page and "squared error per byte" in page and "erplexity" not in page


def test_codes_are_the_autoencoders(coded: Path) -> None:
    """Shards of codes decode as the run decodes them, by the weights in their vocabulary alone."""
    codec, dataset = open_codec(open_weights(str(coded / "vq"))), open_dataset(coded / "codes")
    codes = dataset.codes
    assert codes is not None and (codes.rows, codes.columns, codes.classes) == (2, 2, ("disc", "round"))
    kept = view_of(codes)
    (train_shard,), (byte_shard,) = dataset.splits["train"], open_dataset(coded / "bytes").splits["train"]
    of_bytes = rows(byte_shard, 3 * SIDE * SIDE).reshape(-1, SIDE, SIDE, 3).astype(np.uint8)
    of_codes = rows(train_shard, CODED).reshape(-1, 2, 2)
    assert np.array_equal(codec.encode(of_bytes), of_codes) and np.array_equal(kept.encode(of_bytes), of_codes)
    drawn = codec.decode(of_codes[:3].astype(np.int64))
    assert all(
        np.array_equal(kept.paint(one.astype(np.int64)), picture) for one, picture in zip(of_codes, drawn, strict=False)
    )


def test_missing_codes_are_grey(coded: Path) -> None:
    view = view_of(codes_of(open_dataset(coded / "codes").tokenizer))
    picture = view.paint(np.array([[1, 2], [3, MISSING]]))
    assert (picture[4:, 4:] == GREY).all() and not (picture[:4] == GREY).all()


def test_a_model_of_codes_draws(run: Path, pictures: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    assert main(["sample", str(run), "--class", "disc", "--samples", "4", "--image-out", str(sheet)]) == 0
    assert Image.open(sheet).size == (144, 144)  # two by two pictures of 8 pixels, two between them, eight times as large
    whole, codes = str(pictures / "disc" / "01.png"), codes_of(open_dataset(run.parent / "codes").tokenizer)
    assert codes is not None
    view = view_of(codes)
    upper = view.encode(np.array(Image.open(whole))[None])[0, :1]
    assert picture_prompt(codes, view, "", "disc", whole, None) == f"<disc>{text_of(upper)}"
    assert main(["sample", str(run), "--image-in", whole, "--class", "disc", "--image-out", str(sheet)]) == 0
    assert Image.open(sheet).size == (128, 128)
    capsys.readouterr()
    assert main(["sample", str(run), "--image-in", whole, "--rows", "2"]) == 64
    assert "expected --rows from 0 to 1, found 2" in capsys.readouterr().err
    assert main(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    assert "nats per code" in out and "bits per dimension" not in out


def test_an_autoencoder_is_evaluated(coded: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", str(coded / "vq")]) == 0
    out = capsys.readouterr().out
    assert "PSNR" in out and "of 1000 in use" in out


def test_other_codes_are_refused(
    coded: Path, run: Path, pictures: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """One line for each mistake."""
    out = str(tmp_path / "out")
    for arguments, told in (
        (["--codes", str(coded / "vq" / "nowhere")], "expected --codes palette:COLOURS with 2 to 32768, rgb, or a run of"),
        (["--codes", str(run), "--size", "16"], "--size must be 8x8, of the pictures that"),
        (["--codes", str(coded / "vq"), "--size", "16"], "--size must be 8x8, of the pictures that"),
        (["--codes", "rgb", "--join", "captions.jsonl"], "--codes rgb is for an autoencoder, which reads pictures alone"),
        (["--codes", "vq"], "expected --codes palette:COLOURS with 2 to 32768, rgb, or a run of a vqvae, found 'vq'"),
    ):
        assert main(["prepare", "--images", str(pictures), *arguments, "--out", out]) != 0
        error = capsys.readouterr().err
        assert told in error and len(error.splitlines()) == 1
    assert main(["train", "--architecture", "vqvae", "--data", str(coded / "codes"), "--out", out]) == 65
    assert "codes was prepared as codes; prepare them with --codes rgb" in capsys.readouterr().err
    other = replace(open_weights(str(coded / "vq")).config, out=str(tmp_path / "vq"), seed=7, steps=1)
    train(other)
    handgrad.prepare(pictures, tmp_path / "codes", codes=other.out, size=SIDE, validation_fraction=0.2)
    with pytest.raises(DataError, match="was made with another tokenizer"):
        open_held_out(str(tmp_path / "codes"), open_weights(str(run)).tokenizer, str(run), chat=False)


@pytest.mark.parametrize("damage", ["", "[]", "[{}, 1]", "[1", "short"])
def test_damaged_weights_in_a_vocabulary_are_refused(coded: Path, damage: str) -> None:
    codes = codes_of(open_dataset(coded / "codes").tokenizer)
    assert codes is not None
    decoder = (
        codes.decoder[:-100] + '"]' if damage == "short" else damage or codes.decoder.replace("size=8x8", "size=16x16")
    )
    with pytest.raises(DataError, match="expected an autoencoder's weights in the vocabulary"):
        view_of(replace(codes, decoder=decoder))
    for other in (replace(codes, rows=1, columns=4), replace(codes, colours=codes.colours[:-1])):  # not the autoencoder's
        with pytest.raises(DataError, match="expected an autoencoder's weights in the vocabulary"):
            view_of(other)


def test_a_palettes_identity_stays(coded: Path) -> None:
    """The field of an autoencoder is not in a palette's file, whose hash older shards have."""
    codes = codes_of(open_dataset(coded / "codes").tokenizer)
    assert codes is not None and (coded / "codes" / TOKENIZER_FILE).is_file()
    assert b"decoder" not in codes_tokenizer(replace(codes, decoder="")).json_bytes
