"""Set-up of the reference, which needs nothing beside its buffers."""

from collections.abc import Callable


def versions() -> dict[str, str]:
    """Names all that the bits depend on beside torch and the device: nothing."""
    return {}


def check_sizes(*, length: int, num_heads: int, channels: int) -> None:
    """Any model runs."""


def compile_ahead(*launches: Callable[[], None]) -> None:
    """Compiles what the launches need: nothing."""


def scratch_bytes(*, tokens: int, channels: int, widest: int) -> int:
    """Bytes of `scratch` that the operations of a model need: none. `widest`: columns of the widest product in a block."""
    return 0
