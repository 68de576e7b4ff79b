"""The names by which people ask `prepare --tokenizer` for a tokenizer that has another name here, or none."""

import re
import shlex
from pathlib import Path

GPT2, BYTES, SIZED = "did you mean gpt2?", "did you mean bytes?", "a trained one has its size in its name, as bpe:4096"
OPENAI = "of OpenAI's vocabularies handgrad has gpt2 alone; bpe:4096 trains one on your text"
PIECES = "handgrad has tokenizers of bytes alone, no SentencePiece or WordPiece; bpe:4096 trains one on your text"
# An answer, and the names that it answers.
ANSWERS = {
    GPT2: "gpt-2 gpt2-small gpt2-medium gpt2-large gpt2-xl gpt gpt3 gpt-3 r50k r50k-base tiktoken openai-community/gpt2",
    BYTES: "byte byte-level raw utf8 utf-8 ascii byt5",
    "bytes is the nearest, a token for each byte; handgrad has none of characters": "char chars char-level character"
    " characters character-level",
    SIZED: "bpe bbpe byte-bpe bytelevel-bpe byte-level-bpe hf tokenizers huggingface train trained custom new own",
    OPENAI: "p50k p50k-base cl100k cl100k-base o200k o200k-base o200k-harmony gpt3.5 gpt-3.5 gpt-3.5-turbo gpt4 gpt-4 gpt4o"
    " gpt-4o gpt5 gpt-5 gpt-oss",
    PIECES: "sentencepiece spm sp unigram wordpiece word words wordlevel whitespace bert bert-base-uncased",
    "leave --tokenizer out": "none default",
}
# Families whose tokenizer comes with a model's folder, by their first letters, and a model of each on the Hub.
FAMILIES = {"llama": "meta-llama/Llama-3.2-1B", "qwen": "Qwen/Qwen3-0.6B", "smollm": "HuggingFaceTB/SmolLM2-135M"}
WITH_PIECES = r"(llama-?2|tinyllama|mistral|mixtral|gemma|t5)[-\w.]*"  # models of which none has a tokenizer of bytes
SUFFIXES = (".json", ".model", ".bin", ".txt")  # of files
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"
LARGEST = 1 << 16


def answer(name: str) -> str:
    """The end of the message about a name that is no tokenizer's here, no file and no folder."""
    remedy = meant(name)
    if not remedy and re.fullmatch(HUB_NAME, name) and Path(name).suffix not in SUFFIXES:
        return f", no such file or folder; a model of the Hub comes by {imports(name)}"
    return f"; {remedy}" if remedy else ", no such file or folder"


def meant(name: str) -> str:
    """The remedy for one of the names above, or nothing."""
    plain = name.lower().replace("_", "-")
    for found, names in ANSWERS.items():
        if plain in names.split():
            return found
    if re.fullmatch(WITH_PIECES, plain):
        return PIECES
    if re.fullmatch(r"gpt2|bytes|auto|bpe:\d+", plain):
        return "" if plain == name else f"did you mean {plain}?"
    if (size := re.fullmatch(r"(?:bpe|bbpe)?[-=: ]?(\d{1,5})(k?)", plain)) and (words := words_of(*size.groups())):
        return f"did you mean bpe:{words}?"
    if model := next((model for family, model in FAMILIES.items() if re.fullmatch(rf"{family}[-\w.]*", plain)), ""):
        return f"it comes with a model, as by {imports(model)}"
    return ""


def words_of(digits: str, kilo: str) -> int:
    """The size in a name, which may count in kilo; 0 for one that no vocabulary here has."""
    words = int(digits) * (1024 if kilo else 1)
    return words if 257 <= words <= LARGEST else 0


def imports(model: str) -> str:
    """The command that fetches a model of the Hub, and the option that takes its tokenizer."""
    run = f"runs/{model.rpartition('/')[2]}"
    return f"`{shlex.join(['handgrad', 'import', model, '--out', run])}`, then --tokenizer {shlex.quote(run)}"
