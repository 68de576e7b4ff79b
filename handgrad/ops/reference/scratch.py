"""What the operations need beside their buffers."""

from collections.abc import Callable


def versions() -> dict[str, str]:
    """What, beside torch and the device, the bits depend on: nothing."""
    return {}


def tuned_keep_bf16(*, tokens: int, channels: int) -> str:
    """Products of fp8 runs that are faster in bf16: nothing was measured here."""
    return ""


def check_sizes(*, length: int, num_heads: int, channels: int) -> None:
    """Any model runs."""


def compile_ahead(*launches: Callable[[], None]) -> None:
    """Compiles what the launches need: nothing."""


def scratch_bytes(*, batch: int, length: int, channels: int) -> int:
    """Bytes of `scratch` that the operations of a model need: none."""
    return 0


def statistics_parts(*, batch: int, length: int, num_heads: int, channels: int, padded_vocab_size: int) -> int:
    """Parts in which a tensor's statistics come at most: a tensor is quantised in one piece."""
    return 1
