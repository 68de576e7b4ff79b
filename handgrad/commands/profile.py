"""handgrad profile: time per kernel of a run's steps, compared with the limits of this machine."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from handgrad.data.mixture import open_data
from handgrad.errors import UsageError
from handgrad.files import check_replaceable
from handgrad.machine import devices
from handgrad.networks import NETWORKS
from handgrad.run.folder import as_begun, model_of
from handgrad.run.packing import resolve_packing, training_batches
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig
from handgrad.tools.profile import MadeUpTokens, profile_run
from handgrad.training.feed import Source


def run(parsed: Namespace) -> int:
    config = parsed.run_config
    device = devices.resolve_device(config.device)
    if NETWORKS[config.architecture].pictures:
        raise UsageError(f"profile knows the kernels of text, found {config.architecture}; profile a GPT on its codes")
    if device.type == "mps":
        raise UsageError("torch's profiler sees no kernels on Apple GPUs; use --device cpu")
    trace = Path(parsed.trace) if parsed.trace else None
    if trace:
        check_replaceable(trace, "--trace")
    config, begun = as_begun(config)
    config, source, vocab_size, words = tokens_of(config, parsed.vocab_size, wanted=parsed.data is not None)
    print("\n".join([f"tokens     {words}", *begun]))
    print("\n".join(profile_run(config, vocab_size, source, parsed.profile_steps, trace)))
    return 0


def tokens_of(config: RunConfig, vocab_size: int | None, *, wanted: bool) -> tuple[RunConfig, Source, int, str]:
    """(`config` with the packing of the samples, samples, vocabulary size, description). Reads the data folder if no
    vocabulary is given and the folder is `wanted`, or a recipe names it and it exists; else makes synthetic samples."""
    if vocab_size is None and (wanted or (config.data != RunConfig.data and Path(config.data).exists())):
        dataset = open_data(config.data, model_of(config))
        config = replace(config, packing=resolve_packing(config.packing, dataset))
        size = dataset.tokenizer.vocab_size
        return config, training_batches(config, dataset), size, f"of {config.data}, a vocabulary of {size}"
    words = vocab_size or GPT2_VOCABULARY
    return config, MadeUpTokens(words, config.seed), words, f"synthetic: word k of {words} at a rate of about 1 / k"
