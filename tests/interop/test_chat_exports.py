"""Exports of models that talk: the template in their files, and the code of their card, in transformers and GGUF."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import gguf
import pytest
import transformers

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.tokenizer import Tokenizer
from handgrad.interop import sources
from tests.data.chats import CHATML, made_tokenizer, talk
from tests.interop.models import bpe, make_checkpoint

TALK = talk("Hi \U0001f600!\nWhat is 2 + 2?", "It is 4.", "  and é?", system="Be brief.")
LLAMA = {"architecture": "llama", "sizes": (2, 4, 32, 96), "llama": "kv_heads=2,feed_forward=64,tied"}


@pytest.mark.nightly(but=["base"])
@pytest.mark.parametrize("kind", ["gpt2", "bytes", "bpe", "base"])
def test_what_learned_to_talk_in_the_plain_template_talks_in_transformers(kind: str, tmp_path: Path) -> None:
    """A base has no template: its export has the one in which the run was trained, and ends where an answer ends."""
    made: str | Tokenizer = {"base": made_tokenizer(None), "bpe": bpe()}.get(kind, kind)
    run, _ = make_checkpoint(tmp_path / "run", made, chat=True, **(LLAMA if kind == "base" else {}))
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = ChatTemplate(load(run, device="cpu").tokenizer)
    assert ours.is_plain
    for messages, asks in ((TALK[:-1], False), (TALK, True), (TALK[:2], True)):
        assert theirs.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False) == ours.render(
            messages, asks
        )
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert ours.end_tokens == {ends}
    back = ChatTemplate(sources.open_weights(str(tmp_path / "hf")).tokenizer)
    assert back.render(TALK, True) == ours.render(TALK, True) and back.end_tokens == ours.end_tokens


def test_a_run_on_documents_has_no_template(tmp_path: Path) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", packing="whole")
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert not (tmp_path / "hf" / "chat_template.jinja").exists()
    assert "apply_chat_template" not in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("template", [CHATML, None])
def test_the_card_shows_how_to_talk(template: str | None, tmp_path: Path) -> None:
    """The code of the card runs, and asks in the template."""
    run, _ = make_checkpoint(tmp_path / "run", made_tokenizer(template), chat=True, **LLAMA)
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    (code,) = re.findall("```python\n(.*?)```", (tmp_path / "hf" / "README.md").read_text(), re.DOTALL)
    assert "apply_chat_template(messages, add_generation_prompt=True" in code and "Once upon" not in code
    printed, here = io.StringIO(), Path.cwd()
    try:
        os.chdir(tmp_path / "hf")
        with contextlib.redirect_stdout(printed):
            exec(code, {})
    finally:
        os.chdir(here)
    assert printed.getvalue()


def test_the_plain_template_in_a_gguf_file(tmp_path: Path) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", chat=True)
    assert main(["export", str(run), "--to", "gguf", str(tmp_path / "a.gguf")]) == 0
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.chat_template"]
    assert field.contents() == (tmp_path / "hf" / "chat_template.jinja").read_text()
