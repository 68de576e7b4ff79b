"""The smallest card that holds each finetuning: the tables of two pages, from the plan of a run on another GPU.

python -m benchmarks.finetune_cards     writes them anew
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from benchmarks.llama_twin import SHAPES
from benchmarks.record import ROOT
from handgrad.machine.gpus import GPUS
from handgrad.run.resolve import memory_bytes
from handgrad.settings.config import RunConfig, check
from handgrad.tools.forecast import DRIVER_BYTES, resolve_for

PAGE, README = ROOT / "docs" / "finetuning.md", ROOT / "README.md"
BEGIN, END = "<!-- the cards: begin -->", "<!-- the cards: end -->"
GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # GB, as they are sold
USABLE = 0.97  # of a card's memory as torch reports it
GPU = GPUS["4090"]  # of Ada: it has fp8, and no kernel of Hopper's, which take other scratch
ROW_TOKENS = 2048
LORA = "rank=16,alpha=32"

# As published on the Hub: (vocabulary, layers, heads, channels, the family's numbers).
QWEN3 = "kv_heads=8,head_width=128,norm_epsilon=1e-06,qk_norm,rotary_base=1000000.0"
QWEN25 = "norm_epsilon=1e-06,qkv_bias,rotary_base=1000000.0"
LLAMA32 = "tied,rotary_base=500000.0,rope=llama3,rope_factor=32.0"
MODELS: dict[str, tuple[int, int, int, int, str]] = {
    "SmolLM2-135M": SHAPES["SmolLM2-135M"],
    "SmolLM2-360M": (49152, 32, 15, 960, "kv_heads=5,feed_forward=2560,tied,rotary_base=100000.0"),
    "Gemma-3-270M": SHAPES["Gemma-3-270M"],
    "Qwen2.5-0.5B": (151936, 24, 14, 896, f"kv_heads=2,feed_forward=4864,tied,{QWEN25}"),
    "Qwen3-0.6B": SHAPES["Qwen3-0.6B"],
    "Gemma-3-1B": SHAPES["Gemma-3-1B"],
    "Llama-3.2-1B": SHAPES["Llama-3.2-1B"],
    "OLMo-2-1B": SHAPES["OLMo-2-1B"],
    "Qwen2.5-1.5B": SHAPES["Qwen2.5-1.5B"],
    "SmolLM2-1.7B": (49152, 24, 32, 2048, "feed_forward=8192,tied,rotary_base=130000.0"),
    "Qwen3-1.7B": (151936, 28, 16, 2048, f"feed_forward=6144,tied,{QWEN3}"),
    "Llama-3.2-3B": (128256, 28, 24, 3072, f"kv_heads=8,feed_forward=8192,{LLAMA32}"),
    "SmolLM3-3B": (
        128256,
        36,
        16,
        2048,
        "kv_heads=4,feed_forward=11008,tied,nope_interval=4,rotary_base=5e6,norm_epsilon=1e-06",
    ),
    "Qwen3-4B": (151936, 36, 32, 2560, f"feed_forward=9728,tied,{QWEN3}"),
    "OLMo-3-7B": (100278, 32, 32, 4096, "feed_forward=11008,window=4096,rope=yarn,rope_factor=8.0"),
    "Qwen2.5-7B": (152064, 28, 28, 3584, f"kv_heads=4,feed_forward=18944,{QWEN25}"),
    "Qwen3-8B": (151936, 36, 32, 4096, f"feed_forward=12288,{QWEN3}"),
}


class Method(NamedTuple):
    """A way to finetune: its column, and its settings."""

    title: str
    recompute: int
    offload: bool = False
    lora: bool = False
    precision: str = "bf16"


METHODS = (
    Method("full", 0),
    Method("`--recompute 3`", 3),
    Method("`--offload true` too", 3, offload=True),
    Method("LoRA", 0, lora=True),
    Method("`--recompute 3`", 3, lora=True),
    Method("`--precision fp8` too", 3, lora=True, precision="fp8"),
)
LARGEST = {
    "full, `--recompute 3`": METHODS[1],
    "full, `--offload true` too": METHODS[2],
    "LoRA, `--recompute 3`": METHODS[4],
    "LoRA, `--precision fp8` too": METHODS[5],
}
IN_SHORT = ("SmolLM2-1.7B", "Llama-3.2-3B", "Qwen3-8B")  # the README's models
MOST_ROWS = 16  # that `train` takes by itself


def network_of(model: str) -> str:
    return next((network for start, network in (("Gemma", "gemma3"), ("OLMo", "olmo")) if model.startswith(start)), "llama")


def has_forms(model: str, method: Method) -> bool:
    """True if the model's network trains with adapters in the method's precision."""
    return method.precision != "fp8" or network_of(model) == "llama"


@cache
def needed(model: str, method: Method, rows: int = 1) -> int:
    """Bytes of a plan whose micro-batch has so many rows."""
    vocab_size, layers, heads, channels, family = MODELS[model]
    network = network_of(model)
    config = RunConfig(
        architecture=network,
        num_layers=layers,
        num_heads=heads,
        channels=channels,
        sequence_length=ROW_TOKENS,
        micro_batch=rows,
        tokens_per_step=rows * ROW_TOKENS,
        precision=method.precision,
        recompute=method.recompute,
        offload=method.offload,
        lora=LORA if method.lora else "",
        init_from=model,
        lanes=1,
        **{network: family},
    )
    return sum(memory_bytes(resolve_for(GPU, check(config), vocab_size)).values())


def usable(card: int) -> int:
    return int(USABLE * card * GIB - DRIVER_BYTES)


def smallest_card(size_bytes: int) -> str:
    return next((f"**{card}**" for card in CARDS if size_bytes <= usable(card)), "–")


def needs() -> Iterator[str]:
    """The GiB that each model needs by each method, and the smallest card that has them."""
    yield "| | " + " | ".join(method.title for method in METHODS) + " |"
    yield "|---" * (1 + len(METHODS)) + "|"
    for model in MODELS:
        yield f"| {model} | " + " | ".join(need(model, method) for method in METHODS) + " |"


def need(model: str, method: Method) -> str:
    if not has_forms(model, method):
        return "no fp8"
    size = needed(model, method)
    return f"{size / GIB:.1f} {smallest_card(size)}"


def largest(card: int, method: Method) -> str:
    """The largest model that a card holds by a method, and the most rows of a micro-batch, a power of two."""
    models = (model for model in reversed(MODELS) if has_forms(model, method))
    model = next((model for model in models if needed(model, method) <= usable(card)), "")
    rows = MOST_ROWS
    while model and needed(model, method, rows) > usable(card):
        rows //= 2
    return f"{model}, {rows}" if model else "–"


def by_card() -> Iterator[str]:
    """The largest model of each card."""
    yield "| card | " + " | ".join(LARGEST) + " |"
    yield "|---" * (1 + len(LARGEST)) + "|"
    for card in CARDS:
        yield f"| {card} | " + " | ".join(largest(card, method) for method in LARGEST.values()) + " |"


def in_short() -> Iterator[str]:
    """The smallest card of a few models, by the methods that save memory."""
    yield "| smallest card, in GB | " + " | ".join(LARGEST) + " |"
    yield "|---" * (1 + len(LARGEST)) + "|"
    for model in IN_SHORT:
        cards = (smallest_card(needed(model, method)).strip("*") for method in LARGEST.values())
        yield f"| {model} | " + " | ".join(cards) + " |"


def section(tables: Iterable[str]) -> str:
    """The lines between the markers of a page."""
    return "\n".join([BEGIN, "", *tables, "", END])


def tables() -> Iterator[str]:
    """The lines of docs/finetuning.md."""
    between = "The largest of these models that each card holds, and the most rows of its micro-batch, up to 16:"
    yield from (*needs(), "", between, "", *by_card())


def main() -> None:
    for page, lines in ((PAGE, tables()), (README, in_short())):
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        page.write_text(before + section(lines) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
