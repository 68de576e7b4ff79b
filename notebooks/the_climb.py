# %% [markdown]
# # The climb: every gradient by hand
#
# Sixteen steps from softmax to the same bits on two GPUs, and two more. In each you write one function of GPT-2; a check of a second
# compares it with handgrad's reference and names the missing term. Whatever you have written then trains a small GPT on stories.

# %% Install handgrad
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("handgrad") is None:
    source = "handgrad @ git+https://github.com/handgrad/handgrad"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %% Begin: a folder `climb` with a page and a file for each step
from handgrad.cli import main

main(["climb", "start", "climb"])

# %% [markdown]
# `page(1)` shows the page of step 1. `grade(f)` saves your function into its file and grades it. Outside Colab you would edit the files
# and call `handgrad climb check`.

# %%
import contextlib
import inspect
from pathlib import Path


def climb(*words):
    with contextlib.redirect_stderr(sys.stdout):  # messages in one order with the rest
        main(["climb", *words, "--dir", "climb"])


def page(step):
    (file,) = Path("climb").glob(f"{step:02}_*.md")
    try:
        from IPython.display import Markdown, display

        display(Markdown(file.read_text()))
    except ImportError:
        print(file.read_text())


def grade(function):
    (file,) = Path("climb").glob(f"[0-9][0-9]_{function.__name__}.py")
    imports = file.read_text().partition("\ndef ")[0]
    file.write_text(f"{imports}\n{inspect.getsource(function)}")
    climb("check", function.__name__)


# %% Step 1
page(1)


# %% [markdown]
# Your turn. `logits` is (N, V), `targets` (N); return the losses (N) and the gradient of their sum times `scale`, (N, V).

# %%
import torch
from torch import Tensor


def softmax_and_loss(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


grade(softmax_and_loss)


# %% [markdown]
# A step that has a mistake is told which. This answer forgets that the target's own logit pulls the other way:


# %%
def softmax_and_loss(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, 1)
    losses = -log_p[torch.arange(len(targets)), targets]
    return losses, scale * log_p.exp()


grade(softmax_and_loss)


# %% solution
def softmax_and_loss(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, 1)
    at = torch.arange(len(targets)), targets
    dlogits = log_p.exp()
    dlogits[at] -= 1
    return -log_p[at], scale * dlogits


grade(softmax_and_loss)

# %% [markdown]
# On with `page(2)`: its stub is in `climb/02_linear.py`, for the panel of files or a cell of your own. This is the way so far:

# %%
climb()

# %% [markdown]
# And this trains two small GPTs for 100 steps: by handgrad's operations, and by yours where you have written them.

# %%
climb("run", "--steps", "100")
