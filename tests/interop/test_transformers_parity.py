"""transformers and handgrad write the same text: 200 tokens greedily, at odd sizes, after training, and with GPT-2's 124M
weights; their logits are within 1e-4."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from handgrad.cli import main
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer, read_tokenizer
from handgrad.settings.config import ModelShape
from handgrad.storage import checkpoint
from tests.interop.models import make_checkpoint, our_logits, their_logits

LENGTH = 200  # tokens of text
PROMPT = "the old river"


def our_text(run: Path, capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    options = ["--temperature", "0", "--max-tokens", str(LENGTH), "--device", "cpu"]
    assert main(["sample", str(run), "--prompt", PROMPT, *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def their_ids(model: "transformers.GPT2LMHeadModel", tokenizer: Tokenizer) -> list[int]:
    """Prompt and text, greedily, with transformers' own generation and cache."""
    inputs = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(PROMPT).tolist()]])
    options = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": tokenizer.end_of_text}
    return model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)[0].tolist()


def check_both_ways(run: Path, folder: Path, capsys: pytest.CaptureFixture, distinct: int) -> None:
    """Exported, opened, generated from; saved again by transformers, imported, and sampled."""
    assert main(["export", str(run), "--to", "hf", str(folder / "hf")]) == 0
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    found = checkpoint.find(str(run))
    tokenizer = read_tokenizer(found.folder, found.manifest["tokenizer"])
    ids = their_ids(model, tokenizer)
    start = 1 + len(tokenizer.encode(PROMPT))
    assert len(ids) == start + LENGTH and tokenizer.end_of_text not in ids[1:], "a text of the full length"
    assert len(set(ids[start:])) >= distinct, "a text worth comparing"
    error = (their_logits(model, ids) - our_logits(run, ids)).abs().max()
    assert error <= 1e-4, f"logits differ by {error:.3g}"
    text = tokenizer.decode(ids[1:])
    assert our_text(run, capsys) == text
    model.save_pretrained(folder / "saved")
    transformers.AutoTokenizer.from_pretrained(folder / "hf").save_pretrained(folder / "saved")
    assert main(["import", str(folder / "saved"), "--out", str(folder / "back")]) == 0
    assert our_text(folder / "back", capsys) == text


@pytest.mark.nightly  # test_the_same_200_tokens_after_training
@pytest.mark.parametrize(("kind", "sizes"), [("bpe", (3, 3, 33, 263)), ("gpt2", (2, 5, 35, 241))])
def test_the_same_200_tokens_at_odd_sizes(
    kind: str, sizes: tuple[int, int, int, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, _ = make_checkpoint(tmp_path / "run", kind, seed=4, sizes=sizes)
    check_both_ways(run, tmp_path, capsys, distinct=12)


def test_the_same_200_tokens_after_training(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Trained weights write a text with some sense, whose logits lie closer together than random ones."""
    sizes = ["--num-heads", "2", "--channels", "64", "--sequence-length", "256", "--tokens-per-step", "2048"]
    training = ["--steps", "60", "--learning-rate", "3e-3", "--micro-batch", "8", "--eval-every", "0", "--device", "cpu"]
    options = [*sizes, *training, "--sample-tokens", "0"]
    assert main(["train", "tiny", *options, "--data", str(shards), "--out", str(tmp_path / "run")]) == 0
    check_both_ways(tmp_path / "run", tmp_path, capsys, distinct=8)


@pytest.mark.nightly  # the same two directions as at small sizes
def test_gpt2_124m(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's own size with random weights: out, and back as the same bytes; the logits; and the text, which `sample`
    writes token by token from its cache. transformers sees it whole: if each token is what it finds likeliest after those
    before, it is the text that it would write."""
    try:
        run, shape = make_checkpoint(tmp_path / "run", "gpt2", sizes=(12, 12, 768, 1024), spread=0.05)
        assert shape == ModelShape(50257, 1024, 12, 12, 768)
        assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
        assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
        before, after = (checkpoint.find(str(folder)) for folder in (run, tmp_path / "back"))
        assert before.manifest["files"]["model.safetensors"] == after.manifest["files"]["model.safetensors"]
        shutil.rmtree(run)
        written: list[int] = []  # the tokens themselves: a text of random ones has others, too
        decode_bytes = Tokenizer.decode_bytes
        monkeypatch.setattr(Tokenizer, "decode_bytes", lambda self, ids: written.extend(ids) or decode_bytes(self, ids))
        text, tokenizer = our_text(tmp_path / "back", capsys), load_tokenizer("gpt2")
        monkeypatch.undo()
        assert text == PROMPT + tokenizer.decode(written) and len(written) == LENGTH
        ids = [tokenizer.end_of_text, *tokenizer.encode(PROMPT).tolist(), *written]
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
        found = their_logits(model, ids)
        error = (found - our_logits(tmp_path / "back", ids)).abs().max()
        assert error <= 1e-4, f"logits differ by {error:.3g}"
        assert found.argmax(-1)[-1 - LENGTH : -1].tolist() == written
        assert len(set(written)) >= 50, "a text worth comparing"
    finally:
        shutil.rmtree(tmp_path)  # gigabytes
