"""The configuration of a run: one frozen dataclass, its checks, TOML in and out.

Every field is a command-line flag and a TOML key of the same name; its unit is in its name or help, its range next to
its default. Presets are functions in `presets.py` that return a `RunConfig`.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from handgrad.errors import DataError, UsageError
from handgrad.names import check_choice, nearest_name
from handgrad.networks import NETWORKS, VOCABULARY_MULTIPLE as VOCABULARY_MULTIPLE, ModelShape as ModelShape, check_network
from handgrad.networks.fp8 import HEAD_GEMMS, check_fp8
from handgrad.networks.lora import check_lora
from handgrad.networks.modern import SOFTCAP as SOFTCAP, TECHNIQUES as TECHNIQUES, of_stored, resolve_techniques
from handgrad.parsing import parse_toml
from handgrad.settings.batch_schedule import BatchSchedule, parse_schedule
from handgrad.settings.objective import DIVERGENCES, FORWARD, OBJECTIVES, TOKENS, check_objective

GPT2_VOCABULARY = 50257
EPOCHS = "epochs"  # no field: another way to set `steps`

KINDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text without NUL"}

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "fp8")
AUTO = "auto"  # the precision that suits the device: `devices.auto_precision`; the packing that suits the data
FP8_GRADIENTS = (AUTO, "e4m3", "e5m2", "mixed")
FP8_SCALINGS = ("delayed", "current")
TUNED = "tuned"
MOMENTS = ("fp32", "bf16")
BACKENDS = ("auto", "kernels", "reference")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd", "trapezoid")
ARCHITECTURES = tuple(NETWORKS)
STREAM, MASKED, WHOLE = "stream", "masked", "whole"
PACKINGS = (AUTO, STREAM, MASKED, WHOLE)  # auto: WHOLE for chats, else STREAM


class Rule(NamedTuple):
    """A condition on a value; a message reads "NAME must be TEXT"."""

    text: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        if not self.holds(value):
            raise UsageError(f"{name} must be {self.text}, found {value}")


def at_most(most: float) -> Rule:
    return Rule(f"at most {most}", lambda value: value <= most)


def between(least: float, most: float, unit: str = "") -> Rule:
    return Rule(f"{least} to {most}{unit}", lambda value: least <= value <= most)


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
ABOVE_0 = Rule("above 0", lambda value: 0 < value < math.inf)
BELOW_1 = Rule("in [0, 1)", lambda value: 0 <= value < 1)
BELOW_2_32 = Rule("below 2^32", lambda value: value < 1 << 32)
UP_TO_2 = Rule("0, 1 or 2", lambda value: value in (0, 1, 2))
UP_TO_3 = Rule("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3))
LANES = Rule("a power of two up to 4096, or 0", lambda value: value & (value - 1) == 0 and 0 <= value <= 4096)
SECONDS = between(1, 86400)
NO_TILDE = Rule("a folder whose ~ is written out", lambda value: not str(value).startswith("~"))


def option(default: Any, help: str, *rules: Rule, choices: tuple[str, ...] = (), free: bool = False) -> Any:
    """A field of the configuration: its default, its help with the unit, its range (0 or more by default, for numbers) or
    choices. `free` marks a field that may change when a run resumes: it does not touch the numbers of the training."""
    if not rules and isinstance(default, int | float):
        rules = (NOT_NEGATIVE,)
    return field(default=default, metadata={"help": help, "rules": rules, "choices": choices, "free": free})


@dataclass(frozen=True)
class RunConfig:
    """All settings of a training run. Equal configs on equal machines give equal bits."""

    # where
    data: str = option("shards", "folder of prepared shards, or several by weight: a=0.8,b=0.2 (docs/data.md)", free=True)
    out: str = option("runs/run", "run folder: config, metrics, checkpoints, report", NO_TILDE, free=True)

    # the model
    architecture: str = option("gpt2", "gpt2, modern, llama, gemma3, olmo or vqvae (docs/README.md)", choices=ARCHITECTURES)
    techniques: str = option("", f"all that the modern network has, of {', '.join(TECHNIQUES)}; or none (empty: defaults)")
    llama: str = option("", "settings of a Llama beside its sizes, like kv_heads=2,rotary_base=500000.0,tied")
    gemma3: str = option("", "settings of a Gemma 3 beside its sizes, like kv_heads=1,feed_forward=2048,window=512")
    olmo: str = option("", "settings of an OLMo beside its sizes, like feed_forward=11008,window=4096,rope=yarn")
    vqvae: str = option("", "settings of a vqvae beside its sizes, like size=32x32,levels=8.5.5.5 or codebook=1000")
    num_layers: int = option(12, "number of transformer blocks", AT_LEAST_1, at_most(1000))
    num_heads: int = option(12, "attention heads per block; divides channels", AT_LEAST_1)
    channels: int = option(768, "width of the residual stream", AT_LEAST_1, at_most(1 << 16))
    sequence_length: int = option(1024, "tokens per sample, the longest context of the model", AT_LEAST_1, at_most(1 << 20))
    init_from: str = option("", "weights to start from: run, RUN/best, checkpoint, transformers folder, Hub name, .bin")
    freeze: str = option("", "parameters that are not trained, with commas: wte,wpe,blocks.0-5,blocks.*.ln1_*")
    lora: str = option("", "train only adapters, like rank=16,alpha=32,on=q+v (docs/lora.md; empty: all weights)")

    # the batch
    steps: int = option(1000, "optimizer steps of the whole run", AT_LEAST_1, at_most(10**9))
    tokens_per_step: int = option(524288, "tokens per step, a multiple of micro_batch * sequence_length", AT_LEAST_1)
    batch_schedule: str = option("", "later sizes of a step, STEP:TOKENS with commas: TOKENS per step after STEP steps")
    micro_batch: int = option(8, "samples in a forward and backward pass: decides memory, speed, rounding", AT_LEAST_1)
    lanes: int = option(0, "logical data-parallel width, a power of two that ranks divide (0: one per rank)", LANES)
    packing: str = option(
        AUTO,
        "stream: attention crosses documents; masked: it does not; whole: nor does a row cut them. auto: whole for chats",
        choices=PACKINGS,
    )
    objective: str = option(AUTO, "tokens, dpo: pairs, distill: a teacher, reward: answers", choices=OBJECTIVES)
    teacher: str = option("", "of distill: the model to learn from, named like init_from's; same tokenizer", free=True)
    teacher_divergence: str = option(AUTO, "KL(teacher || student), or reverse (auto: on own answers)", choices=DIVERGENCES)
    dpo_beta: float = option(0.1, "of dpo: how far a margin may move from the first model; smaller is freer", ABOVE_0)
    dpo_smoothing: float = option(0.0, "of dpo: share of pairs whose answers may be the wrong way round", between(0, 0.49))
    reward: str = option(
        "", "of own answers: questions, reverse, exact, number, none, or FILE.py:FUNCTION (docs/reward.md)"
    )
    rollouts: int = option(8, "of own answers: answers to each prompt of a step", between(1, 1024))
    answer_tokens: int = option(0, "of own answers: longest answer (0: as long as a row leaves room for)")
    answer_stop: str = option("", "of own answers: text that ends an answer, which the reward does not see")
    updates: int = option(1, "of own answers: steps that train on the same rollouts", between(1, 64))
    clip_ratio: float = option(0.2, "of updates above 1: PPO's bound on a token's ratio of probabilities", between(0.01, 1))
    reward_seconds: int = option(10, "of a reward of your own: longest time for one answer", SECONDS, free=True)
    overfit_one_batch: bool = option(False, "train on the first batch over and over (to debug: the loss must go to 0)")

    # the optimizer
    learning_rate: float = option(6e-4, "peak learning rate")
    optimizer: str = option("adamw", "adamw, or muon for the blocks' matrices and AdamW for the rest", choices=OPTIMIZERS)
    matrix_learning_rate: float = option(0.0, "muon's peak learning rate (0: learning_rate)")
    schedule: str = option("cosine", "shape of the decay after the warm-up", choices=SCHEDULES)
    warmup_steps: int = option(0, "steps of linear warm-up")
    cooldown_fraction: float = option(0.2, "of the steps, at their end: the decay of wsd and trapezoid", between(0, 1))
    final_learning_rate_fraction: float = option(0.1, "learning rate at the end, as a fraction of the peak")
    weight_decay: float = option(0.1, "AdamW decay of matrices and embeddings")
    beta1: float = option(0.9, "AdamW decay of the first moment", BELOW_1)
    beta2: float = option(0.95, "AdamW decay of the second moment", BELOW_1)
    adam_epsilon: float = option(1e-8, "AdamW epsilon, added to the root of the second moment", ABOVE_0)
    clip_norm: float = option(1.0, "largest global gradient norm; larger gradients are scaled down (0: off)")
    skip_loss_z: float = option(0.0, "skip updates whose loss is this many standard deviations above the last 128 (0: off)")
    skip_norm_z: float = option(0.0, "the same for the gradient norm (0: off)")
    max_skips: int = option(20, "stop with exit code 76 after this many skipped updates in a row", AT_LEAST_1)
    seed: int = option(1337, "of initial weights, the order of samples, dropout masks, rollouts", NOT_NEGATIVE, BELOW_2_32)
    dropout: float = option(0.0, "dropout probability, at GPT-2's four places (0: none)", between(0, 0.99))

    # several processes
    zero: int = option(1, "ZeRO: ranks share 0 nothing, 1 master weights and moments, 2 also gradients", UP_TO_2, free=True)
    reduce_precision: str = option("fp32", "of gradients between lanes", choices=("fp32", "bf16"))
    check_ranks_every: int = option(1, "steps between comparisons of the ranks' weights, bit by bit (0: never)", free=True)
    join_seconds: int = option(300, "rendezvous timeout: longest wait for the other ranks at the start", SECONDS, free=True)
    silence_seconds: int = option(30, "heartbeat timeout: longest silence of a rank", SECONDS, free=True)
    stall_seconds: int = option(600, "longest time of a rank in one operation", SECONDS, free=True)

    # fp8: GEMMs of the blocks on 8-bit numbers, the rest in bf16
    fp8_keep_bf16: str = option(TUNED, "GEMMs that stay in bf16: qkv, proj, mlp, of one layer: 3.mlp; tuned: as measured")
    fp8_head: str = option(
        AUTO, "GEMMs of the loss head in fp8: forward, dgrad, wgrad, with commas, or none; auto: all, none with lora"
    )
    fp8_gradients: str = option(AUTO, "of gradients: digits, range, or mixed; auto: as measured", choices=FP8_GRADIENTS)
    fp8_scaling: str = option("delayed", "scales from the steps before, or (slower) current ones", choices=FP8_SCALINGS)
    fp8_window: int = option(16, "steps whose largest number sets a delayed scale", AT_LEAST_1)
    fp8_margin: int = option(0, "binades that a scale leaves free above that number", between(0, 8, " binades"))
    fp8_count_every: int = option(50, "steps between counts of clipped and vanished numbers", AT_LEAST_1)
    fp8_on_saturation: str = option("warn", "reaction to a tensor that saturates", choices=("warn", "widen"))
    fp8_saturation_steps: int = option(8, "steps in a row that clip numbers before that reaction", AT_LEAST_1)

    # watching
    eval_every: int = option(250, "steps between validations (0: only at the end)", free=True)
    eval_tokens: int = option(1 << 20, "tokens per validation, at most the whole split", AT_LEAST_1, free=True)
    eval_stride: int = option(
        0, "tokens between validation windows; each scores its last ones (0: sequence_length: none overlap)", free=True
    )
    eval_tasks: str = option("", "tasks after each validation: hellaswag=FILE,lambada=FILE,... (empty: none)", free=True)
    eval_task_examples: int = option(1000, "examples per task, from the first on (0: all)", free=True)
    sample_every: int = option(0, "steps between samples of text (0: only at the end)", free=True)
    sample_tokens: int = option(96, "tokens per sample of text (0: no samples)", free=True)
    log_every: int = option(10, "steps between plain log lines (every step goes into metrics.jsonl)", AT_LEAST_1, free=True)
    log_to: str = option("", "trackers that get every figure: wandb, tensorboard, trackio; with commas", free=True)
    audit_every: int = option(0, "steps between links of audit.jsonl, for `handgrad verify` (0: none)", free=True)
    gpu_every: int = option(10, "steps between readings of GPU power, clocks and temperature (0: never)", free=True)

    # saving
    save_every: int = option(1000, "steps between checkpoints (0: only at the end)", free=True)
    keep_checkpoints: int = option(2, "newest checkpoints to keep (0: all)", free=True)
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this (0: none)", free=True)
    keep_best: bool = option(False, "also save and keep the step with the lowest validation loss, RUN/best", free=True)
    async_save: bool = option(True, "write checkpoints behind training, from a copy in host memory", free=True)

    # the machine
    device: str = option("auto", "auto takes a CUDA GPU if there is one, else the CPU", choices=DEVICES)
    precision: str = option(
        AUTO,
        "of weights, activations and GEMMs. auto: bf16 on a GPU that has it, else fp16; fp32 on a CPU",
        choices=(AUTO, *PRECISIONS),
    )
    backend: str = option("auto", "auto: the kernels on a CUDA GPU, torch's on a CPU, else the reference", choices=BACKENDS)
    master_weights: bool = option(True, "keep fp32 weights beside bf16 ones; false: bf16 only, rounded stochastically")
    moments: str = option("fp32", "AdamW's m and v; bf16: half the memory, rounded stochastically", choices=MOMENTS)
    offload: bool = option(False, "keep AdamW's master weights and moments in host memory, pinned", free=True)
    recompute: int = option(
        0,
        "0: keep all activations; 1: redo the hidden layer in the backward; 2: layer norms as well; 3: whole blocks",
        UP_TO_3,
        free=True,
    )
    head_chunk_tokens: int = option(0, "tokens per chunk of the loss head (0: of 512 MiB, or 1/4 of the micro-batch)")

    def __post_init__(self) -> None:
        object.__setattr__(self, "techniques", resolve_techniques(self.architecture, self.techniques))

    def shape(self, vocab_size: int) -> ModelShape:
        """The model's sizes with the vocabulary of the data."""
        sizes = self.sequence_length, self.num_layers, self.num_heads, self.channels, self.architecture, self.techniques
        return ModelShape(vocab_size, *sizes, self.llama, self.gemma3, self.olmo, self.vqvae)

    @property
    def batch(self) -> BatchSchedule:
        """The tokens of every step."""
        return parse_schedule(self.tokens_per_step, self.batch_schedule)

    @property
    def packed(self) -> bool:
        """True if attention does not cross the documents in a sample."""
        return self.packing in (MASKED, WHOLE)

    @property
    def fp8_head_gemms(self) -> str:
        """`fp8_head` with "auto" and "none" replaced by the GEMMs that they stand for."""
        return {AUTO: "" if self.lora else ",".join(HEAD_GEMMS), "none": ""}.get(self.fp8_head, self.fp8_head)

    @property
    def micro_steps(self) -> int:
        """Micro-batches of a lane in the first optimizer step."""
        return self.tokens_per_step // (self.sequence_length * self.micro_batch * max(1, self.lanes))


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(RunConfig)}


