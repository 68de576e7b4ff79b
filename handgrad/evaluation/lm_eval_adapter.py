"""lm-eval on handgrad's own forward: `python -m handgrad.evaluation.lm_eval_adapter --model handgrad --model_args
checkpoint=RUN --tasks ...`, with lm-eval's other flags.

Needs the lm-evaluation-harness (`pip install 'handgrad[lm-eval]'`). `likelihoods` scores tokens and `generate` writes text;
lm-eval's own code splits contexts and continuations.
"""

from dataclasses import replace
from typing import Any

import lm_eval.models  # registers lm-eval's own: it looks for them only while its list is empty
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from handgrad.errors import UsageError
from handgrad.evaluation.likelihoods import Request, score
from handgrad.evaluation.load import (
    LoadedModel,
    check_available,
    check_window,
    checkpoint_weights,
    load_model,
    machine,
    usual_window,
)
from handgrad.generation.decode import decode_buffers, decode_tensors, with_cache
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.generation.text import TextStream
from handgrad.machine import devices
from handgrad.memory.arena import make_plan
from handgrad.storage.checkpoint import find

assert lm_eval.models
SLOTS = 8  # texts at a time
LONGEST_ANSWER_TOKENS = 256  # of `generate_until`, unless the task sets it


@register_model("handgrad")
class HandgradLM(TemplateLM):
    """A checkpoint under lm-eval's model interface."""

    def __init__(
        self,
        checkpoint: str,
        device: str | None = None,
        precision: str = "auto",
        backend: str = "auto",
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | str = 0,
    ):
        """`checkpoint`: a run's or a checkpoint's folder. `max_length`: tokens of a window that is scored (0: the
        run's rows, of an import at most 4096). `batch_size`: tokens at once, in windows ("auto": 8)."""
        super().__init__()
        self._device, _, self.dtype, ops = machine(devices.resolve_device(device or "auto"), precision, backend)
        weights = checkpoint_weights(find(checkpoint))
        if weights.config.lora:
            raise UsageError(f"{checkpoint} has adapters, which lm-eval does not read; give it an export: --to hf")
        check_window(int(max_length), weights.shape.sequence_length)
        self.window = int(max_length) or usual_window(weights)
        self.model = load_model(weights, self._device, self.dtype, ops, [])
        self.micro_batch = 8 if str(batch_size).startswith("auto") else int(batch_size)
        if self.micro_batch < 1:
            raise UsageError(f"batch_size must be 1 or more, or auto, found {batch_size}")

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        return f"handgrad {self.model.tokenizer.kind} {self.model.tokenizer.sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.model.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored = [Request(np.array(context + rest), len(rest)) for _, context, rest in requests]
        model = self.model
        window = max([self.window, *(request.scored for request in scored)])
        shape = replace(model.shape, sequence_length=min(window, model.shape.sequence_length))  # of the memory
        positions = self.micro_batch * shape.sequence_length
        found = score(model.ops, model.weights, scored, shape, self.dtype, model.device, positions_per_batch=positions)
        answers = list(zip(found.sums.tolist(), found.greedy.tolist(), strict=True))
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows as lm-eval cuts them."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.window, context_len=1)
            mine = [(None, *make_disjoint_window(pair)) for pair in cut]
            windows += mine
            counts.append(len(mine))
        sums = iter(total for total, _ in self._loglikelihood_tokens(windows))
        totals = [sum(next(sums) for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts after contexts, a slot each, grouped by temperature."""
        orders = [TextOrder(*request.args) for request in requests]
        answers = dict[TextOrder, str]()
        for temperature in sorted({order.temperature for order in orders}):
            equal = [order for order in orders if order.temperature == temperature]
            answers |= complete(self.model, equal, temperature, self.dtype)
        for request, order in zip(requests, orders, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answers[order])
        return [answers[order] for order in orders]


class TextOrder:
    """lm-eval's request for text after a context: stop strings, a length, a temperature."""

    def __init__(self, context: str, settings: dict[str, Any]):
        until = settings.get("until") or []
        self.context = context
        self.stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        self.max_tokens = int(settings.get("max_gen_toks", LONGEST_ANSWER_TOKENS))
        sampled = settings.get("do_sample", float(settings.get("temperature", 0.0)) > 0)
        self.temperature = float(settings.get("temperature", 1.0)) if sampled else 0.0


def complete(model: LoadedModel, orders: list[TextOrder], temperature: float, dtype: torch.dtype) -> dict[TextOrder, str]:
    """Writes the text after each context, up to one of its stop strings, end-of-text or its length, in memory for the
    longest."""
    tokenizer, options = model.tokenizer, SamplingOptions(temperature=temperature)
    prompts = {order: tokenizer.encode(order.context).tolist() or [tokenizer.end_of_text] for order in orders}
    shape = with_cache(model.shape, max(len(prompt) + order.max_tokens for order, prompt in prompts.items()))
    plan = make_plan(decode_buffers(shape, min(SLOTS, len(orders)), dtype, model.ops))
    check_available(plan.total_bytes, model.device, f"a cache of {shape.sequence_length} tokens", "ask for shorter texts")
    buf = decode_tensors(shape, plan.allocate(model.device))
    decoder = Decoder(model.shape, model.ops, model.weights, buf, options, end_of_text=tokenizer.end_of_text)
    answers = dict.fromkeys(orders, "")
    streams: dict[Continuation, tuple[TextOrder, TextStream]] = {}
    for order, prompt in prompts.items():
        streams[Continuation(prompt, order.max_tokens, 0)] = order, TextStream(tokenizer, order.stops)
    for text in decoder.generate(list(streams)):
        order, stream = streams[text]
        answers[order] += stream.read(text)
    return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
