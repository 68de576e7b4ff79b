"""Transition."""

from handgrad.models import gpt2


def forward_blocks(ops, w, act):
    for stage in gpt2.forward(ops, w, act):
        stage.run()
