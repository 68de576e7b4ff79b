"""Measure a model: loss, perplexity and bits per byte, on a validation split and on texts of your own."""

# %% The model of 1_train.py, which is trained now unless it exists.
import math

import handgrad

handgrad.prepare("stories", out="shards/examples", tokenizer="bpe:512", documents=4000)
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
handgrad.train("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)
model = handgrad.load("runs/examples")

# %% On the held-out stories, as `handgrad evaluate runs/examples` does.
held_out = handgrad.evaluate(model)
print(f"{held_out.tokens:,} held-out tokens: loss {held_out.loss:.4f} nats per token,")
print(f"perplexity {held_out.perplexity:.2f}, {held_out.bits_per_byte:.3f} bits per byte\n")

# %% On texts of your own. Bits per byte compare models with different tokenizers.
texts = {
    "a story": "One sunny morning Rosa was near the river with her red ball when a wheel fell off.",
    "news": "Shares fell sharply on Tuesday after the central bank raised interest rates again.",
    "noise": "xq zzkw vvb 0x9f qqp lmnt grz wvk jjx pq bbf hhz",
}
print(f"{'':10}{'loss':>8}{'perplexity':>12}{'bits per byte':>15}")
for name, text in texts.items():
    loss = model.loss(text)
    bits = model.losses(text).sum().item() / math.log(2) / len(text.encode())
    print(f"{name:10}{loss:8.3f}{math.exp(loss):12.1f}{bits:15.3f}")

# %% The likelier of two sentences is the one whose tokens' log-likelihoods have the larger sum.
pairs = [
    ("Once upon a time there lived a brave girl.", "Once upon a time there girl a brave lived."),
    ("He went home proud.", "He went proud home."),
    ("Tom fixed the wheel.", "Tom the wheel fixed."),
]
print()
for pair in pairs:
    likelihoods = (-model.losses(list(pair)).nansum(1)).tolist()  # nansum: NaN pads the shorter row
    likelier, other = (pair[n] for n in sorted((0, 1), key=lambda n: -likelihoods[n]))
    print(f"{likelier!r} is e^{abs(likelihoods[0] - likelihoods[1]):.1f} times as likely as {other!r}")
