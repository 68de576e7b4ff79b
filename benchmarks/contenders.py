"""The contenders of the GPU benchmarks, and their common settings, tokens and slices of asynchronous steps."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.chat_rows import CHAT_TOKENS, ChatRows
from benchmarks.gpu_twin import TwinTrainer
from benchmarks.llama_twin import SHAPES as LLAMAS, sizes as llama_sizes
from benchmarks.twin_switches import Switches
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.errors import UsageError
from handgrad.machine import devices
from handgrad.memory.rows import initialize
from handgrad.names import nearest_name
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve, with_tuned_gemms
from handgrad.settings import presets
from handgrad.settings.config import FIELDS, MASKED, RunConfig, check
from handgrad.training.feed import Source
from handgrad.training.step import TrainStep

# (steps launched in this slice so far) -> True for another one. Called after every launch.
More = Callable[[int], bool]


@dataclass(frozen=True)
class Settings:
    """The common settings of all contenders; they travel to their processes as JSON."""

    model: str = "d12"
    micro_batch: int = 64  # samples
    sequence_length: int = 1024  # tokens per sample
    micro_steps: int = 1  # micro-batches per optimizer step
    precision: str = "bf16"  # of handgrad
    recompute: int = 0  # of handgrad
    head_chunk_tokens: int = 0  # of handgrad; 0: its own choice
    techniques: str = ""  # of a modern network, as in a run's configuration; empty: the defaults
    device: str = "cuda"
    data: str = ""  # folder of prepared shards; empty: made-up tokens
    chats: bool = False  # rows full of made-up chats, half of each trained
    vocab_size: int = 50257  # of made-up tokens
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    steps: int = 1000  # of the schedule
    seed: int = 1337

    def config(self) -> RunConfig:
        """The run that these settings describe; raises `UsageError` if there is none."""
        values = {name: getattr(self, name) for name in NAMES & FIELDS.keys()}
        tokens_per_step = self.micro_steps * self.micro_batch * self.sequence_length
        sizes = llama_sizes(self.model) if self.model in LLAMAS else presets.model(self.model)
        if sizes["architecture"] == "modern":
            values["optimizer"] = "muon"
        values |= {"packing": MASKED} if self.chats else {}
        values |= {**sizes, "techniques": self.techniques, "tokens_per_step": tokens_per_step}
        return check(RunConfig(**values))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        return Settings(**json.loads(text))


NAMES = {f.name for f in dataclasses.fields(Settings)}


class Tokens(NamedTuple):
    source: Source
    vocab_size: int
    words: str  # a description, for the record


def tokens_of(settings: Settings) -> Tokens:
    """The samples of all contenders, in order; raises `DataError` for a folder that does not fit."""
    if settings.data:
        dataset = open_dataset(settings.data)
        batches = Batches(dataset.splits["train"], settings.sequence_length, settings.seed)
        words = f"{dataset.tokenizer.kind} tokens of real text, {dataset.tokens('train')} in all"
        return Tokens(batches, dataset.tokenizer.vocab_size, words)
    words = f"made up: drawn one by one, the k-th of {settings.vocab_size} words at a rate of 1 / (k + 2.7)"
    drawn = ZipfTokens(settings.vocab_size, settings.seed)
    if settings.chats:
        chats = "rows full of chats of {} to {} tokens, the second half of each trained; ".format(*CHAT_TOKENS)
        return Tokens(ChatRows(drawn.pool, settings.seed, settings.sequence_length), settings.vocab_size, chats + words)
    return Tokens(drawn, settings.vocab_size, words)


class ZipfTokens:
    """Random tokens with about the frequencies of words; sample i is a pure function of (seed, i)."""

    POOL = 1 << 20  # tokens; then they repeat

    def __init__(self, vocab_size: int, seed: int):
        generator = np.random.default_rng(seed)
        rates = np.cumsum(1.0 / (np.arange(vocab_size) + 2.7))
        ranks = np.searchsorted(rates, generator.random(self.POOL) * rates[-1], side="right")
        self.pool = generator.permutation(vocab_size)[ranks].astype(np.int64)

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None:
        """Samples `first_sample`, ... into inputs and targets (B, T)."""
        B, T = inputs.shape
        places = first_sample * T + np.arange(B * T + 1)
        tokens = self.pool.take(places, mode="wrap")
        inputs.numpy()[:] = tokens[:-1].reshape(B, T)
        targets.numpy()[:] = tokens[1:].reshape(B, T)


class Steps:
    """handgrad's own steps, launched one ahead of their results."""

    def __init__(self, stepper: TrainStep):
        self.stepper, self.completed = stepper, 0

    def turn(self, more: More) -> list[float]:
        """Makes steps while `more` returns True, at least one; returns their losses."""
        losses: list[float] = []
        self.stepper.begin(self.completed)
        while True:
            step = self.completed
            self.stepper.finish(step)
            self.completed += 1
            another = more(len(losses) + 1)
            if another:
                self.stepper.begin(step + 1)
            losses.append(self.stepper.result(step).loss)
            if not another:
                return losses


