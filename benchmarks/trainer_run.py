"""transformers' own model under transformers' Trainer: bf16 over float32 weights, fused AdamW, SDPA, no gradient
checkpointing; on request torch.compile, Liger's kernels, cuDNN's attention, PEFT's adapters over weights in bf16.

It starts from handgrad's initial weights and sees handgrad's samples in their order, so its losses compare.
"""

import importlib
import importlib.util
import math
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import More, Tokens
from benchmarks.gpu_twin import use_attention
from benchmarks.peer_programs import initial_weights
from handgrad.errors import UsageError
from handgrad.interop import huggingface
from handgrad.machine import devices
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape, RunConfig

STEPS = 1 << 20  # of the Trainer, which the end of the process stops
TRAINER, TRL = "transformers", "trl"


@dataclass(frozen=True)
class TrainerSwitches:
    """The choices of a Trainer. All off is a Trainer as a tutorial writes it."""

    compiled: bool = False  # torch_compile=True
    liger: bool = False  # use_liger_kernel=True: norms, rotary positions, SwiGLU, the head with its loss (not compiled)
    cudnn: bool = False  # SDPA with cuDNN's kernel, not the one that torch takes by itself
    lora: bool = False  # adapters of the run's rank in all seven projections
    varlen: bool = False  # of TRL: torch's flash attention over documents end to end, not SDPA under a mask
    trl: bool = False  # the name is TRL's


def trainer_switches(name: str) -> TrainerSwitches | None:
    """The switches of a contender called "transformers" or "trl", each a +OPTION; None for another name."""
    kind, *options = name.split("+")
    known = {*TrainerSwitches.__dataclass_fields__} - {"trl"} - ({"varlen"} if kind == TRAINER else set())
    if kind not in (TRAINER, TRL) or not {*options} <= known:
        return None
    return TrainerSwitches(**dict.fromkeys(options, True), trl=kind == TRL)


class Samples(torch.utils.data.Dataset):
    """handgrad's samples. The targets are those of handgrad, of which the last belongs to the following sample."""

    def __init__(self, tokens: Tokens, config: RunConfig):
        self.tokens, self.config = tokens, config

    def __len__(self) -> int:
        return STEPS * self.config.tokens_per_step // self.config.sequence_length

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        inputs, targets = (torch.zeros(1, self.config.sequence_length, dtype=torch.int64) for _ in range(2))
        self.tokens.source.fill(inputs, targets, sample)
        return {"input_ids": inputs[0], "labels": targets[0], "shift_labels": targets[0]}


def their_config(shape: ModelShape, **more: Any) -> Any:
    """transformers' configuration of this shape."""
    import transformers

    content = huggingface.format_of(shape.architecture).their_config(shape, 0.0)
    content |= {"pad_token_id": None} | more  # a padding token's row would not be trained
    return transformers.AutoConfig.for_model(content.pop("model_type"), **content)


def own_model(shape: ModelShape, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of this shape with handgrad's initial weights of `seed`."""
    import transformers
    from transformers.initialization import no_init_weights

    config = their_config(shape, use_cache=False)
    with no_init_weights():  # all are loaded below
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    flat, weights = initial_weights(shape, seed), {}
    for row in parameter_table(shape):
        weights |= huggingface.parts(shape, row, row.stored(flat))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def with_adapters(model: Any, config: RunConfig) -> Any:
    """The model with the adapters of the run in PEFT."""
    import peft

    from handgrad.networks.lora import parse_lora

    lora = parse_lora(config.lora)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wanted = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, wanted)


