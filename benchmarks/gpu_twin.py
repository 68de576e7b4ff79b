"""The peer on a GPU: the twin, tuned without writing a kernel, one switch per choice.

Everything on is the best honest `torch.compile` contender: bf16 autocast over float32 weights, the vocabulary padded to
full tiles, a fused attention kernel, fused AdamW. Everything off is GPT-2 as a lecture first writes it. `float8`
converts the blocks' GEMMs to fp8 by torchao.
"""

import dataclasses
import importlib.util
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.twin import Block, Twin, optimizer_of
from handgrad.config import ModelShape, RunConfig
from handgrad.errors import UsageError
from handgrad.models import parameter_table
from handgrad.models.rows import flat_elements, initialize
from handgrad.run.resolve import schedule_of

ATTENTIONS = ("plain", "flash", "cudnn")
FLOAT8S = ("none", "all", "filtered")
FLOAT8_MULTIPLE = 16  # of the sizes of torch's fp8 GEMMs
FLOAT8_CAPABILITY = (8, 9)  # the first GPUs with fp8 tensor cores


@dataclass(frozen=True)
class Switches:
    """The choices of the twin."""

    attention: str = "cudnn"  # plain: products and a softmax; flash, cudnn: that kernel of torch's
    autocast: bool = True  # products in bf16
    tf32: bool = True  # of what stays in float32
    compiled: bool = True
    mode: str = "default"  # torch.compile's
    padded: bool = True  # the vocabulary, to a multiple of 128
    fused: bool = True  # AdamW in one kernel
    bf16_stream: bool = False  # also the residual stream in bf16; autocast keeps it in float32
    float8: str = "none"  # the blocks' GEMMs in fp8, by torchao: all, or (filtered) those that its filter selects

    @property
    def precision(self) -> str:
        """The precision of most GEMMs, in handgrad's words."""
        if self.float8 != "none":
            return "fp8"
        return "bf16" if self.autocast else "tf32" if self.tf32 else "fp32"


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
    """The twin's model; padded columns get probability 0, so their weights stay 0."""

    def __init__(self, shape: ModelShape, switches: Switches):
        super().__init__(shape, padded=switches.padded)
        self.bf16_stream = switches.bf16_stream
        if switches.attention == "plain":
            self.blocks = nn.ModuleList(PlainBlock(shape.channels, shape.num_heads) for _ in range(shape.num_layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        if self.bf16_stream:
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        columns = logits.shape[-1]
        if columns > self.vocab_size:
            # Masked and not cut off: the compiler's loads stay aligned.
            real = torch.arange(columns, device=logits.device) < self.vocab_size
            logits = torch.where(real, logits, -math.inf)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.view(-1, columns).to(exact), targets.reshape(-1))


def use_attention(name: str, device: torch.device) -> None:
    """Allows torch one kernel of fused attention on a GPU, for the whole process. A CPU has only its own."""
    if name not in ATTENTIONS:
        raise UsageError(f"unknown attention {name!r}; known: {', '.join(ATTENTIONS)}")
    if device.type == "cuda" and name != "plain":
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


def check_torchao() -> None:
    """Raises `UsageError` where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UsageError("the torchao twins need torchao, which is not installed: pip install 'torchao>=0.18'")


def use_float8(blocks: nn.Module, which: str, config: RunConfig, device: torch.device) -> None:
    """Converts the blocks' linear layers to fp8 by torchao's default recipe: one scale per tensor, from the tensor itself,
    e4m3 forward, e5m2 for gradients. The parameters stay unchanged. A CPU emulates the GEMMs.

    Of the recipe's other options, `enable_fsdp_float8_all_gather` is for several GPUs, `pad_inner_dim` for odd sizes,
    and `force_recompute_fp8_weight_in_bwd` no longer does anything.
    """
    if which not in FLOAT8S:
        raise UsageError(f"unknown float8 {which!r}; known: {', '.join(FLOAT8S)}")
    if which == "none":
        return
    sizes = {"channels": config.channels, "micro_batch x sequence_length": config.micro_batch * config.sequence_length}
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            raise UsageError(f"the torchao twins need {name} to be a multiple of {FLOAT8_MULTIPLE}, found {size}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise UsageError(f"{torch.cuda.get_device_name(device)} has no fp8; the torchao twins need Ada, Hopper or later")
    check_torchao()
    from torchao import float8

    recipe = float8.Float8LinearRecipeName.TENSORWISE
    wanted = float8.Float8LinearConfig.from_recipe_name(recipe)
    if device.type != "cuda":
        wanted = dataclasses.replace(wanted, emulate=True)
    taken = float8._auto_filter_for_recipe(recipe, []) if which == "filtered" else None
    float8.convert_to_float8_training(blocks, config=wanted, module_filter_fn=taken)


class TwinTrainer:
    """The twin, its optimizer and its steps. Sets torch's global switches: one trainer per process."""

    def __init__(self, config: RunConfig, shape: ModelShape, device: torch.device, switches: Switches):
        self.config, self.device, self.switches = config, device, switches
        self.table = parameter_table(shape)
        use_attention(switches.attention, device)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = switches.tf32
        with device:
            self.twin = GpuTwin(shape, switches)
        use_float8(self.twin.blocks, switches.float8, config, device)
        self.optimizer = optimizer_of(self.twin, config, fused=switches.fused)
        self.parameters = list(self.twin.parameters())
        self.model = torch.compile(self.twin, mode=switches.mode) if switches.compiled else self.twin
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
            parameter.fill_(1.0 if row.init.kind == "ones" else 0.0)
            if row.init.kind == "normal":
                parameter[: row.stored_rows].normal_(0.0, row.std)

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One optimizer step over the micro-batches of (tokens, targets) on the device; returns the mean loss, on the
        device, without waiting for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = schedule_of(self.config).rate(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
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
