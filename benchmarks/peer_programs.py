"""Peers that are programs of their own, built from their sources outside this repository: llmq and llm.c.

    LLMQ=PATH/train python -m benchmarks.llama_speed --shapes Qwen2.5-0.5B --contenders handgrad,llmq
    LLMC=PATH/train_gpt2cu handgrad bench step --device cuda --contenders handgrad,llmc

A program starts from handgrad's initial weights in bf16 and takes handgrad's samples in another order. Between its turns
it stands still (SIGSTOP), but the device finishes what it has launched: up to a micro-batch of llmq's CUDA graphs, which
is why llmq is measured alone, and a few kernels of llm.c.

Sources: llmq, benchmarks/H100x1.md (CUDA graphs, weights and moments in bf16, the head in 4 chunks), and llm.c,
train_gpt2.cu and its README (`-r 0 -ge 2`).
"""

import atexit
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.contenders import More, Tokens
from handgrad.data.llmc_header import TOKENS, make_header
from handgrad.errors import UsageError
from handgrad.interop.export import write_weights
from handgrad.interop.llama import their_config
from handgrad.interop.llmc import write_model
from handgrad.memory.rows import flat_elements, initialize
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape, RunConfig

# By contender: the variable with the path of its program, and the step's line with its loss.
PROGRAMS = {"llmq": ("LLMQ", r"^\[T\] step.* loss +([0-9.]+)"), "llmc": ("LLMC", r"^step .* loss +([0-9.]+)")}
STEPS = 64  # for which it has tokens; the end of its contender stops it
LAST_LINES = 6  # of its output, in an error


def is_program(name: str) -> bool:
    """True for llmc, and for llmq with +e4m3 for its GEMMs in fp8 and +SAMPLES for a micro-batch of its own."""
    kind, *options = name.split("+")
    return name == "llmc" or (kind == "llmq" and all(option == "e4m3" or option.isdecimal() for option in options))


def program_of(name: str) -> str:
    """The path of a contender's program; raises `UsageError` where its variable names no file."""
    variable = PROGRAMS[name.split("+")[0]][0]
    path = os.environ.get(variable, "")
    if not Path(path).is_file():
        raise UsageError(f"expected the path of the built program of {name} in {variable}, found {path!r}")
    return path


def initial_weights(shape: ModelShape, seed: int) -> torch.Tensor:
    """handgrad's first numbers, all in one tensor."""
    table = parameter_table(shape)
    flat = torch.zeros(flat_elements(table))
    initialize(table, seed, lambda row, values: row.stored(flat).copy_(values))
    return flat


def drawn_tokens(tokens: Tokens, config: RunConfig) -> np.ndarray:
    """The tokens of `STEPS` steps in a row, and one more."""
    samples = STEPS * config.tokens_per_step // config.sequence_length
    inputs, targets = (torch.zeros(samples, config.sequence_length, dtype=torch.int64) for _ in range(2))
    tokens.source.fill(inputs, targets, 0)
    return np.append(inputs.numpy().reshape(-1), targets[-1, -1])


