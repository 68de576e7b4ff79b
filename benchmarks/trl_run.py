"""TRL's SFTTrainer on packed chats: the same rows as handgrad, the same weights, padding-free as its `packing` makes it.

`+varlen`: torch's flash attention over documents end to end, registered with transformers as its own documentation says,
where no flash-attn is installed; else SDPA under a mask of documents.
https://huggingface.co/docs/transformers/attention_interface
"""

import importlib.util
import inspect
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.chat_rows import ChatRows
from benchmarks.contenders import Tokens
from benchmarks.trainer_run import TrainerRun, TrainerSwitches
from handgrad.errors import UsageError

UNTRAINED = -100  # transformers' mark
STEPS_OF_ROWS = 16


def rows_for_trl(tokens: Tokens, count: int) -> Any:
    """The first rows in TRL's columns, as its own packing makes them; a trainer goes through them again and again."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    assert isinstance(tokens.source, ChatRows)
    every = [tokens.source.row(row) for row in range(count)]
    labels = [np.where(trained, words, UNTRAINED).tolist() for words, trained, _ in every]
    columns = {"input_ids": [words.tolist() for words, _, _ in every], "labels": labels}
    table = pyarrow.table({**columns, "seq_lengths": [lengths for *_, lengths in every]})
    return Dataset(InMemoryTable(table), fingerprint="chats")  # named, as nothing is cached


def stand_in_tokenizer() -> Any:
    """The SFTTrainer wants one; the rows hold tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def register_varlen() -> None:
    """Names torch's flash attention over documents "varlen" for transformers. It takes fewer heads of keys than of queries,
    which torch 2.13 wants said by a keyword that torch 2.11 does not know."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    knows = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        ends, longest = more["cu_seq_lens_q"], more["max_length_q"]
        # Under autocast the rotation by float32 angles widens queries and keys; flash attention takes 16 bits.
        q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))  # (N, heads, D)
        grouped = {"enable_gqa": True} if knows and k.shape[1] < q.shape[1] else {}
        y = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **grouped)
        return y[None], None

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)


class SftRun(TrainerRun):
    """Steps of an SFTTrainer."""

    def make_trainer(self, tokens: Tokens, switches: TrainerSwitches) -> Any:
        if importlib.util.find_spec("trl") is None:
            raise UsageError("trl is not installed here: pip install trl")
        from trl import SFTConfig, SFTTrainer

        packed = {"packing": True, "padding_free": True, "max_length": self.config.sequence_length}
        own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
        arguments = SFTConfig(**self.arguments(switches), **packed, **own)
        model = self.make_model(tokens, switches)
        if switches.varlen:
            register_varlen()
            model.set_attn_implementation("varlen")
        rows = rows_for_trl(tokens, STEPS_OF_ROWS * self.config.micro_batch * self.config.micro_steps)
        common = {"model": model, "args": arguments, "train_dataset": rows, "callbacks": [self.turns()]}
        return self.listening(SFTTrainer)(processing_class=stand_in_tokenizer(), **common)
