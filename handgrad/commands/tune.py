"""handgrad tune: freezes the fastest algorithm of every product of a model on this GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from handgrad import world
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_run_arguments, run_config
from handgrad.commands.plan import GPT2_VOCABULARY
from handgrad.errors import UsageError
from handgrad.profile import set_up
from handgrad.training.step import Stepper


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
    if parsed.vocab_size < 1:
        raise UsageError(f"--vocab-size must be at least 1, found {parsed.vocab_size}")
    device = world.resolve_device(config.device)
    if device.type != "cuda":
        raise UsageError(f"expected a CUDA GPU to tune for, found device {device.type}")
    dtype = world.use_precision(device, config.precision)
    choose_backend("kernels", device)  # says what is missing
    from handgrad.ops.kernels import cublaslt, tune  # only where the kernels can run

    state = set_up(replace(config, backend="kernels"), config.shape(parsed.vocab_size), device, dtype)
    Stepper(config, state, NoFeed(), graphs=False).begin(0)
    torch.cuda.synchronize()
    del state
    torch.cuda.empty_cache()
    path = Path(parsed.table) if parsed.table else cublaslt.user_table()
    for line in tune.tune(list(cublaslt.PLANS), path):
        print(line, flush=True)
    use = "runs with these shapes use it from now on (their bits change)"
    print(f"wrote {path}; {use if path == cublaslt.user_table() else f'copy it to {cublaslt.user_table()} to use it'}")
    return 0
