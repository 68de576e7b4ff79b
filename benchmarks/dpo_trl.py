"""Steps of direct preference optimisation beside TRL's DPOTrainer: the same weights, pairs and order, so the same losses.

    python -m benchmarks.dpo_trl benchmarks/results/cpu-dpo-trl.json

A tiny Llama in float32 on a CPU; TRL's reference is a second model, handgrad's are sums that it computed before.
"""

import dataclasses
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.contenders import Settings, Tokens, tokens_of
from benchmarks.record import keep_commit, rounded, version, write_record
from benchmarks.trainer_run import TrainerRun, TrainerSwitches
from benchmarks.trl_run import stand_in_tokenizer
from handgrad.evaluation.preferences import answer_sums
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.settings.objective import DPO

STEPS, PAIRS_PER_STEP, LENGTH = 20, 8, 64
LARGEST_DIFFERENCE = 1e-5  # nats


class MadePairs:
    """Made-up pairs: a prompt and two answers of 5 to 25 tokens each. Sample 2 i is the chosen one of pair i."""

    trains_all = False

    def __init__(self, pool: np.ndarray, seed: int):
        self.pool, self.seed, self.references = pool, seed, np.zeros(0, np.float32)
        self.samples_per_epoch = 2 * STEPS * PAIRS_PER_STEP

    def pair(self, number: int) -> list[list[int]]:
        """The tokens of a prompt, a chosen and a rejected answer."""
        draw = np.random.default_rng((self.seed, number))
        return [draw.choice(self.pool, draw.integers(5, 26)).tolist() for _ in range(3)]

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, references: Tensor | None = None) -> None:
        inputs.zero_()
        targets.fill_(-1)
        for row in range(len(inputs)):
            prompt, *answers = self.pair((first_sample + row) // 2)
            tokens = [*prompt, *answers[(first_sample + row) % 2]]
            inputs[row, : len(tokens)] = torch.tensor(tokens)
            targets[row, len(prompt) - 1 : len(tokens) - 1] = torch.tensor(tokens[len(prompt) :])
        if references is not None:
            references.copy_(torch.from_numpy(self.references[first_sample : first_sample + len(inputs)]))


def our_losses(config: RunConfig, pairs: MadePairs, vocab_size: int) -> list[float]:
    training: Any = assemble(resolve(config, vocab_size), pairs)
    model = training.design.shape, training.validation_ops, training.state.weights, training.state.activations
    source: Any = pairs
    pairs.references = answer_sums(*model, source, pairs.samples_per_epoch).astype(np.float32)
    return [training.stepper.step(step).loss for step in range(STEPS)]


class DpoRun(TrainerRun):
    """Steps of a DPOTrainer on the same pairs."""

    def make_trainer(self, tokens: Tokens, switches: TrainerSwitches) -> Any:
        import pyarrow
        from datasets import Dataset
        from datasets.table import InMemoryTable
        from trl import DPOConfig, DPOTrainer

        class Prepared(DPOTrainer):
            def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
                return dataset  # it holds tokens

        source: Any = tokens.source
        every = [source.pair(number) for number in range(STEPS * PAIRS_PER_STEP)]
        columns = zip(("prompt_ids", "chosen_ids", "rejected_ids"), zip(*every, strict=True), strict=True)
        rows = Dataset(InMemoryTable(pyarrow.table({name: list(ids) for name, ids in columns})), fingerprint="pairs")
        settings = self.arguments(switches) | {"per_device_train_batch_size": self.config.micro_batch // 2}
        arguments = DPOConfig(**settings, beta=self.config.dpo_beta, max_length=LENGTH, gradient_checkpointing=False)
        model, first = (self.make_model(tokens, switches) for _ in range(2))
        common = {"model": model, "ref_model": first, "args": arguments, "callbacks": [self.turns()]}
        return self.listening(Prepared)(processing_class=stand_in_tokenizer(), train_dataset=rows, **common)


def main(path: str) -> int:
    keep_commit()
    sizes = {"micro_batch": 8, "micro_steps": 2 * PAIRS_PER_STEP // 8, "sequence_length": LENGTH, "vocab_size": 300}
    settings = Settings("tiny-llama", **sizes, precision="fp32", device="cpu", learning_rate=1e-3)
    config = check(dataclasses.replace(settings.config(), objective=DPO, init_from="random weights"))
    tokens = tokens_of(settings)
    source: Any = tokens.source
    pairs: Any = MadePairs(np.unique(source.pool), settings.seed)
    ours = our_losses(config, pairs, tokens.vocab_size)
    theirs_run = DpoRun(config, tokens._replace(source=pairs), TrainerSwitches(trl=True))
    theirs = theirs_run.turn(lambda done: done < STEPS)
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print("\n".join(f"step {n}: {a:.7f} {b:.7f}" for n, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1)))
    print(f"largest difference {largest:.2g}")
    libraries = {name: version(name) for name in ("trl", "transformers", "accelerate")}
    figures = {"handgrad": rounded(ours, 7), "trl": rounded(theirs, 7), "largest_difference": largest}
    write_record(path, torch.device("cpu"), settings=dataclasses.asdict(settings), libraries=libraries, **figures)
    return 1 if largest > LARGEST_DIFFERENCE else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
