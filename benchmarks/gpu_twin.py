"""The peer on a GPU: the twin, tuned without writing a kernel, one switch per choice.

Everything on is the best honest `torch.compile` contender: bf16 autocast over float32 weights, the vocabulary padded to
full tiles, a fused attention kernel, fused AdamW. Everything off is GPT-2 as a lecture first writes it. `head` takes the
loss in chunks, `float8` converts the blocks' GEMMs to fp8 by torchao.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gemma_twin import GemmaGpuTwin
from benchmarks.llama_twin import LlamaGpuTwin
from benchmarks.modern_twin import ModernGpuTwin, modern_optimizer
from benchmarks.twin import Block, Twin, liger_loss, optimizer_of, padded_loss
from benchmarks.twin_switches import ATTENTIONS, Switches, check_float8, check_libraries
from handgrad.errors import UsageError
from handgrad.memory.rows import flat_elements, initialize
from handgrad.models import parameter_table
from handgrad.run.resolve import schedule_of
from handgrad.settings.config import ModelShape, RunConfig

# In these a graph's outputs are overwritten by its next replay: gradients must be added to tensors of their own.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


class PlainBlock(Block):
    """Attention with its (T, T) matrix written out."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        D = C // self.num_heads
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.num_heads, D).permute(2, 0, 3, 1, 4)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(D)).masked_fill(future, -math.inf).softmax(-1)
        y = weights.to(v.dtype) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GpuTwin(Twin):
    """The twin's model; padded columns get probability 0, so their weights stay 0, except in Liger's kernel."""

    def __init__(self, shape: ModelShape, switches: Switches):
        super().__init__(shape, padded=switches.padded)
        self.bf16_stream = switches.bf16_stream
        self.loss = self.chunked_loss if switches.head == "liger" else self.whole_loss
        self.stream_loss: Callable[..., Tensor] = head_loss
        if switches.attention == "plain":
            self.blocks = nn.ModuleList(PlainBlock(shape.channels, shape.num_heads) for _ in range(shape.num_layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return x.to(torch.bfloat16) if self.bf16_stream else x

    def whole_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.stream_loss(x, targets, self.lnf.weight, self.lnf.bias, self.wte.weight, self.vocab_size)

    def chunked_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return liger_loss(self.lnf(x), self.wte.weight, targets)


def head_loss(
    x: Tensor, targets: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, vocab_size: int
) -> Tensor:
    """Mean loss in nats of the stream x (B, T, C) after the last block."""
    logits = F.linear(F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias), weight)
    return padded_loss(logits, targets, vocab_size)


def compiled_by_region(twin: GpuTwin, mode: str) -> GpuTwin:
    """The twin, its parts compiled each: the blocks share one compilation, whatever their number."""
    twin.embed = torch.compile(twin.embed, mode=mode)
    twin.loss = torch.compile(twin.loss, mode=mode)
    for block in twin.blocks:
        block.compile(mode=mode)
    return twin


def use_attention(name: str, device: torch.device) -> None:
    """Allows torch one kernel of fused attention on a GPU, for the whole process. A CPU has only its own."""
    if name not in ATTENTIONS:
        raise UsageError(f"unknown attention {name!r}; known: {', '.join(ATTENTIONS)}")
    if device.type == "cuda" and name != "plain":
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


def use_float8(blocks: nn.Module, which: str, device: torch.device) -> None:
    """Converts the blocks' linear layers to fp8 by torchao's default recipe: one scale per tensor, from the tensor itself,
    e4m3 forward, e5m2 for gradients; or by its rowwise one. The parameters stay unchanged. A CPU emulates the GEMMs.

    Of the recipe's other options, `enable_fsdp_float8_all_gather` is for several GPUs, `pad_inner_dim` for odd sizes,
    and `force_recompute_fp8_weight_in_bwd` no longer does anything.
    """
    if which == "none":
        return
    from torchao import float8

    recipe = getattr(float8.Float8LinearRecipeName, "ROWWISE" if which == "rowwise" else "TENSORWISE")
    wanted = float8.Float8LinearConfig.from_recipe_name(recipe)
    if device.type != "cuda":
        wanted = dataclasses.replace(wanted, emulate=True)
    taken = float8._auto_filter_for_recipe(recipe, []) if which == "filtered" else None
    float8.convert_to_float8_training(blocks, config=wanted, module_filter_fn=taken)


NETWORKS: dict[str, Any] = {"gpt2": GpuTwin, "modern": ModernGpuTwin, "llama": LlamaGpuTwin, "gemma3": GemmaGpuTwin}


class TwinTrainer:
    """The twin, its optimizer and its steps. Sets torch's global switches: one trainer per process."""

    def __init__(self, config: RunConfig, shape: ModelShape, device: torch.device, switches: Switches):
        self.config, self.device, self.switches = config, device, switches
        self.table = parameter_table(shape)
        check_float8(switches, config, device)
        check_libraries(switches)
        use_attention(switches.attention, device)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = switches.tf32
        modern = shape.architecture == "modern"
        with device:
            self.twin = NETWORKS[shape.architecture](shape, switches)
        use_float8(self.twin.blocks, switches.float8, device)
        make = modern_optimizer if modern else optimizer_of
        self.optimizer: Any = make(self.twin, config, fused=switches.fused)
        self.parameters = list(self.twin.parameters())
        self.keeps_gradients = switches.mode in GRAPH_MODES
        for parameter in self.parameters if self.keeps_gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        if switches.head == "chunked":
            torch._inductor.config.auto_chunker.enable = True
        if not switches.compiled:
            self.model = self.twin
        elif switches.regional:
            self.model = compiled_by_region(self.twin, switches.mode)
        else:
            self.model = torch.compile(self.twin, mode=switches.mode)
        self.steps = 0

    @torch.no_grad()
    def load_initial(self) -> None:
        """handgrad's initial weights of `config.seed`, number for number (drawn on the CPU)."""
        flat = torch.zeros(flat_elements(self.table))
        initialize(self.table, self.config.seed, lambda row, values: row.stored(flat).copy_(values))
        self.twin.load(self.table, flat)

    @torch.no_grad()
    def draw_initial(self) -> None:
        """Weights of the same distributions, drawn on the device, if only the speed counts."""
        for row in self.table:
            parameter = self.twin.parameter_of(row)
            parameter.fill_(row.init.value)
            if row.init.kind == "normal":
                parameter[: row.stored_rows].normal_(0.0, row.std)

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One optimizer step over the micro-batches of (tokens, targets) on the device; returns the mean loss, on the
        device, without waiting for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = schedule_of(self.config).rate(self.steps)
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        total = torch.zeros((), device=self.device)
        for tokens, targets in micro_batches:
            if self.switches.compiled:
                torch.compiler.cudagraph_mark_step_begin()  # for the modes with CUDA graphs; nothing in the others
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.switches.autocast):
                loss = self.model(tokens, targets)
            (loss / len(micro_batches)).backward()
            total += loss.detach()
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        self.optimizer.step()
        self.steps += 1
        return total / len(micro_batches)
