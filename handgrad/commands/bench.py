"""handgrad bench: beside a PyTorch autograd twin, on this machine, in one run."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import handgrad
from handgrad import presets
from handgrad.commands.arguments import Parser
from handgrad.errors import UsageError


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad bench", description="Speed and memory beside a plain PyTorch twin, in one run.")
    parser.add_argument("what", choices=["step"], help="step: one optimizer step of a whole model")
    parser.add_argument("--model", default="d12", metavar="NAME", help="model size (default: d12)")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="samples per step (default: 4)")
    parser.add_argument("--sequence-length", type=int, default=64, metavar="N", help="tokens per sample (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of every contender (default: 5)")
    parser.add_argument("--out", default="", metavar="FILE", help="also write the figures as JSON")
    parsed = parser.parse(arguments)
    if min(parsed.micro_batch, parsed.sequence_length, parsed.rounds) < 1:
        raise UsageError("--micro-batch, --sequence-length and --rounds must be at least 1")
    presets.model(parsed.model)  # refuses an unknown one
    checkout = Path(handgrad.__file__).parents[1]
    if not (checkout / "benchmarks" / "step.py").exists():
        raise UsageError(f"the benchmarks lie in a checkout of handgrad, none found at {checkout}; clone the repository")
    sys.path.insert(0, str(checkout))
    # The twin uses autograd, which the package never does: it lives outside, and is looked up only here.
    step = importlib.import_module("benchmarks.step")
    step.compare(parsed.model, parsed.micro_batch, parsed.sequence_length, parsed.rounds, parsed.out)
    return 0
