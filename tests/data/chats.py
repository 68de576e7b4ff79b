"""Templates, tokenizers and conversations that the chat tests share."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from handgrad.data.model_tokenizer import model_tokenizer
from handgrad.data.tokenizer import Tokenizer

SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|eot|>")

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Trims, writes the date, begins with a token of its own; no newline after a turn.
TRIMS = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('No place for ' + m['role']) }}{% endif %}
    {%- if loop.first %}{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}{% endif %}
    {{- '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}
"""
# Forgets what an answer but the last thought, and says so where it thought nothing; asks what a message begins with.
THINKS = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool>') %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
GENERATION = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- elif m.content == 'skip' %}{% continue %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Without a dash: the blanks around its blocks go, the newline after an expression stays.
LINES = """\
{% for m in messages %}
    {% if m.content %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|im_start|>assistant' }}
    {% endif %}
{% endfor %}
"""
# As SmolLM3's: a switch with a default, a system turn with the date that reads flags from the message, a marked answer.
REASONS = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content %}
    {%- if '/no_think' in said %}{% set mode = '/no_think' %}{% elif '/think' in said %}{% set mode = '/think' %}{% endif %}
    {%- set told = said.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nToday Date: ' + strftime_now('%d %B %Y') + '\\n' }}
{{- 'Reasoning Mode: ' + mode + '\\n\\n' }}
{%- if told %}{{ told + '\\n\\n' }}{% endif %}{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- generation %}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
{%- endif %}
"""
# As OLMo 3's: a system turn by default, functions that a message may have, the end of text behind the last answer alone.
FUNCTIONS = """\
{%- set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 %}
{%- if not has_system %}{{ '<|im_start|>system\\nYou have no functions. <functions></functions><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}{{ '<|im_start|>system\\n' + m['content'] }}
        {%- if m.get('functions', none) is not none %}{{ ' <functions>' + m['functions'] + '</functions>' }}
        {%- else %}{{ ' <functions></functions>' }}{% endif %}{{ '<|im_end|>\\n' }}
    {%- elif m['role'] == 'user' %}{{ '<|im_start|>user\\n' + m['content'] + '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>assistant\\n' }}{% if m.get('content', none) is not none %}{{ m['content'] }}{% endif %}
        {%- if not loop.last %}{{ '<|im_end|>\\n' }}{% else %}{{ eos_token }}{% endif %}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- endfor %}
"""
TEMPLATES = {
    "reasons": REASONS,
    "functions": FUNCTIONS,
    "lines": LINES,
    "chatml": CHATML,
    "trims": TRIMS,
    "thinks": THINKS,
    "generation": GENERATION,
}


def made_tokenizer(
    template: str | None, filler: int = 0, special: Sequence[str] = SPECIAL, takes_blanks: bool = False, begins: str = ""
) -> Tokenizer:
    """A byte-level tokenizer with special tokens and a template; `filler` more tokens that no text has, before them.
    With `takes_blanks` a special token takes the blanks to its right, every other one also those to its left.
    `begins`: the one that it puts before every text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"he": 256, "Ġt": 257, "ĊĊ": 258}
    vocab |= {f"ĀĀĀ{n}": 259 + n for n in range(filler)}
    merges = [("h", "e"), ("Ġ", "t"), ("Ċ", "Ċ")]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, rstrip=takes_blanks, lstrip=takes_blanks and n % 2 == 1)
            for n, text in enumerate(special)
        ]
    )
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begins} $A", special_tokens=[(begins, library.token_to_id(begins))]
        )
    config = {"bos_token": {"__type": "AddedToken", "content": "<|begin|>"}, "eos_token": "<|eot|>"}
    others = {"tokenizer_config.json": json.dumps(config | ({"chat_template": template} if template else {}))}
    size = library.get_vocab_size()
    return model_tokenizer(library.to_str().encode(), others, size, size - 1, "the test")


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation of the user and the assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def write_folder(tokenizer: Tokenizer, folder: Path) -> Path:
    """The tokenizer as the folder of a model, without weights."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    for name, content in tokenizer.others.items():
        (folder / name).write_text(content)
    config = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.end_of_text}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
