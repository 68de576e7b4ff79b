"""The flags of bench: one list for all benchmarks, of which each takes some (`commands.bench`)."""

from handgrad.commands.parser import Parser
from handgrad.settings.config import ABOVE_0, AT_LEAST_1, PRECISIONS

BENCHMARKS = {
    "step": "whole optimizer steps, alternating with the twin: speed, memory; on a GPU power and time to step 1",
    "loss": "the same training run by handgrad and by the twin: the distance of their losses",
    "ladder": "from plain PyTorch to handgrad's kernels, one improvement per row",
    "kernels": "single operations, beside torch's",
    "sampling": "texts of a model with random weights, beside transformers.generate: 1, 8 and 64 at a time",
    "fp8": "kernels and GEMMs of fp8 beside bf16: times, bytes, errors",
}


def bench(parser: Parser) -> None:
    texts = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    parser.add_argument("what", choices=list(BENCHMARKS), metavar="BENCHMARK", help=texts)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
    parser.text("--model", "NAME", "model size (default: d12)", default="d12")
    parser.number("--micro-batch", "samples at once (default: step 64, loss 32, ladder 16; CPU: 4)", rule=AT_LEAST_1)
    parser.number("--sequence-length", "tokens per sample (default: 1024; CPU: 64)", rule=AT_LEAST_1)
    parser.number("--micro-steps", "micro-batches per optimizer step (default: 1)", rule=AT_LEAST_1)
    parser.add_argument("--precision", choices=PRECISIONS, help="of handgrad (default: bf16)")
    parser.add_argument("--recompute", type=int, choices=(0, 1, 2, 3), help="of handgrad, as in train (default: 0)")
    parser.text("--data", "DIR", "prepared shards to read the tokens from (default: synthetic tokens)", default=None)
    parser.text("--techniques", "NAMES", "all techniques of a modern network (default: as in train)", default=None)
    parser.text("--contenders", "TEXT", "step on a GPU, loss: names, with commas; an unknown one lists all", default=None)
    parser.number("--seconds", "per contender (default: 20; ladder: per row, 5)", rule=ABOVE_0, kind=float)
    parser.number("--turn-seconds", "step on a GPU: length of a slice (default: 10)", rule=ABOVE_0, kind=float)
    starts = "step on a GPU: 1: start only with empty kernel caches; 2: again with full ones (default: 2)"
    parser.add_argument("--starts", type=int, choices=(1, 2), help=starts)
    parser.number("--steps", "loss: optimizer steps (default: 200)", rule=AT_LEAST_1)
    parser.number("--learning-rate", "loss: peak learning rate (default: 6e-4)", rule=ABOVE_0, kind=float)
    parser.text("--rows", "NUMBERS", "ladder: only these, added to those in --out, like 6-9", default=None)
    parser.number("--rounds", "step on a CPU: slices of every contender (default: 5)", rule=AT_LEAST_1)
    parser.text("--out", "FILE", "also write a record, as JSON")
