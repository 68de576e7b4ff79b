"""A model that writes, as chat, serve and sample open it, with the rules for choosing tokens that their flags give."""

from argparse import Namespace
from dataclasses import fields

from handgrad.errors import print_message
from handgrad.evaluation.load import Weights, Writing, is_taught_to_talk, load_model, machine, rounded_to_fp8
from handgrad.format import human_bytes
from handgrad.generation.chat import Talk
from handgrad.generation.fp8_weights import fp8_buffers, with_fp8_weights
from handgrad.generation.generate import SamplingOptions
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.memory.arena import make_plan


def sampling_options(parsed: Namespace) -> SamplingOptions:
    """Raises `UsageError` for an option out of range."""
    return SamplingOptions(**{field.name: getattr(parsed, field.name) for field in fields(SamplingOptions)})


def open_talking_model(parsed: Namespace) -> tuple[Weights, Talk, Writing]:
    """Loads the model of a command that talks; prints a note for one that is not taught to talk. Raises the errors of
    `open_weights` and `load_model`."""
    device, _, dtype, ops = machine(devices.resolve_device(parsed.device), parsed.precision, parsed.backend)
    weights = open_weights(parsed.checkpoint, strict=parsed.strict)
    if parsed.fp8_weights:
        weights = rounded_to_fp8(weights)
    talk = Talk(weights.tokenizer)
    model = load_model(weights, device, dtype, ops, fp8_buffers(weights.shape, ops, device) if parsed.fp8_weights else [])
    if not is_taught_to_talk(weights.tokenizer, weights.checkpoint):
        print_message(
            f"{parsed.checkpoint} has no chat template, so this talks in the plain one; a base model continues text and"
            " seldom answers: finetune it on conversations, which `handgrad prepare --chat` takes",
            ends=False,
        )
    return weights, talk, Writing(model, dtype, with_fp8_weights(ops, model.shape, model.weights, model.views))


def context_of(writing: Writing, asked: int | None) -> tuple[int, str]:
    """(tokens of the longest conversation, the same in words): the context that is `asked` for, or the model's, or the part
    of it that memory holds."""
    own = writing.model.shape.sequence_length
    wanted = min(asked, own) if asked else own
    context = writing.fitting(wanted)
    memory = human_bytes(make_plan(writing.table(1, context)).total_bytes)
    less = f" of {wanted}: memory holds no more" if context < wanted else ""
    return context, f"context of {context}{less} ({memory} when it is full)"