def check_packing(config: RunConfig) -> RunConfig:
    """Returns `config`; raises `UsageError` if its packing does not allow overlapping validation windows."""
    if config.packing == WHOLE and config.eval_stride:
        raise UsageError(f"packing {WHOLE} has no eval_stride, found {config.eval_stride}; try 0, or --packing {STREAM}")
    return config


def check_value(name: str, value: Any) -> None:
    """Raises `UsageError` for a value outside the range of field `name`, or not among its choices."""
    about = FIELDS[name].metadata
    for rule in about["rules"]:
        rule.check(name, value)
    if about["choices"]:
        check_choice(name, value, about["choices"])


def check(config: RunConfig) -> RunConfig:
    """Returns `config` if it can run; raises `UsageError` with the field, its value and one that would work."""
    for name in FIELDS:
        check_value(name, getattr(config, name))
    check_network(config)
    if not config.master_weights and config.precision not in (AUTO, "bf16", "fp8"):
        raise UsageError(f"master_weights false needs precision bf16 or fp8, found {config.precision}")
    check_optimizer(config)
    if config.precision == "fp8":
        check_fp8(config)
    if config.lora:
        needs = (("optimizer", "adamw"), ("dropout", 0.0), ("freeze", ""), ("offload", False))
        refused = [(name, getattr(config, name), needed) for name, needed in needs]
        refused.append(("fp8_head", config.fp8_head_gemms or "none", "none"))
        check_lora(config.lora, config.shape(VOCABULARY_MULTIPLE), config.init_from, refused)
    check_stride(config.eval_stride, config.sequence_length)
    check_packing(config)
    check_objective(config)
    if config.keep_every and (not config.save_every or config.keep_every % config.save_every):
        every, save = config.keep_every, config.save_every
        remedy = f"keep-every {save * max(1, round(every / save))}" if save else f"save-every {every}"
        raise UsageError(f"keep_every must be a multiple of save_every, found {every} and {save}; try --{remedy}")
    check_batch(config)
    return config


