"""The loss that a run minimises: of the next token, of pairs of answers (`joins.preference`), the divergence from a teacher
(`joins.distill`), or of the model's own answers, weighted by their rewards (`joins.policy`). With a reward, a teacher too
reads the model's own answers."""

from typing import Any

from handgrad.errors import UsageError

AUTO, TOKENS, DPO, DISTILL, REWARD = OBJECTIVES = "auto", "tokens", "dpo", "distill", "reward"
AUTO, FORWARD, REVERSE = DIVERGENCES = "auto", "forward", "reverse"


def check_objective(config: Any) -> Any:
    """Returns a `RunConfig`; raises `UsageError` for settings that its objective does not support."""
    no_teacher = ("teacher", "none; learning from one is objective distill", not config.teacher)
    no_reward = ("reward", f"none; answers are rewarded by objective {REWARD}", not config.reward)
    precision = ("precision", "bf16, fp16 or fp32", config.precision != "fp8")
    answers = (precision, ("packing", "stream", config.packing in (AUTO, "stream")), ("dropout", "0", not config.dropout))
    group = config.rollouts * config.sequence_length  # tokens: a row for each rollout
    own_answers = (
        ("init_from", "the model that answers first", bool(config.init_from)),
        ("batch_schedule", "one size for all steps", not config.batch_schedule),
        ("overfit_one_batch", "false", not config.overfit_one_batch),
        ("tokens_per_step", "a multiple of rollouts * sequence_length", config.tokens_per_step % group == 0),
        *answers,
    )
    needs = {
        AUTO: (),
        TOKENS: (no_teacher, no_reward),
        DPO: (
            ("init_from", "the model of the references", bool(config.init_from)),
            ("micro_batch", "a multiple of 2", config.micro_batch % 2 == 0),
            *answers,
            no_teacher,
            no_reward,
        ),
        DISTILL: (
            ("teacher", "the model to learn from", bool(config.teacher)),
            *(own_answers if config.reward else (precision,)),
        ),
        REWARD: (
            ("reward", "a name or FILE.py:FUNCTION", config.reward not in ("", "none")),
            ("rollouts", "2 or more", config.rollouts > 1),
            *own_answers,
            no_teacher,
        ),
    }
    for name, needed, holds in needs[config.objective]:
        if not holds:
            raise UsageError(f"objective {config.objective} needs {name}: {needed}, found {getattr(config, name)!r}")
    return config
