"""Named starting points: a preset is a function that returns a `RunConfig`; flags and TOML keys change single fields.

The larger presets follow the learning rates of Table 2.1 in the GPT-3 paper (Brown et al. 2020). The 124M and 1558M recipes
are llm.c's published ones.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from handgrad.errors import UsageError
from handgrad.names import nearest_name
from handgrad.networks import NETWORKS
from handgrad.networks.modern import CHANNELS_PER_LAYER, DEPTHS
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig

# Rules that size the modern network by one number, its depth, each with its source; docs/modern.md derives them.
TOKENS_PER_PARAMETER = 20  # of a GEMM (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556)
M12_TOKENS_PER_STEP, M12_MICRO_BATCH = 1 << 19, 64  # at GPT-2's width
MODERN_RATE = 3e-3  # at 768 channels
WARMUP_SHARE = 0.25  # most of a run's steps that a preset's warm-up may take: as much as in tiny

# name: (num_layers, num_heads, channels)
MODELS = {name: sizes for network in NETWORKS.values() for name, sizes in network.models.items()}


def listed(names: Iterable[str]) -> str:
    """The names for a message, with modern networks as a series."""
    first, second, *_, last = DEPTHS
    return ", ".join([*(name for name in names if name not in DEPTHS), first, second, f"... {last}"])


def model(name: str) -> dict[str, Any]:
    """The fields that `--model NAME` sets. Raises `UsageError` for an unknown name."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}{nearest_name(name, MODELS)}; known: {listed(MODELS)}")
    sizes = dict(zip(("num_layers", "num_heads", "channels"), MODELS[name], strict=True))
    architecture = next(key for key, network in NETWORKS.items() if name in network.models)
    return sizes | {"architecture": architecture, "techniques": ""}


def sized(name: str, **settings: Any) -> RunConfig:
    return RunConfig(**model(name), **settings)


def tiny() -> RunConfig:
    """Two layers of 64 channels: seconds on a laptop, for trying things and for tests.

    With a shorter warm-up or a higher rate, the loss of one early step on bytes can double: an update nearly cancels the
    residual stream, and the last layer norm magnifies what is left."""
    return sized(
        "tiny",
        sequence_length=64,
        steps=200,
        tokens_per_step=1024,
        micro_batch=8,
        learning_rate=1.5e-3,
        warmup_steps=50,
        eval_every=50,
        eval_tokens=8192,
        save_every=100,
    )


def demo() -> RunConfig:
    """The run of `make train`: a small GPT on the built-in stories, two to three minutes on two cores.

    Small steps: the loss on these stories depends more on the number of updates than on the number of tokens."""
    return RunConfig(
        num_layers=4,
        num_heads=4,
        channels=128,
        sequence_length=256,
        steps=2000,
        tokens_per_step=1024,
        micro_batch=4,
        learning_rate=4e-3,
        schedule="linear",
        warmup_steps=100,
        final_learning_rate_fraction=0.0,
        eval_every=500,
        eval_tokens=1 << 16,
        eval_stride=128,
        sample_every=1000,
        save_every=500,
        log_every=100,
    )


def sprites() -> RunConfig:
    """The run of `handgrad demo --images`: a small modern network on the built-in sprites."""
    sizes = {"architecture": "modern", "num_layers": 3, "sequence_length": 268, "tokens_per_step": 4 * 268}
    return replace(demo(), **sizes, optimizer="muon", learning_rate=6e-3, steps=2200, eval_stride=0, sample_tokens=268)


def gpt2(name: str, **settings: Any) -> RunConfig:
    """A GPT-2 size on 10B tokens: 19,560 steps of 524,288 tokens."""
    common: dict[str, Any] = {"steps": 19560, "tokens_per_step": 524288, "warmup_steps": 700}
    common |= {"final_learning_rate_fraction": 0.0, "eval_tokens": 10 << 20, "save_every": 5000}
    return sized(name, **common | settings)


