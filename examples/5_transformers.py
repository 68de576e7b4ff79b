"""Export a model to Hugging Face's transformers, check that it computes the same there, and load it back.

This needs `pip install transformers`.
"""

# %% The model of 1_train.py, which is trained now unless it exists.
import shutil

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import handgrad

handgrad.prepare("stories", out="shards/examples", tokenizer="bpe:512", documents=4000)
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
handgrad.train("tiny", data="shards/examples", out="runs/examples", **settings, quiet=True)
model = handgrad.load("runs/examples", device="cpu")

# %% Export: a folder with weights, config, tokenizer and model card, which handgrad reads back and compares.
EXPORTED = "runs/examples/exported"
shutil.rmtree(EXPORTED, ignore_errors=True)
done = handgrad.export("runs/examples", EXPORTED)
print(f"{done.folder}: {done.parameters_bytes:,} bytes of weights")

# %% The same tokens, and the same logits up to the rounding of float32.
theirs, words = AutoModelForCausalLM.from_pretrained(EXPORTED), AutoTokenizer.from_pretrained(EXPORTED)
text = "One quiet evening Tom was near the garden."
ids = model.tokens(text)  # end-of-text, with which our documents begin, and the text's
print("same tokens:", words(text)["input_ids"] == ids)
with torch.no_grad():
    difference = (theirs(torch.tensor([ids])).logits - model.logits(ids)).abs().max().item()
print(f"largest difference of a logit: {difference:.1e}")

# %% The same greedy text.
prompt = torch.tensor([model.tokens("Once upon a time")])
written = theirs.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=model.tokenizer.end_of_text)
ours = model.generate("Once upon a time", max_tokens=20, temperature=0)
print("same text:", words.decode(written[0, prompt.shape[1] :], skip_special_tokens=True) == ours)
print(f"Once upon a time{ours}")

# %% Load it back. `load` takes any GPT-2 of transformers, by its folder or by its name on the Hub: `load("gpt2")`.
back = handgrad.load(EXPORTED, device="cpu")
print("same bits after the round trip:", bool((back.logits(ids) == model.logits(ids)).all()))
