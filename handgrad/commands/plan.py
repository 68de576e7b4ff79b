"""handgrad plan: memory, speed and cost of a run, on this machine and on others, from the same arguments as train."""

from argparse import Namespace

from handgrad.errors import UsageError
from handgrad.machine import devices
from handgrad.tools.forecast import bytes_of
from handgrad.tools.plan import as_it_runs, describe_gpu, describe_gpus, describe_plan


def run(parsed: Namespace) -> int:
    if parsed.gpus is not None and parsed.ranks is not None and parsed.gpus != parsed.ranks:
        raise UsageError(f"--gpus and --ranks say the same thing, found {parsed.gpus} and {parsed.ranks}; give one of them")
    if parsed.fit == "" and parsed.gpu is None and not devices.gpu_count():
        raise UsageError("--fit alone plans for the GPU here, found none; give a size, as --fit 24GB, or name a --gpu")
    ranks, fit = parsed.gpus or parsed.ranks or 1, bytes_of(parsed.fit) if parsed.fit else 0
    config, vocab_size, lines = as_it_runs(parsed.run_config, parsed.vocab_size or 0, named=parsed.data is not None)
    if parsed.gpu not in (None, "all"):
        lines += describe_gpu(config, vocab_size, parsed.gpu, ranks, parsed.price, fit)
    else:
        if parsed.gpu is None:
            lines += [*describe_plan(config, vocab_size, ranks, fit), ""]
        lines += describe_gpus(config, vocab_size, ranks, parsed.price, fit)
    print("\n".join(lines))
    return 0