class HandgradRun(Steps):
    """The steps of a run, alone on its device."""

    def __init__(self, config: RunConfig, tokens: Tokens, *, backend: str = "auto", graphs: bool | None = None):
        device = devices.resolve_device(config.device)
        config = with_tuned_gemms(dataclasses.replace(config, backend=backend), device)
        design, source = resolve(config, tokens.vocab_size, device=device), tokens.source
        some = source.trained_tokens if isinstance(source, ChatRows) else None
        training = assemble(design, source, graphs=graphs, trained_tokens=some)
        if config.lora:
            initialize(training.design.frozen, config.seed, training.load_frozen_weight)
        super().__init__(training.stepper)
        self.state = training.state


class Slot:
    """Host memory for the tokens of so many micro-batches of the twin and for their loss, and an event for the end."""

    def __init__(self, config: RunConfig, micro_batches: int, cuda: bool):
        size = (micro_batches, config.micro_batch, config.sequence_length)
        self.tokens, self.targets = (torch.zeros(size, dtype=torch.int64, pin_memory=cuda) for _ in range(2))
        self.loss = torch.zeros((), pin_memory=cuda)
        self.done = torch.cuda.Event() if cuda else None

    def wait(self) -> float:
        if self.done is not None:
            self.done.synchronize()
        return self.loss.item()


class TwinSteps:
    """The twin's steps on a rank's share of the samples, also launched one ahead of their results."""

    def __init__(self, trainer: TwinTrainer, source: Source, rank: int = 0, ranks: int = 1):
        self.trainer, self.source, self.rank = trainer, source, rank
        self.config, self.device = trainer.config, trainer.device
        micro_batches = self.config.micro_steps // ranks
        self.slots = [Slot(self.config, micro_batches, self.device.type == "cuda") for _ in range(2)]
        self.completed = 0

    def launch(self) -> Slot:
        slot, samples = self.slots[self.completed % 2], self.config.micro_batch
        per_step = self.config.tokens_per_step // self.config.sequence_length
        first = self.completed * per_step + self.rank * len(slot.tokens) * samples
        for m in range(len(slot.tokens)):
            self.source.fill(slot.tokens[m], slot.targets[m], first + m * samples)
        tokens, targets = (host.to(self.device, non_blocking=True) for host in (slot.tokens, slot.targets))
        loss = self.trainer.step(list(zip(tokens, targets, strict=True)))
        slot.loss.copy_(loss, non_blocking=True)
        if slot.done is not None:
            slot.done.record()
        self.completed += 1
        return slot

    def turn(self, more: More) -> list[float]:
        """Makes steps while `more` returns True, at least one; returns their losses."""
        losses: list[float] = []
        in_flight = self.launch()
        while more(len(losses) + 1):
            following = self.launch()
            losses.append(in_flight.wait())
            in_flight = following
        return [*losses, in_flight.wait()]


class TwinRun(TwinSteps):
    """The steps of a twin, alone on its device."""

    def __init__(self, config: RunConfig, tokens: Tokens, switches: Switches, *, same_weights: bool = False):
        """`same_weights`: handgrad's initial numbers, else numbers of the same distribution, which are faster to make."""
        trainer = TwinTrainer(config, config.shape(tokens.vocab_size), devices.resolve_device(config.device), switches)
        if same_weights:
            trainer.load_initial()
        else:
            trainer.draw_initial()
        super().__init__(trainer, tokens.source)


def known_names(text: str, known: list[str]) -> list[str]:
    """The names in a comma-separated list; raises `UsageError` for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown contender {name!r}{nearest_name(name, known)}; known: {', '.join(known)}")
    return names
