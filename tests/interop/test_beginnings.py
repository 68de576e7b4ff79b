"""Tokens before a text and at its end, as the files of a model from elsewhere say them: those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers import dynamic_module_utils

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.chat_template import plain_segments, plain_template
from handgrad.data.model_tokenizer import model_tokenizer
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError
from tests.data.chats import CHATML, SPECIAL, made_tokenizer
from tests.interop.models import make_checkpoint
from tests.interop.test_gguf import words
from tests.interop.test_transformers_llama import V, byte_tokenizer, theirs

BEGIN, END, PROMPT = 258, 259, "the other"
LLAMA = {"sizes": (2, 2, 32, 256), "architecture": "llama", "llama": "kv_heads=1,tied"}


def tokenizer_that_begins(template: str) -> tokenizers.Tokenizer:
    made = byte_tokenizer()
    special = [("<|im_start|>", BEGIN), ("<|im_end|>", END)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts a token before every text, as Llama 3's."""
    made = tmp_path_factory.mktemp("begins") / "hf"
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=V, max_position_embeddings=128, initializer_range=0.2, **sizes)
    config.bos_token_id, config.eos_token_id = BEGIN, END
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    tokenizer_that_begins("<|im_start|> $A").save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return made


@pytest.mark.parametrize(
    "template, before",
    [
        ("$A", ()),
        ("<|im_start|> $A", (BEGIN,)),
        ("$A <|im_end|>", ()),
        ("<|im_end|> <|im_start|> $A <|im_end|>", (END, BEGIN)),
    ],
)
def test_tokens_before_a_text(template: str, before: tuple[int, ...]) -> None:
    content = tokenizer_that_begins(template).to_str().encode()
    assert model_tokenizer(content, {}, V, END, "the test").begins == before


def test_a_prompt_is_that_of_their_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Greedy text from the words, the tokens left to each program."""
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    inputs = library(PROMPT, return_tensors="pt")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    ours = load(str(tmp_path / "run"), device="cpu")
    assert ours.tokens(PROMPT) == inputs["input_ids"][0].tolist()
    options = {"do_sample": False, "max_new_tokens": 100, "pad_token_id": 0}
    written = theirs(folder).generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    written = written[0, inputs["input_ids"].shape[1] :].tolist()
    text = ours.generate(PROMPT, max_tokens=100, temperature=0)
    assert len(set(written)) > 10 and text == ours.tokenizer.decode(token for token in written if token != END)


def test_the_file_of_llama_cpp_says_it(folder: Path, tmp_path: Path) -> None:
    """Also where no other file names the token."""
    made = shutil.copytree(folder, tmp_path / "hf")
    (made / "tokenizer_config.json").write_text("{}")
    assert main(["import", str(made), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 0
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    for name, expected in (("add_bos_token", True), ("bos_token_id", BEGIN), ("eos_token_id", END)):
        assert fields[f"tokenizer.ggml.{name}"].contents() == expected


LLAMA3 = made_tokenizer(None, begins="<|begin|>")
# Tokenizers of ours with each network that takes them, and those that come with a Llama 3, a Qwen and a SmolLM.
EXPORTS = {
    **{kind: (kind, {}) for kind in ("gpt2", "bytes", "bpe")},
    "a Llama of ours": ("bpe", LLAMA),
    "modern": ("bytes", {"architecture": "modern", "sizes": (2, 2, 32, 96)}),
    "Llama 3's": (LLAMA3, LLAMA),
    "Qwen's": (made_tokenizer(CHATML), LLAMA),
    "SmolLM's": (words({"tokenizer_config.json": '{"eos_token": "<|im_end|>"}'}), LLAMA),
}


@pytest.mark.nightly(but=["bytes", "bpe", "a Llama of ours", "modern", "Llama 3's", "Qwen's", "SmolLM's"])
@pytest.mark.parametrize("kind", EXPORTS)
def test_a_prompt_of_an_export_is_ours(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `tokenizer(prompt)`, unless a model's own tokenizer puts nothing there; then by the code of the card. llama.cpp's
    file says the same, and a template that writes the token gets no second one."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    tokenizer, settings = EXPORTS[kind]
    run, _ = make_checkpoint(tmp_path / "run", tokenizer, **settings)
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    ours = load(str(run), device="cpu")
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    plain, whole = (library(PROMPT, add_special_tokens=special)["input_ids"] for special in (False, True))
    spelled = kind in ("Qwen's", "SmolLM's")
    assert plain == ours.tokenizer.encode(PROMPT).tolist() and (whole == plain) is spelled
    assert spelled or whole == ours.tokens(PROMPT)
    if kind != "Qwen's":  # whose card talks
        code = (tmp_path / "hf" / "README.md").read_text().split("```python\n")[1].split("```")[0]
        monkeypatch.chdir(tmp_path / "hf")
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["ids"]["input_ids"][0].tolist() == ours.tokens("Once upon a time")
    library.chat_template = plain_template(library.eos_token)
    talked = library.apply_chat_template([{"role": "user", "content": PROMPT}], return_dict=False)
    assert talked == plain_ids(ours.tokenizer, PROMPT)
    if kind != "modern":
        assert main(["export", str(run), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 0
        fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
        assert fields["tokenizer.ggml.add_bos_token"].contents() is not spelled
        assert spelled or fields["tokenizer.ggml.bos_token_id"].contents() == whole[0]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's message in the plain template."""
    segments = plain_segments(tokenizer.end_of_text, [{"role": "user", "content": text}], False)
    parts = [[s.content] if isinstance(s.content, int) else tokenizer.encode(s.content).tolist() for s in segments]
    return [token for part in parts for token in part]