def check_optimizer(config: RunConfig) -> None:
    """Raises `UsageError` for settings that the optimizer does not support."""
    if config.optimizer != "muon":
        if config.matrix_learning_rate:
            raise UsageError(f"matrix_learning_rate is muon's, found optimizer {config.optimizer}; try --optimizer muon")
        return
    if not config.master_weights:
        raise UsageError("optimizer muon needs float32 master weights, found master_weights false")
    if config.moments != "fp32":
        raise UsageError(f"optimizer muon needs float32 moments, found moments {config.moments}")
    if config.matrix_learning_rate and not config.learning_rate:
        remedy = f"try --learning-rate {RunConfig.learning_rate:g}"
        raise UsageError(f"matrix_learning_rate is kept relative to learning_rate, expected one above 0, found 0; {remedy}")
    if config.offload:
        raise UsageError("offload moves AdamW's state, found optimizer muon; leave it off, or use --optimizer adamw")


def check_batch(config: RunConfig) -> None:
    """Raises `UsageError` if the step of some stage is not a whole number of micro-batches for each lane."""
    factors = {"micro_batch": config.micro_batch, "sequence_length": config.sequence_length}
    if config.lanes > 1:
        factors = {"lanes": config.lanes, **factors}
    least = math.prod(factors.values())
    for stage in config.batch.stages:
        if (tokens := stage.tokens_per_step) % least:
            nearest = max(1, round(tokens / least)) * least
            name, actual, remedy = "tokens_per_step", f"{tokens}", f"--tokens-per-step {nearest}"
            if stage.first_step:
                name, actual, remedy = "tokens in batch_schedule", f"{stage}", f"{stage.first_step}:{nearest}"
            raise UsageError(
                f"{name} must be a multiple of {' * '.join(factors)} = {' * '.join(map(str, factors.values()))} ="
                f" {least}, found {actual}; try {remedy}"
            )


