"""The commands as functions for notebooks and scripts; `handgrad` itself exports them.

    model       load, Model: logits, losses, text
    training    Training, train, preset: a run step by step, or all of it
    records     metrics: a run's records, also while it runs
    actions     prepare, plan, evaluate, export

A flag of a command is a keyword argument of the same name. Errors are the commands' one-line errors (`handgrad.errors`),
which are ValueErrors. This package computes nothing itself.
"""
