"""The benchmarks' rows of chats: the same tokens and targets for handgrad and for TRL, whose labels are shifted later."""

import numpy as np
import pytest
import torch

from benchmarks import llama_speed
from benchmarks.chat_rows import ChatRows
from benchmarks.contenders import Settings, tokens_of
from handgrad.errors import UsageError

LENGTH = 2048


@pytest.fixture
def rows() -> ChatRows:
    return ChatRows(np.arange(1 << 14), 7, LENGTH)


def test_a_row_holds_whole_chats_and_a_cut_one(rows: ChatRows) -> None:
    words, trained, lengths = rows.row(3)
    assert sum(lengths) == LENGTH == len(words) == len(trained) and all(250 <= length < 750 for length in lengths[:-1])
    assert words.tolist() == list(range(3 * LENGTH, 4 * LENGTH))
    assert trained.sum() == sum(length - max(1, length // 2) for length in lengths)
    again = rows.row(3)
    assert all(np.array_equal(one, other) for one, other in zip(again, (words, trained, lengths), strict=True))


def test_targets_are_the_trained_tokens_of_the_same_chat(rows: ChatRows) -> None:
    inputs, targets = (torch.zeros(2, LENGTH, dtype=torch.int64) for _ in range(2))
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    rows.fill(inputs, targets, 3, starts)
    assert int((targets >= 0).sum()) == rows.trained_tokens(3, 2) > LENGTH / 2
    for row, target, start, number in zip(inputs, targets, starts, (3, 4), strict=True):
        _, trained, lengths = rows.row(number)
        ends = np.cumsum(lengths)
        assert (target[ends - 1] == -1).all() and start.unique().tolist() == [0, *ends[:-1]]
        labels = np.where(trained, row.numpy(), -1)  # TRL's, before it shifts them
        assert target.tolist() == [*labels[1:].tolist(), -1]


def test_chats_train_a_packed_model() -> None:
    """The loss is a mean over the trained tokens, at first about ln of the vocabulary."""
    settings = Settings("tiny-llama", 1, 512, 2, device="cpu", precision="fp32", vocab_size=300, chats=True)
    assert settings.config().packed and "second half of each trained" in tokens_of(settings).words
    run = llama_speed.make_run("handgrad", settings)
    assert run.turn(lambda steps: False)[0] == pytest.approx(np.log(300), abs=0.2)


def test_who_has_chats() -> None:
    assert llama_speed.check_contenders("handgrad,trl+varlen", "bf16", chats=True) == ["handgrad", "trl+varlen"]
    for names, chats in (("handgrad,trl", False), ("handgrad,transformers", True), ("handgrad,twin-cudnn+stream", True)):
        with pytest.raises(UsageError, match="expected handgrad and trl with --chats"):
            llama_speed.check_contenders(names, "bf16", chats=chats)
    with pytest.raises(UsageError):
        llama_speed.check_contenders("transformers+varlen", "bf16")
