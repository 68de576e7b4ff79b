"""A tokenizer as a GGUF file keeps it: tokens, their types, merges, the splitter's name, special ids, the chat template."""

import json
import tempfile
from pathlib import Path
from typing import Any

from handgrad.data.chat_template import CHAT_TEMPLATE_FILE
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from handgrad.data.vocabulary import characters, vocabulary_files
from handgrad.errors import UsageError
from handgrad.parsing import parse_json

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splitters that llama.cpp has, by name: expressions of a `Split`.
PATTERNS = {
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST: "qwen2",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST: "llama-bpe",
}
# llama.cpp wants merges of every vocabulary. This one leads to no token, which it takes for none.
NO_MERGES = ("~ ~",)


def add_tokenizer(writer: Any, tokenizer: Tokenizer, template: str = "") -> None:
    """Adds the tokenizer to the metadata of a `gguf.GGUFWriter`, with a chat `template` if its files lack one; `UsageError`
    for a splitter that llama.cpp lacks."""
    import gguf

    files = vocabulary_files(tokenizer, 0) | ({CHAT_TEMPLATE_FILE: template.encode()} if template else {})
    tables: Any = parse_json(files[TOKENIZER_FILE])
    tokens, types = token_list(tokenizer, tables)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        ids = {"eos_token_id": tokenizer.end_of_text}
        (Path(folder) / "config.json").write_text(json.dumps(ids))  # where tokenizer_config.json names none
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    special.merges = special.merges or list(NO_MERGES)
    if tokenizer.kind != "model":  # documents of ours begin with end-of-text
        special.add_special_token["bos"] = True
    elif tokenizer.begins:
        special.special_token_ids["bos"], special.add_special_token["bos"] = tokenizer.begins[0], True
    else:  # llama.cpp's own choice depends on the splitter's name
        special.add_special_token.setdefault("bos", False)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(splitter(tables))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.add_to_gguf(writer, quiet=True)


def token_list(tokenizer: Tokenizer, tables: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens by id, in the byte-level alphabet or, if they are special, as they are; and their types."""
    from gguf import TokenType

    added = {token["id"]: token for token in tables["added_tokens"]}
    tokens, types = list[str](), list[int]()
    for number, content in enumerate(tokenizer.token_bytes):
        if number in added:
            text, kind = added[number]["content"], TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        elif content:
            text, kind = characters(content), TokenType.NORMAL
        else:  # a row of the vocabulary without a token
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        tokens.append(text)
        types.append(kind)
    return tokens, types


def splitter(tables: dict[str, Any]) -> str:
    """llama.cpp's name of the splitter in a `tokenizer.json`; `UsageError` for another."""
    pre: dict[str, Any] = tables["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    last, others = steps[-1], steps[:-1]
    name: str | None = None
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        splits = last.get("use_regex", True)
        if not others:
            name = "gpt-2"  # also of plain bytes, which without merges may be split anywhere
        elif splits and others == [{"type": "Digits", "individual_digits": True}]:
            name = "smollm"
        elif not splits and len(others) == 1 and others[0].get("behavior") == "Isolated":
            name = PATTERNS.get(str((others[0].get("pattern") or {}).get("Regex")))
    if not name:
        raise UsageError(
            "expected a splitter that llama.cpp has (GPT-2's, SmolLM's, Llama 3's, Qwen's) in the model's tokenizer.json,"
            f" found {json.dumps(pre):.120}; `export --to hf` and llama.cpp's own converter may know it"
        )
    return name
