"""The loss that a run minimises: of the next token, or of pairs of answers (`joins.preference`)."""

from typing import Any

from handgrad.errors import UsageError

AUTO, TOKENS, DPO = "auto", "tokens", "dpo"
OBJECTIVES = (AUTO, TOKENS, DPO)


def check_objective(config: Any) -> Any:
    """Returns a `RunConfig`; raises `UsageError` for settings that a loss on pairs does not support."""
    if config.objective != DPO:
        return config
    needs = (
        ("init_from", "the model of the references", bool(config.init_from)),
        ("micro_batch", "a multiple of 2", config.micro_batch % 2 == 0),
        ("precision", "bf16, fp16 or fp32", config.precision != "fp8"),
        ("packing", "stream", config.packing in (AUTO, "stream")),
        ("dropout", "0", not config.dropout),
    )
    for name, needed, holds in needs:
        if not holds:
            raise UsageError(f"objective {DPO} needs {name}: {needed}, found {getattr(config, name)!r}")
    return config