def check_stride(eval_stride: int, length: int, setting: str = "sequence_length") -> None:
    """Raises `UsageError` for windows that start further apart than their `length`: they would skip tokens. `setting`: the
    name of the setting that gives `length`."""
    if eval_stride > length:
        fault = f"eval_stride must be at most {setting} = {length}, found {eval_stride}"
        raise UsageError(f"{fault}; try --eval-stride {max(1, length // 2)}, half a window")


def convert(name: str, value: Any) -> Any:
    """`value` (a command-line string or a TOML value) as the type of field `name`; `UsageError` if it does not convert."""
    if name not in FIELDS:
        raise UsageError(f"unknown setting {name!r}{nearest_name(name, FIELDS)}; `handgrad train --help-all` lists all")
    kind = FIELDS[name].type
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        if isinstance(value, bool):
            raise ValueError
        if kind is int:
            number = float(value) if not isinstance(value, int) else value  # accepts 1e6 and 2.0
            if number != int(number):
                raise ValueError
            return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else int(number)
        if kind is float:
            return float(value)
        if not isinstance(value, str) or "\0" in value:
            raise ValueError
        return value
    except (ValueError, KeyError, OverflowError, TypeError):
        choices = FIELDS[name].metadata["choices"]
        wanted = f"one of {', '.join(choices)}" if choices else KINDS[kind]
        raise UsageError(f"{name} must be {wanted}, found {value!r}") from None


