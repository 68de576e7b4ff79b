# %% [markdown]
# # A GPT in two minutes
#
# From text to a model that writes, with every gradient by hand, on a CPU or a GPU. Run the cells from top to bottom; the folders
# `shards` and `runs` appear beside this notebook.

# %% Install handgrad
import importlib.util
import shutil
import subprocess
import sys

if importlib.util.find_spec("handgrad") is None:
    gpu = "[gpu]" if shutil.which("nvidia-smi") else ""
    source = f"handgrad{gpu} @ git+https://github.com/handgrad/handgrad"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import handgrad

data = handgrad.prepare("stories", "shards/notebook", tokenizer="bpe:512", documents=4000)
print(f"{data.tokens('train'):,} tokens to train on, {data.tokens('validation'):,} to test on")

# %% [markdown]
# ## Train
#
# `Training` is a run of `handgrad train`: the same files, the same bits. It makes as many steps as you ask for. Interrupt a cell if
# you like, and run it again: it continues where it stopped.

# %%
settings = {"steps": 500, "tokens_per_step": 512, "learning_rate": 4e-3, "schedule": "linear"}
run = handgrad.Training("tiny", data="shards/notebook", out="runs/notebook", **settings, quiet=True)
run


# %%
def show(step):
    if step.step % 100 == 0:
        print(f"step {step.step}   loss {step.loss:.3f}")


if run.completed < 250:
    run.steps(250 - run.completed, on_step=show)
print(run.model().generate("Once upon a time", max_tokens=40, temperature=0.5, stop="\n"))

# %%
if run.completed < run.config.steps:
    run.steps(on_step=show)
print(run.model().generate("Once upon a time", max_tokens=40, temperature=0.5, stop="\n"))

# %%
run.plot()

# %% [markdown]
# ## Look at the model
#
# Closing a run saves it. `load` takes its folder, a transformers folder, or a name on the Hub such as `"gpt2"`.

# %%
run.close()
model = handgrad.load("runs/notebook")
model

# %%
for probability, token in zip(*model.logits("Once upon a")[0, -1].softmax(-1).topk(5), strict=True):
    print(f"{model.tokenizer.decode([int(token)])!r:12} {probability:.1%}")

# %%
for text in ("Once upon a time there lived a brave girl.", "Stocks fell sharply after the announcement."):
    print(f"{model.loss(text):5.2f} nats per token   {text}")

# %% [markdown]
# ## A gradient by hand
#
# The reference computes every forward and backward by its formula. Here is the layer norm's, compared with autograd's.

# %%
import torch

from handgrad.ops import reference

x, weight, bias, dy = torch.randn(8, 16), torch.randn(16), torch.randn(16), torch.randn(8, 16)

y, mean, rstd = torch.empty(8, 16), torch.empty(8), torch.empty(8)
reference.layernorm_forward(y, mean, rstd, x, weight, bias)
dx, dweight, dbias = torch.zeros(8, 16), torch.zeros(16), torch.zeros(16)
reference.layernorm_backward(dx, dweight, dbias, dy, x, mean, rstd, weight, None)

leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
torch.nn.functional.layer_norm(leaves[0], (16,), *leaves[1:]).backward(dy)
for ours, theirs in zip((dx, dweight, dbias), leaves, strict=True):
    print(f"largest difference {(ours - theirs.grad).abs().max():.0e}")

# %% [markdown]
# ## Compare two runs
#
# The second run has a tenth of the learning rate. `compare` shows the results and the settings that differ.

# %%
settings |= {"learning_rate": 4e-4}
handgrad.train("tiny", data="shards/notebook", out="runs/notebook-slow", **settings, quiet=True)
handgrad.compare("runs/notebook", "runs/notebook-slow")

# %%
handgrad.plot("runs/notebook", "runs/notebook-slow")

# %% [markdown]
# Next: `handgrad report runs/notebook` writes a page about a run, `handgrad watch runs` shows all of them live, and
# [the tour](https://github.com/handgrad/handgrad/blob/main/docs/tour.md) has ten things to do with handgrad.
