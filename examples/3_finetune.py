"""Finetune a model on another kind of text, whole and with its lower half frozen; measure what each gains and forgets."""

# %% The model of 1_train.py, which is trained now unless it exists.
import random
from pathlib import Path

import handgrad

handgrad.prepare("stories", out="shards/examples", tokenizer="bpe:512", documents=4000)
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
handgrad.train("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)

# %% Another kind of text: sayings, generated here. Use a file of your own.
draw = random.Random(0).choice
sayings = [
    f"{draw(['A cat', 'A king', 'The moon', 'Old salt'])} {draw(['never', 'always', 'seldom'])}"
    f" {draw(['sleeps', 'sings', 'waits'])} {draw(['before dawn', 'in the rain', 'alone', 'for bread'])}."
    for _ in range(4000)
]
Path("shards/sayings.txt").write_text("\n".join(sayings) + "\n")
words = next(Path("runs/examples/checkpoints").glob("*/tokenizer.json"))  # the model's own
handgrad.prepare("shards/sayings.txt", out="shards/sayings", tokenizer=str(words))

# %% Two finetuning runs of 60 steps each. The weights give the numbers of layers, heads and channels.
tuning = {"init_from": "runs/examples", "data": "shards/sayings", "steps": 60, "learning_rate": 1e-3, "quiet": True}
batch = {"tokens_per_step": 512, "micro_batch": 8, "sequence_length": 64, "warmup_steps": 5}
handgrad.train(out="runs/sayings", **tuning, **batch)
handgrad.train(out="runs/sayings_frozen", freeze="wte,wpe,blocks.0", **tuning, **batch)

# %% Their losses on the new text and on the old one, in nats per token, on text that none of them was trained on.
print(f"{'':22}{'sayings':>10}{'stories':>10}")
runs = {"before": "runs/examples", "finetuned": "runs/sayings", "lower half frozen": "runs/sayings_frozen"}
for name, run in runs.items():
    new, old = (handgrad.evaluate(run, shards).loss for shards in ("shards/sayings", "shards/examples"))
    print(f"{name:22}{new:10.3f}{old:10.3f}")

# %% The frozen parameters have the bits that they had.
before, after = (handgrad.load(run).weights.blocks for run in ("runs/examples", "runs/sayings_frozen"))
for number in range(2):
    same = bool((before[number].fc_weight == after[number].fc_weight).all())
    print(f"block {number} is {'unchanged' if same else 'changed'}")
print("A king" + handgrad.load("runs/sayings").generate("A king", max_tokens=20, temperature=0.5, stop="\n"))
