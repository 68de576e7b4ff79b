"""handgrad trains GPT-2 from raw text, with every gradient written by hand.

Data goes one way, and so do the packages:

    config, presets           what a run is
    errors, files             what a user may be told; files that survive
    world                     the device
    data                      text -> tokenizer -> shards -> batches
    ops                       operations, forward and backward, on given buffers
    arena                     named buffers with lifetimes -> one allocation per kind
    model                     parameters and activations as tables; block and transformer as equations
    checkpoint                named tensors under a verified manifest
    evaluation                held-out loss, generated text
    interop                   weights and tokenizers to Hugging Face's transformers and back
    training                  state, step, schedule, outliers, run folder, metrics, the loop
    report, plan, doctor      what a run was, what it will take, what this machine can do
    commands, cli             one module per command, and the entry point
"""

__version__ = "0.1.0"
