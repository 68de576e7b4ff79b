"""The loss that a run minimises: of the next token, of pairs of answers (`joins.preference`), or the divergence from a
teacher (`joins.distill`)."""

from typing import Any

from handgrad.errors import UsageError

AUTO, TOKENS, DPO, DISTILL = "auto", "tokens", "dpo", "distill"
OBJECTIVES = (AUTO, TOKENS, DPO, DISTILL)
FORWARD, REVERSE = DIVERGENCES = "forward", "reverse"


def check_objective(config: Any) -> Any:
    """Returns a `RunConfig`; raises `UsageError` for settings that its objective does not support."""
    no_teacher = ("teacher", "none; learning from one is objective distill", not config.teacher)
    precision = ("precision", "bf16, fp16 or fp32", config.precision != "fp8")
    needs = {
        AUTO: (),
        TOKENS: (no_teacher,),
        DPO: (
            ("init_from", "the model of the references", bool(config.init_from)),
            ("micro_batch", "a multiple of 2", config.micro_batch % 2 == 0),
            precision,
            ("packing", "stream", config.packing in (AUTO, "stream")),
            ("dropout", "0", not config.dropout),
            no_teacher,
        ),
        DISTILL: (("teacher", "the model to learn from", bool(config.teacher)), precision),
    }
    for name, needed, holds in needs[config.objective]:
        if not holds:
            raise UsageError(f"objective {config.objective} needs {name}: {needed}, found {getattr(config, name)!r}")
    return config
