"""A name that is no tokenizer here gets the answer that helps: the right name, or the reason and the way."""

from pathlib import Path

import pytest

from handgrad.data.tokenizer_loading import ANSWERS, load_tokenizer
from handgrad.errors import UsageError
from tests.test_commands import refused

ONE = "trains one on your text"
ANSWERED = {
    "; did you mean gpt2?": ["gpt-2", "GPT2", "gpt2_small", "r50k_base", "openai-community/gpt2"],
    "; did you mean bytes?": ["byte", "UTF-8", "byte_level", "Bytes"],
    "; bytes is the nearest, a token for each byte; handgrad has none of characters": ["char", "Character", "char-level"],
    "; a trained one has its size in its name, as bpe:4096": ["bpe", "BPE", "byte-level-bpe"],
    "; did you mean bpe:8192?": ["8192", "8k", "bpe-8192", "bpe8192", "bpe=8k", "BPE:8192"],
    f"; of OpenAI's vocabularies handgrad has gpt2 alone; bpe:4096 {ONE}": [
        "cl100k",
        "cl100k_base",
        "o200k_base",
        "gpt-4o",
    ],
    f"no SentencePiece or WordPiece; bpe:4096 {ONE}": ["sentencepiece", "llama2", "llama-2-7b", "mistral-7b", "bert"],
    "as by `handgrad import HuggingFaceTB/SmolLM2-135M --out runs/SmolLM2-135M`, then --tokenizer runs/SmolLM2-135M": [
        *("smollm2", "SmolLM2-360M", "HuggingFaceTB/SmolLM2-135M")
    ],
    "as by `handgrad import meta-llama/Llama-3.2-1B ": ["llama3", "Llama-3.2-3B", "llama"],
    "as by `handgrad import Qwen/Qwen3-0.6B ": ["qwen", "Qwen2.5"],
    "; leave --tokenizer out": ["none", "default"],
    "no such file or folder; a model of the Hub comes by `handgrad import Org/Name --out runs/Name`, then": ["Org/Name"],
}
NAMES = [(name, told) for told, names in ANSWERED.items() for name in names]


@pytest.mark.parametrize(("name", "told"), NAMES)
def test_a_name_is_answered(name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text.txt").write_text("a few words\n" * 50)
    line = refused(capsys, 64, "prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--tokenizer", name)
    assert f", found {name!r}" in line and told.removeprefix("as ") in line


@pytest.mark.parametrize("name", ["tok.json", "runs/none/tok", "data/tok.json", "./x", "zzz", "256", "99999", "bpe-70000"])
def test_a_name_that_says_too_little(name: str) -> None:
    with pytest.raises(UsageError, match=f"found '{name}', no such file or folder$"):
        load_tokenizer(name)


def test_each_name_has_one_answer() -> None:
    """In the letters in which names are compared."""
    names = [name for names in ANSWERS.values() for name in names.split()]
    assert len(names) == len(set(names)) and names == [name.lower().replace("_", "-") for name in names]
