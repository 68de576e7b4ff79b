"""Greedy text of llama.cpp from files of `export --to gguf` beside ours, of small models trained for a moment.

    python -m benchmarks.gguf_llamacpp --python VENV/bin/python --out benchmarks/results/cpu-gguf-llamacpp.json

VENV has llama-cpp-python. Each model is trained on the built-in stories first, so that its choices are clear: random
weights have near-ties, which the rounding of either program may decide. Both read the weights of the f16 file. llama.cpp
rounds activations to float16 in products with such weights, ours are float32: the record has the largest difference between
the two programs' logits along the text, and the smallest distance between the likeliest token and the next.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch

import handgrad
from benchmarks.record import write_record
from handgrad.cli import main
from handgrad.data.stories import story
from handgrad.interop.gguf_file import PATTERNS

TOKENS = 100
SIZES = ["--num-layers", "4", "--num-heads", "4", "--channels", "128", "--sequence-length", "256", "--micro-batch", "8"]
LLAMA3 = "rope=llama3,rope_factor=8.0,rope_length=64,rotary_base=500000.0"
OLMO3 = "rope=yarn,rope_factor=8.0,rope_length=64,rope_scale=1.2079441541679836"  # 1 + 0.1 ln 8
YARN = "rope=yarn,rope_factor=4.0,rope_length=64,rope_fast=32.0,rope_scale=1.1386294361119891"  # 1 + 0.1 ln 4
# Of each model: its splitter or one of our tokenizers, and what its command adds.
MODELS = {
    "gpt2, GPT-2's vocabulary": ("gpt2", []),
    "gpt2, bytes": ("bytes", []),
    "llama, SmolLM's splitter": ("smollm", ["--llama", f"kv_heads=2,tied,{LLAMA3}"]),
    "llama, Llama 3's splitter": ("llama-bpe", ["--llama", "kv_heads=4"]),
    "qwen2": ("qwen2", ["--llama", f"kv_heads=1,qkv_bias,tied,norm_epsilon=1e-06,{YARN}"]),
    "qwen3": ("qwen2", ["--llama", "kv_heads=2,head_width=48,qk_norm,norm_epsilon=1e-06,rotary_base=1000000.0"]),
    "smollm3": ("llama-bpe", ["--llama", "kv_heads=2,tied,nope_interval=4,rotary_base=2000000.0"]),
    "gemma3": ("pieces", ["--gemma3", "kv_heads=1,head_width=32,window=24", "--num-layers", "6"]),
    "olmo2": ("llama-bpe", ["--olmo", "kv_heads=2"]),
    "olmo3, as olmo2": ("llama-bpe", ["--olmo", f"window=24,{OLMO3}"]),
}
PROMPT = "Once upon a time there was"
TEXTS = (
    "Lily's 12345 dogs, I'LL say: \"don't\"!",
    "  two  blanks\n\n\tand a tab   \n   end",
    "naïve café – 你好, мир! 👩‍👩‍👧 e\u0301",
)
# Runs in the other environment: a line of JSON in, one out.
THEIRS = """
import json, sys
import llama_cpp
asked = json.load(sys.stdin)
options = dict(n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, type_k=0, type_v=0)
of_the_file = dict(yarn_attn_factor=-1.0, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0, yarn_ext_factor=-1.0)
llm = llama_cpp.Llama(asked["file"], **options, **of_the_file)
tokens, rows = llm.tokenize(asked["prompt"].encode(), add_bos=False), []
prompt = asked["ids"]
llm.eval(prompt)
found = []
for _ in range(asked["count"]):
    row = llm.scores[llm.n_tokens - 1]
    rows.append([float(x) for x in row])
    found.append(int(row.argmax()))
    llm.eval(found[-1:])
