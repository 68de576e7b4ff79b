"""Generate text, look at the probabilities of the next token, and see which words of a text surprise the model."""

# %% The model of 1_train.py, which is trained now unless it exists.
from rich.console import Console
from rich.text import Text

import handgrad

handgrad.prepare("stories", out="shards/examples", tokenizer="bpe:512", documents=4000)
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
handgrad.train("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)
model = handgrad.load("runs/examples")

# %% A text, streamed piece by piece.
for piece in model.stream("One sunny morning", max_tokens=60, temperature=0.7):
    print(piece, end="", flush=True)

# %% Several texts at once. A text depends on its seed, not on its batch: prompt number i has the seed 1 + i.
print("\n")
prompts = ["The brave girl", "Near the river", "A kind farmer"]
for prompt, text in zip(prompts, model.generate(prompts, max_tokens=25, top_p=0.9, seed=1), strict=True):
    print(f"{prompt} ...{text!r}")

# %% The five likeliest next tokens, and their probabilities.
prompt = "Once upon a"
probabilities = model.logits(prompt)[0, -1].softmax(-1)
top = probabilities.topk(5)
print(f"\n{prompt!r} goes on with")
for probability, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
    print(f"    {model.tokenizer.decode([token])!r:12} {probability:6.1%} {'#' * round(40 * probability)}")

# %% A text coloured by its losses: green tokens were expected, red ones were not (a terminal shows the colours).
text = "Once upon a time Tom, a brave boy, lived above a purple volcano."
losses = model.losses(text)[0].tolist()
coloured = Text()
for token, loss in zip(model.tokens(text)[1:], losses, strict=True):
    red = round(min(loss / 6, 1) * 200)
    coloured.append(model.tokenizer.decode([token]), style=f"black on rgb({red + 55},{255 - red},90)")
Console().print(coloured)
place = losses.index(max(losses))
print(f"the least expected came after {model.tokenizer.decode(model.tokens(text)[1 : place + 1])!r}")
