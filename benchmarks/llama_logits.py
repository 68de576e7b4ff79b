"""Logits and greedy text at the true sizes of published models beside transformers, in float32, random weights.

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
from benchmarks.llama_twin import SHAPES, sizes
from benchmarks.record import write_record
from benchmarks.trainer_run import their_config
from handgrad.generation.generate import Continuation, SamplingOptions
from handgrad.settings.config import RunConfig

TOKENS, PROMPT, GREEDY = 640, 16, 200  # more than a window of Gemma 3 has
SPREADS = (0.02, 0.03)  # of matrices
# The model's context by its name in `SHAPES`.
LENGTHS = {"SmolLM2-135M": 8192, "Qwen3-0.6B": 40960, "Gemma-3-270M": 32768, "Gemma-3-1B": 32768, "OLMo-2-1B": 4096}


def config_of(name: str) -> transformers.PretrainedConfig:
    vocab_size, *_ = SHAPES[name]
    return their_config(RunConfig(**sizes(name), sequence_length=LENGTHS[name]).shape(vocab_size))


def random_model(config: transformers.PretrainedConfig, spread: float, folder: Path) -> transformers.PreTrainedModel:
    """Written to `folder`, with a tokenizer of bytes."""
    torch.manual_seed(1)
    config.initializer_range, config.eos_token_id = spread, 256
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for values in model.parameters():
        if values.dim() == 1:
            torch.nn.init.normal_(values, mean=float("gemma" not in config.model_type), std=0.2)  # gains, or gains less 1
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
    for name in LENGTHS:
        rows[name] = [compare(config_of(name), spread) for spread in SPREADS]
        print(name, *rows[name], sep="\n", flush=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # KiB on Linux
    versions = {"transformers": transformers.__version__}
    write_record(parsed.out, torch.device("cpu"), library=versions, peak_bytes=peak_bytes, models=rows)