def read_toml(path: str) -> dict[str, Any]:
    """The settings in a TOML recipe, checked and converted by name; `preset`, `model` and `epochs` pass as they are."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"config file {path} does not exist; `handgrad recipes` lists the shipped ones") from None
    except OSError as error:
        whose = "; a run's is RUN/config.toml" if Path(path).is_dir() else ""
        raise DataError(f"config file {path} cannot be read: {error.strerror}{whose}") from None
    try:
        loaded = parse_toml(content)
    except ValueError as error:
        raise DataError(f"config file {path} is not valid TOML: {error}; `handgrad recipes NAME` prints one") from None
    for key in ("preset", "model"):
        if not isinstance(loaded.get(key, ""), str):
            raise UsageError(f"{key} in {path} must be text, found {loaded[key]!r}")
    loaded = of_stored(loaded)
    return {key: value if key in ("preset", "model", EPOCHS) else convert(key, value) for key, value in loaded.items()}


def to_dict(config: RunConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_toml(config: RunConfig) -> str:
    """`config` as a TOML recipe that reads back as `config`: every key with its help as a comment."""
    lines = []
    for name, known in FIELDS.items():
        lines.append(f"# {known.metadata['help']}")
        value = json.dumps(getattr(config, name), ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {value}")  # JSON's scalars are valid TOML, except escaped pairs and DEL
    return "\n".join(lines) + "\n"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Differences of two configs that change the numbers: ['seed: 1 -> 2', ...]. A missing setting has its default."""
    older = {"objective": TOKENS, "teacher_divergence": FORWARD}  # on either side
    old = {"lanes": 1, "packing": STREAM, "fp8_head": "", **older, **of_stored(old)}
    known = {name: field.default for name, field in FIELDS.items() if not field.metadata["free"]}
    then, now = ({name: one.get(name, default) for name, default in known.items()} for one in (old, older | new))
    return [f"{name}: {value!r} -> {now[name]!r}" for name, value in then.items() if value != now[name]]
