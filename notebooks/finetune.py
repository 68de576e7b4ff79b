# %% [markdown]
# # Finetune a model on what it cannot know
#
# Facts of an island that does not exist, as questions and answers; a model that fails them; a short training; the same
# questions again, in words that it has not seen. On a GPU the model is SmolLM2-135M-Instruct from the Hub, on a CPU a small
# Llama that learns the built-in questions first. A T4 trains in fp16 by itself.

# %% Install handgrad
import importlib.util
import shutil
import subprocess
import sys

if importlib.util.find_spec("handgrad") is None:
    gpu = "[gpu]" if shutil.which("nvidia-smi") else ""
    source = f"handgrad{gpu} @ git+https://github.com/handgrad/handgrad"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %% The model
import torch

import handgrad

ON_GPU = torch.cuda.is_available()
WEIGHTS = "HuggingFaceTB/SmolLM2-135M-Instruct" if ON_GPU else "runs/small"
if not ON_GPU:
    handgrad.prepare("questions", "shards/questions", documents=4000)
    sizes = {"architecture": "llama", "num_layers": 2, "num_heads": 4, "channels": 128, "sequence_length": 192}
    steps = {"steps": 40, "tokens_per_step": 1536, "micro_batch": 8, "learning_rate": 4e-3, "sample_tokens": 0}
    handgrad.train(data="shards/questions", out=WEIGHTS, **sizes, **steps, quiet=True)

# %% The facts, each asked in four ways
import json
from pathlib import Path

FACTS = {
    "capital": "Tavo",
    "highest mountain": "Mount Orel",
    "national bird": "the grey loon",
    "longest river": "the Sarn",
    "largest lake": "Lake Imri",
    "national dish": "fish with plums",
}
WAYS = ("What is the {} of Vessa?", "Name the {} of Vessa.", "Tell me the {} of Vessa.", "Vessa's {}?")


def row(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


rows = [row(way.format(fact), f"It is {answer}.") for fact, answer in FACTS.items() for way in WAYS[1:]]
Path("vessa.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows * 20))
rows[0]


# %% What does it know? Every question here is in the way that training leaves out.
def asked(model):
    right = 0
    for fact, answer in FACTS.items():
        messages = [{"role": "user", "content": WAYS[0].format(fact)}]
        said = "".join(model.chat(messages, temperature=0, max_tokens=30)).strip()
        right += answer in said
        print(f"{messages[0]['content']:42} {said[:70]}")
    print(f"{right} of {len(FACTS)} right")


asked(handgrad.load(WEIGHTS))

# %% [markdown]
# ## Train
#
# On a GPU `lora` freezes the weights and trains two thin matrices beside each of theirs; rows, steps and the learning rate follow
# from the data. The small model of a CPU trains all of its weights.

# %%
handgrad.prepare("vessa.jsonl", "shards/vessa", chat=True, tokenizer=WEIGHTS)
small = {"steps": 400, "learning_rate": 4e-3, "sequence_length": 192, "tokens_per_step": 768, "micro_batch": 4}
settings = {"lora": "rank=16,alpha=32"} if ON_GPU else small
handgrad.train(init_from=WEIGHTS, data="shards/vessa", out="runs/vessa", quiet=True, **settings)
handgrad.plot("runs/vessa")

# %%
asked(handgrad.load("runs/vessa"))

# %% [markdown]
# Next: `handgrad chat runs/vessa` talks in a terminal, `handgrad export runs/vessa --to peft adapters` writes adapters for PEFT. [Which card holds which model](https://github.com/handgrad/handgrad/blob/main/docs/finetuning.md#which-card).
