"""Logits and greedy text at the true sizes of SmolLM2-135M and Qwen3-0.6B beside transformers, in float32, random weights.

    python -m benchmarks.llama_logits --out benchmarks/results/cpu-llama-logits.json

Nothing is timed. Matrices are drawn as transformers draws them, and wider: then the text is not a few tokens over and over.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

import handgrad
from benchmarks.record import write_record
from handgrad.generation.generate import Continuation, SamplingOptions

TOKENS, PROMPT, GREEDY = 256, 16, 200
SPREADS = (0.02, 0.03)  # of matrices
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "SmolLM2-135M": transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
}


def random_model(config: transformers.PretrainedConfig, spread: float, folder: Path) -> transformers.PreTrainedModel:
    """Written to `folder`, with a tokenizer of bytes."""
    torch.manual_seed(1)
    config.initializer_range, config.eos_token_id = spread, 256
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for values in model.parameters():
        if values.dim() == 1:
            torch.nn.init.normal_(values, mean=1.0, std=0.2)  # gains
    model.save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model.eval()


def compare(config: transformers.PretrainedConfig, spread: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        theirs = random_model(config, spread, Path(folder))
        ours = handgrad.load(folder, device="cpu", precision="fp32")
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = theirs(tokens[None]).logits[0]
        options = {"do_sample": False, "max_new_tokens": GREEDY, "eos_token_id": None, "pad_token_id": 0}
        text = theirs.generate(tokens[None, :PROMPT], **options)[0, PROMPT:].tolist()
    difference = (ours.logits(tokens)[0] - logits).abs().max()
    made = Continuation(tokens[:PROMPT].tolist(), GREEDY, 0)
    for _ in ours._write([made], SamplingOptions(temperature=0), (), 1):
        pass
    pairs = zip(made.tokens, text, strict=True)
    return {
        "spread": spread,
        "parameters": sum(values.numel() for values in theirs.parameters()),
        "tokens": TOKENS,
        "largest_logit": float(logits.abs().max()),
        "largest_difference": float(difference),
        "greedy_tokens": GREEDY,
        "equal_greedy_tokens": next((n for n, (one, other) in enumerate(pairs) if one != other), len(text)),
        "different_tokens": len(set(text)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parsed = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, config in CONFIGS.items():
        rows[name] = [compare(config, spread) for spread in SPREADS]
        print(name, *rows[name], sep="\n", flush=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # KiB on Linux
    versions = {"transformers": transformers.__version__}
    write_record(parsed.out, torch.device("cpu"), library=versions, peak_bytes=peak_bytes, models=rows)
