"""handgrad tune: freezes the fastest algorithm of every product of a model on this GPU."""

from collections.abc import Sequence
from pathlib import Path

import torch

from handgrad import world
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_run_arguments, run_config
from handgrad.errors import UsageError
from handgrad.training.state import allocate_state
from handgrad.training.step import Stepper

GPT2_VOCABULARY = 50257


class NoFeed:
    """Leaves the tokens as they are: only the shapes of a step matter here."""

    def fill(self, first_sample: int) -> None:
        pass


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad tune", description="Times the algorithms of every product of a run, and keeps the fastest.")
    add_run_arguments(parser)
    parser.add_argument("--vocab-size", type=int, default=GPT2_VOCABULARY, metavar="N", help="words (default: GPT-2's)")
    parser.add_argument("--table", default="", metavar="FILE", help="where to write (default: this user's table)")
    parsed = parser.parse(arguments)
    config = run_config(parsed)
    device = world.resolve_device(config.device)
    if device.type != "cuda":
        raise UsageError(f"expected a CUDA GPU to tune for, found device {device.type}")
    dtype = world.use_precision(device, config.precision)
    ops = choose_backend("kernels", device)
    from handgrad.ops.kernels import cublaslt, tune  # only where the kernels can run

    state = allocate_state(config, config.shape(parsed.vocab_size), dtype, device, ops)
    Stepper(config, state, NoFeed(), graphs=False).begin(0)
    torch.cuda.synchronize()
    del state
    torch.cuda.empty_cache()
    path = Path(parsed.table) if parsed.table else cublaslt.user_table()
    for line in tune.tune(list(cublaslt.PLANS), path):
        print(line, flush=True)
    print(f"wrote {path}; runs with these shapes use it from now on (their bits change)")
    return 0
