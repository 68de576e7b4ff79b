"""handgrad trains GPT-2 from raw text, with every gradient written by hand.

Data goes one way, and so do the packages:

    config, presets, errors   what a run is, and what a user may be told
    data                      text -> tokenizer -> shards -> batches
    ops                       operations, forward and backward, on given buffers
    arena                     named buffers with lifetimes -> one allocation per kind
    model                     parameters and activations as tables; block and transformer as equations
    evaluation                held-out loss, generated text
    training                  step, optimizer, schedule, checkpoints, the loop
    report, plan, doctor      what a run was, what it will take, what this machine can do
    cli                       the commands
"""

__version__ = "0.1.0"
