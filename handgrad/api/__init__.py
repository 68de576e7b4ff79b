"""What the commands do, as a few names for notebooks and scripts; `handgrad` itself offers them.

    model       load, Model: logits, losses, text
    training    Training, train, preset: a run step by step, or all of it
    records     metrics: what a run wrote down, also while it goes on
    actions     prepare, evaluate, export

The vocabulary is that of the commands: a flag is a keyword of the same name. Nothing is computed here; what goes wrong is
raised as the same one-line errors (`handgrad.errors`), which are ValueErrors.
"""