def check_installed(switches: TrainerSwitches, device: torch.device) -> None:
    """Raises `UsageError` where a library is not there, and on a CPU for Liger's kernels."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        raise UsageError("transformers or accelerate is not installed here: pip install 'transformers[torch]'")
    if switches.liger and importlib.util.find_spec("liger_kernel") is None:
        raise UsageError("liger-kernel is not installed here: pip install 'liger-kernel>=0.8'")
    if switches.liger and device.type == "cpu":
        raise UsageError("Liger's kernels need a GPU, found device cpu")


def leave_loss_uncompiled() -> None:
    """Keeps Liger's head with its loss out of torch.compile's graph, by one line that users of both can have as well.

    torch 2.11 cannot trace it: its shape-only `addmm` takes `out_dtype` for `beta`, and the first step ends in a
    `TorchRuntimeError`. torch 2.13 can. The loss reads a count from the device, so that it breaks the graph anyway; the
    rest of the model is compiled, Liger's norms, rotary positions and SwiGLU in it.
    """
    loss = importlib.import_module("liger_kernel.transformers.model.loss_utils")
    loss.fixed_fused_linear_cross_entropy = torch.compiler.disable(loss.fixed_fused_linear_cross_entropy)


class TrainerRun:
    """Steps of a Trainer, which runs in a thread of its own and waits between the turns."""

    def __init__(self, config: RunConfig, tokens: Tokens, switches: TrainerSwitches):
        self.config, self.completed = config, 0
        self.device = devices.resolve_device(config.device)
        check_installed(switches, self.device)
        if switches.cudnn:
            use_attention("cudnn", self.device)
        self.may_go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.losses: list[Tensor] = []
        self.micro_losses: list[Tensor] = []
        self.error: BaseException | None = None
        self.leaves_loss = switches.compiled and switches.liger
        self.trainer = self.make_trainer(tokens, switches)
        threading.Thread(target=self.work, daemon=True).start()

    def make_trainer(self, tokens: Tokens, switches: TrainerSwitches) -> Any:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(**self.arguments(switches))
        model, samples = self.make_model(tokens, switches), Samples(tokens, self.config)
        return self.listening(Trainer)(model=model, args=arguments, train_dataset=samples, callbacks=[self.turns()])

    def turns(self) -> Any:
        """The callback that ends a turn after a step."""
        from transformers import TrainerCallback

        run = self

        class Turns(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                run.end_step()

        return Turns()

    def listening(self, base: Any) -> Any:
        """A trainer's class that also tells the losses of its micro-batches."""
        run = self

        class Listening(base):
            def training_step(self, *arguments: Any, **options: Any) -> Tensor:
                loss = super().training_step(*arguments, **options)
                run.micro_losses.append(loss.detach())
                return loss

        return Listening

    def make_model(self, tokens: Tokens, switches: TrainerSwitches) -> Any:
        dtype = torch.bfloat16 if switches.lora and self.config.precision == "bf16" else torch.float32
        model = own_model(self.config.shape(tokens.vocab_size), self.config.seed, dtype)
        return with_adapters(model, self.config) if switches.lora else model

    def arguments(self, switches: TrainerSwitches) -> dict[str, Any]:
        """The keyword arguments of transformers' `TrainingArguments`."""
        config = self.config
        return {
            "output_dir": tempfile.gettempdir(),  # nothing is written
            "per_device_train_batch_size": config.micro_batch,
            "gradient_accumulation_steps": config.micro_steps,
            "max_steps": STEPS,
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": "constant",
            "weight_decay": config.weight_decay,
            "adam_beta1": config.beta1,
            "adam_beta2": config.beta2,
            "adam_epsilon": config.adam_epsilon,
            "max_grad_norm": config.clip_norm,
            "optim": "adamw_torch_fused",
            "bf16": config.precision == "bf16",
            "torch_compile": switches.compiled,
            "use_liger_kernel": switches.liger,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,  # it would take away the targets
            "dataloader_pin_memory": self.device.type == "cuda",
            "use_cpu": self.device.type == "cpu",
            "save_strategy": "no",
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,  # it waits for the device after every micro-batch
            "disable_tqdm": True,
            "report_to": "none",
            "seed": config.seed,
        }

    def work(self) -> None:
        """The Trainer's thread."""
        self.may_go.acquire()
        try:
            if self.leaves_loss:
                leave_loss_uncompiled()
            self.trainer.train()
        except BaseException as error:  # for the thread that asks
            self.error = error
        self.done.release()

    def end_step(self) -> None:
        """In the Trainer's thread, after every step: waits where a turn is over."""
        self.losses.append(torch.stack(self.micro_losses).sum())
        self.micro_losses.clear()
        self.completed += 1
        if not self.more(len(self.losses)):
            self.done.release()
            self.may_go.acquire()

    def turn(self, more: More) -> list[float]:
        """Makes steps while `more` returns True, at least one; returns their losses."""
        self.more = more
        self.losses.clear()
        self.may_go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        losses = [loss.item() for loss in self.losses]
        assert all(map(math.isfinite, losses)), f"expected finite losses of the Trainer, found {losses}"
        return losses