texts = [llm.tokenize(text.encode(), add_bos=False) for text in asked["texts"]]
whole = llm.tokenize(asked["prompt"].encode(), add_bos=True)
print(json.dumps(dict(version=llama_cpp.__version__, tokens=found, logits=rows, texts=texts, prompt=whole)))
"""


def piece_tokenizer() -> tokenizers.Tokenizer:
    """A SentencePiece of 2000 pieces of the stories, by Gemma's rules: no splitter, a token for each byte."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2000, special_tokens=words, show_progress=False)
    lines = (story(0, number).text.replace(" ", " \0").split("\0") for number in range(2000))  # no piece crosses a blank
    made.train_from_iterator(lines, trainer)
    template = {"single": "<bos> $A", "special_tokens": [("<bos>", made.token_to_id("<bos>"))]}
    made.post_processor = tokenizers.processors.TemplateProcessing(**template)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]  # a text's "<0x41>" is six letters
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def tokenizer_folder(folder: Path, name: str) -> Path:
    """A byte-level vocabulary of 2000 tokens of the stories, with a family's splitter and special tokens; or pieces."""
    if name == "pieces":
        folder.mkdir()
        piece_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"vocab_size": 2048, "eos_token_id": 1}))
        named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        return folder
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm")
    pattern = next((text for text, theirs in PATTERNS.items() if theirs == name), "")
    first = (
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        if pattern
        else tokenizers.pre_tokenizers.Digits(individual_digits=True)
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([first, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False
    )
    made.train_from_iterator((story(0, number).text for number in range(2000)), trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 2048, "eos_token_id": 0}))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def compare(name: str, folder: Path, python: str, steps: int) -> dict[str, Any]:
    splitter, settings = MODELS[name]
    words = splitter if splitter in ("gpt2", "bytes") else str(tokenizer_folder(folder / "tokenizer", splitter))
    shards, run, file = (str(folder / part) for part in ("shards", "run", "model.gguf"))
    assert main(["prepare", "stories", "--out", shards, "--tokenizer", words, "--documents", "4000", "--workers", "1"]) == 0
    network = ["--architecture", settings[0].removeprefix("--")] if settings else []
    schedule = ["--steps", str(steps), "--tokens-per-step", "2048", "--learning-rate", "3e-3", "--warmup-steps", "20"]
    quiet = ["--eval-every", "0", "--sample-every", "0", "--device", "cpu", "--log-every", "50"]
    assert main(["train", "--data", shards, "--out", run, *SIZES, *network, *settings, *schedule, *quiet]) == 0
    assert main(["export", run, file, "--to", "gguf"]) == 0
    model = handgrad.load(run, device="cpu", precision="fp32")
    for row in model.table:
        if len(row.shape) == 2 and row.name != "wpe":  # as the file has them
            row.stored(model.flat).copy_(row.stored(model.flat).half())
    prompt = model.tokens(PROMPT)
    asked = {"file": file, "prompt": PROMPT, "ids": prompt, "count": TOKENS, "texts": TEXTS}
    done = subprocess.run([python, "-c", THEIRS], input=json.dumps(asked), capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    tokens, largest, margins = list(prompt), 0.0, []
    while len(tokens) < len(prompt) + TOKENS:  # whole forwards, without a cache
        row = model.logits([tokens])[0][-1]
        place = len(tokens) - len(prompt)
        if tokens[len(prompt) :] == theirs["tokens"][:place]:
            largest = max(largest, float((row - torch.tensor(theirs["logits"][place])).abs().max()))
        best = row.topk(2).values
        margins.append(float(best[0] - best[1]))
        tokens.append(int(row.argmax()))
    ours = tokens[len(prompt) :]
    equal = next((n for n, (one, other) in enumerate(zip(ours, theirs["tokens"], strict=True)) if one != other), TOKENS)
    return {
        "llama_cpp_python": theirs["version"],
        "equal_greedy_tokens": equal,
        "largest_difference_of_logits": largest,
        "smallest_margin": min(margins),
        "different_tokens": len(set(ours)),
        "same_prompt": theirs["prompt"] == prompt,
        "same_tokens_of_texts": [
            model.tokenizer.encode(t).tolist() == ids for t, ids in zip(TEXTS, theirs["texts"], strict=True)
        ],
        "text": model.tokenizer.decode(ours),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="of the environment with llama-cpp-python")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--out", required=True)
    parsed = parser.parse_args()
    rows = {}
    for name in parsed.models:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = compare(name, Path(folder), parsed.python, parsed.steps)
            print(name, {key: value for key, value in rows[name].items() if key != "text"}, flush=True)
    versions = {row.pop("llama_cpp_python") for row in rows.values()}
    content = {"llama_cpp_python": versions.pop(), "steps": parsed.steps, "greedy_tokens": TOKENS, "models": rows}
    write_record(parsed.out, torch.device("cpu"), **content)