def gpt2_1558m() -> RunConfig:
    """GPT-2 1558M: 32,000 steps of 1,048,576 tokens, with spikes skipped."""
    sizes = {"steps": 32000, "tokens_per_step": 1048576, "micro_batch": 16}
    return gpt2("d48", **sizes, final_learning_rate_fraction=0.1, skip_loss_z=5.0, skip_norm_z=5.0)


def gpt3(name: str, learning_rate: float, micro_batch: int = 16) -> RunConfig:
    """A GPT-3 size: the same architecture at twice the context, half the samples at once."""
    settings = {"sequence_length": 2048, "micro_batch": micro_batch, "learning_rate": learning_rate}
    return gpt2(name, **settings, final_learning_rate_fraction=0.1)


def modern_parameters(depth: int) -> int:
    """Parameters of the GEMMs, with GPT-2's vocabulary."""
    channels = CHANNELS_PER_LAYER * depth
    return 12 * depth * channels**2 + GPT2_VOCABULARY * channels


def modern(depth: int) -> RunConfig:
    """The modern network of this depth, with everything that follows from it: width, heads, tokens, batch, rates.

    The batch grows with the root of the tokens (Zhang et al. 2024, https://arxiv.org/abs/2410.21676), to a power of two;
    the learning rate falls with the root of the width."""
    tokens = TOKENS_PER_PARAMETER * modern_parameters(depth)
    growth = math.sqrt(modern_parameters(depth) / modern_parameters(12))
    tokens_per_step = 1 << round(math.log2(M12_TOKENS_PER_STEP * growth))
    steps = round(tokens / tokens_per_step)
    return RunConfig(
        **model(f"m{depth}"),
        optimizer="muon",
        steps=steps,
        tokens_per_step=tokens_per_step,
        micro_batch=min(M12_MICRO_BATCH, 1 << round(math.log2(M12_MICRO_BATCH * 144 / depth**2))),
        learning_rate=MODERN_RATE * math.sqrt(12 / depth),
        schedule="trapezoid",
        warmup_steps=max(1, steps // 100),
        cooldown_fraction=0.5,
        final_learning_rate_fraction=0.0,
        eval_tokens=10 << 20,
        save_every=1000,
    )


def small(depth: int) -> RunConfig:
    """GPT-2 at the sizes, tokens and batch of the modern network of this depth."""
    like = modern(depth)
    sizes = {name: getattr(like, name) for name in ("steps", "tokens_per_step", "micro_batch")}
    return gpt2(f"d{depth}", **sizes, learning_rate=1e-3, warmup_steps=like.steps // 20, save_every=1000)


def vqvae() -> RunConfig:
    """Discrete codes of pictures of 32 x 32, an 8 x 8 grid of 1,000 by FSQ: 32 pictures a step."""
    length = 3 * 32 * 32
    sizes = {"sequence_length": length, "tokens_per_step": 32 * length, "micro_batch": 8, "eval_tokens": 64 * length}
    return sized("vqvae", **sizes, steps=1000, learning_rate=1e-3, warmup_steps=50, save_every=500)


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "demo": demo,
    "sprites": sprites,
    "vqvae": vqvae,
    "d4": partial(small, 4),
    "d6": partial(small, 6),
    "d12": lambda: gpt2("d12", micro_batch=64, learning_rate=6e-4),
    "d24": lambda: gpt2("d24", micro_batch=32, learning_rate=3e-4),
    "d36": lambda: gpt2("d36", micro_batch=32, learning_rate=2.5e-4),
    "d48": gpt2_1558m,
    "gpt3-125m": lambda: gpt3("gpt3-125m", 6e-4, micro_batch=32),
    "gpt3-350m": lambda: gpt3("gpt3-350m", 3e-4),
    "gpt3-760m": lambda: gpt3("gpt3-760m", 2.5e-4),
    "gpt3-1300m": lambda: gpt3("gpt3-1300m", 2e-4),
    **{name: partial(modern, depth) for name, depth in DEPTHS.items()},
}


def preset(name: str) -> RunConfig:
    """The configuration of this name. Raises `UsageError` for an unknown one."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}{nearest_name(name, PRESETS)}; known: {listed(PRESETS)}")
    return PRESETS[name]()
