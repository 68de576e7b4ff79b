"""Finetune a model on a text of another kind, whole and with its lower half frozen, and see what each gains and forgets."""

# %% The model of 1_train.py; it is trained now if it is not there yet.
import random
from pathlib import Path

import handgrad

handgrad.prepare("stories", out="shards/examples", tokenizer="bpe:512", documents=4000)
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
handgrad.train("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)

# %% Another kind of text: sayings. Here they are made up; use a file of yours.
draw = random.Random(0).choice
sayings = [
    f"{draw(['A cat', 'A king', 'The moon', 'Old salt'])} {draw(['never', 'always', 'seldom'])}"
    f" {draw(['sleeps', 'sings', 'waits'])} {draw(['before dawn', 'in the rain', 'alone', 'for bread'])}."
    for _ in range(4000)
]
Path("sayings.txt").write_text("\n".join(sayings) + "\n")
words = next(Path("runs/examples/checkpoints").glob("*/tokenizer.json"))  # the tokens have to be the model's own
handgrad.prepare("sayings.txt", out="shards/sayings", tokenizer=str(words))

# %% Two finetunings, of 60 steps each: layers, heads and channels are those of the weights.
tuning = {"init_from": "runs/examples", "data": "shards/sayings", "steps": 60, "learning_rate": 1e-3, "quiet": True}
batch = {"tokens_per_step": 512, "micro_batch": 8, "sequence_length": 64, "warmup_steps": 5}
handgrad.train(out="runs/sayings", **tuning, **batch)
handgrad.train(out="runs/sayings_frozen", freeze="wte,wpe,blocks.0", **tuning, **batch)

# %% What they know now, of the new text and of the old one: nats per token, on text that none of them was trained on.
print(f"{'':22}{'sayings':>10}{'stories':>10}")
runs = {"before": "runs/examples", "finetuned": "runs/sayings", "lower half frozen": "runs/sayings_frozen"}
for name, run in runs.items():
    new, old = (handgrad.evaluate(run, shards).loss for shards in ("shards/sayings", "shards/examples"))
    print(f"{name:22}{new:10.3f}{old:10.3f}")

# %% And what was frozen is still the same, bit for bit.
before, after = (handgrad.load(run).weights.blocks for run in ("runs/examples", "runs/sayings_frozen"))
for number in range(2):
    same = bool((before[number].fc_weight == after[number].fc_weight).all())
    print(f"block {number} is {'unchanged' if same else 'another'}")
print("A king" + handgrad.load("runs/sayings").generate("A king", max_tokens=20, temperature=0.5, stop="\n"))