def test_documents_in_shards(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": f"the {n}"}) + "\n" for n in range(40)))
    command = ["prepare", str(tmp_path / "docs.jsonl"), "--tokenizer", str(folder), "--workers", "1"]
    assert main([*command, "--out", str(tmp_path / "shards")]) == 0
    dataset = open_dataset(tmp_path / "shards")
    for split in ("train", "validation"):
        (shard,) = dataset.splits[split]
        tokens = np.fromfile(shard.path, np.uint16)[512:]
        counts = dataset.manifest["splits"][split]
        starts = np.flatnonzero(tokens == END)
        assert len(starts) == counts["documents"] and (tokens[starts + 1] == BEGIN).all() and starts[0] == 0
        assert counts["text_tokens"] == counts["tokens"] - 2 * counts["documents"]


def test_an_end_that_only_the_generation_config_names(folder: Path, tmp_path: Path) -> None:
    made = shutil.copytree(folder, tmp_path / "hf")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, END]}))
    model = load(str(made), device="cpu")
    assert model.tokenizer.end_of_text == 257
    (made / "generation_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"expected an eos_token_id, which ends texts, beside .*, found None; name it"):
        load(str(made), device="cpu")


def test_a_text_ends_at_every_token_that_is_listed(folder: Path, tmp_path: Path) -> None:
    """Of a list in config.json as well, of which transformers makes its generation's configuration."""
    plain = load(str(folder), device="cpu")
    row = plain.tokens(PROMPT)
    for _ in range(5):
        row.append(int(plain.logits([row])[0][-1].argmax()))
    (made, last) = shutil.copytree(folder, tmp_path / "hf"), row[-1]
    (made / "generation_config.json").unlink()
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": [END, last]}))
    row = row[len(plain.tokens(PROMPT)) :]
    expected = plain.tokenizer.decode(row[: row.index(last)])
    assert load(str(made), device="cpu").generate(PROMPT, max_tokens=100, temperature=0) == expected
    inputs = torch.tensor([plain.tokens(PROMPT)])
    written = theirs(made).generate(inputs, do_sample=False, max_new_tokens=100, pad_token_id=0)
    assert written[0, -1] == last and written.shape[1] == inputs.shape[1] + row.index(last) + 1


def test_a_trained_model_ends_its_turns_in_transformers(tmp_path: Path) -> None:
    """Of a base, whose own files name the end of a text alone. Its import comes out as it came in."""
    tokenizer = made_tokenizer(CHATML)
    special = {token: number for number, token in enumerate(SPECIAL, tokenizer.vocab_size - len(SPECIAL))}
    text, turn = special["<|eot|>"], special["<|im_end|>"]
    run, _ = make_checkpoint(tmp_path / "run", tokenizer, **LLAMA)

    def ends(folder: Path) -> object:
        return transformers.GenerationConfig.from_pretrained(folder).eos_token_id

    assert main(["export", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert ends(tmp_path / "hf") == [text, turn]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").bos_token_id is not None
    other = json.dumps({"eos_token_id": [text, 3], "temperature": 0.5})
    tokenizer.others["generation_config.json"] = other
    run, _ = make_checkpoint(tmp_path / "listed", tokenizer, **LLAMA)
    assert main(["export", str(run), str(tmp_path / "more"), "--to", "hf"]) == 0
    content = json.loads((tmp_path / "more" / "generation_config.json").read_text())
    assert content == {"eos_token_id": [text, 3, turn], "temperature": 0.5}
    (tmp_path / "more" / "generation_config.json").write_text(other)
    assert main(["import", str(tmp_path / "more"), "--out", str(tmp_path / "back")]) == 0
    assert main(["export", str(tmp_path / "back"), str(tmp_path / "again"), "--to", "hf"]) == 0
    assert (tmp_path / "again" / "generation_config.json").read_text() == other