def llmq_command(folder: Path, config: RunConfig, shape: ModelShape, tokens: Tokens, name: str) -> list[str]:
    """Writes weights in bf16, sizes and tokens; returns the arguments of llmq's `train`. Raises `UsageError` for another
    family than Qwen2, the one whose sizes it reads as they are."""
    if shape.architecture != "llama" or not shape.family.qkv_bias:
        raise UsageError(f"llmq is measured on shapes of Qwen2.5, found {shape.architecture}")
    write_weights(folder / "model.safetensors", initial_weights(shape, config.seed), shape, torch.bfloat16)
    sizes = {**their_config(shape, 0.0), "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(sizes))
    words = np.frombuffer(b"BIN.TOK\n", "<i4").tolist()
    drawn = drawn_tokens(tokens, config)
    header = make_header(dict(enumerate((*words, 2, 4, len(drawn), shape.vocab_size, 0))))
    (folder / "tokens.bin").write_bytes(header + drawn.astype("<i4").tobytes())
    files = f"--model={folder} --train-file={folder}/tokens.bin --eval-file={folder}/tokens.bin"
    outputs = f"--out-dir={folder}/out --checkpoint-dir={folder}/saved --log-file={folder}/log.json --log-gpu-util=0"
    options = name.split("+")[1:]
    samples = next((int(option) for option in options if option.isdecimal()), config.micro_batch)
    micro_steps = config.tokens_per_step // (samples * config.sequence_length)
    steps = f"--batch-size={samples} --seq-length={config.sequence_length} --grad-accumulation={micro_steps}"
    steps += f" --steps={STEPS} --eval-every-n-steps=0 --ckpt-interval=100000"
    dtypes = "--model-dtype=bf16 --opt-m-dtype=bf16 --opt-v-dtype=bf16"
    dtypes += f" --matmul-dtype={'e4m3' if 'e4m3' in options else 'bf16'}"
    rates = f"--lr={config.learning_rate} --final-lr-fraction=1 --warmup=0 --weight-decay={config.weight_decay}"
    best = "--gpus=1 --use-cuda-graphs --lmhead-chunks=4"
    return f"{files} {outputs} {steps} {dtypes} {rates} {best}".split()


def llmc_command(folder: Path, config: RunConfig, shape: ModelShape, tokens: Tokens, name: str) -> list[str]:
    """Writes weights in bf16 and tokens; returns the arguments of llm.c's program. Raises `UsageError` for another
    network than GPT-2."""
    if shape.architecture != "gpt2":
        raise UsageError(f"llm.c is measured on GPT-2, found {shape.architecture}")
    flat = initial_weights(shape, config.seed)
    write_model(folder / "model.bin", shape, lambda row: row.stored(flat), torch.bfloat16)
    drawn = drawn_tokens(tokens, config)
    (folder / "tokens.bin").write_bytes(
        make_header(dict(enumerate((TOKENS, 1, len(drawn))))) + drawn.astype("<u2").tobytes()
    )
    return (
        f"-i {folder}/tokens.bin -j {folder}/tokens.bin -e {folder}/model.bin -b {config.micro_batch}"
        f" -t {config.sequence_length} -d {config.tokens_per_step} -x {STEPS} -l {config.learning_rate} -q 1 -u 0"
        f" -c {config.weight_decay} -n 0 -v {10 * STEPS} -m 1 -s 0 -h 0 -z 0 -w 1 -r 0 -ge 2"
    ).split()


COMMANDS: dict[str, Callable[..., list[str]]] = {"llmq": llmq_command, "llmc": llmc_command}


class ProgramRun:
    """The steps of a program, told by the lines that it prints."""

    def __init__(self, name: str, config: RunConfig, tokens: Tokens):
        kind, self.completed = name.split("+")[0], 0
        program, self.line = program_of(name), re.compile(PROGRAMS[kind][1])
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = COMMANDS[kind](Path(self.folder.name), config, config.shape(tokens.vocab_size), tokens, name)
        ours, theirs = os.openpty()  # line by line: behind a pipe C's library keeps lines back
        self.process = subprocess.Popen([program, *arguments], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL)
        os.close(theirs)
        atexit.register(self.process.kill)
        self.output = os.fdopen(ours, errors="replace")
        self.last_lines: list[str] = []

    def next_loss(self) -> float:
        """Waits for the end of a step; raises `UsageError` with the program's last lines if it ends instead."""
        try:
            for line in self.output:
                if match := self.line.match(line):
                    self.completed += 1
                    return float(match[1])
                self.last_lines = [*self.last_lines, line.strip()][-LAST_LINES:]
        except OSError:  # Linux's way to say that the other side of a terminal is closed
            pass
        raise UsageError(f"the program ended with {self.process.wait()}: {' / '.join(self.last_lines)}")

    def turn(self, more: More) -> list[float]:
        """Lets it go until `more` is False; returns the losses of the finished steps, at least one."""
        losses: list[float] = []
        self.process.send_signal(signal.SIGCONT)
        while not losses or more(len(losses)):
            losses.append(self.next_loss())
        self.process.send_signal(signal.SIGSTOP)
        return losses
