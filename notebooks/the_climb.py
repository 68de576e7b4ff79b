# %% [markdown]
# # The climb: every gradient by hand
#
# From one matrix product to attention. At each stage you get a forward and write its backward; central differences of the forward
# say whether it is right. Each solution is in the folded cell below its exercise. A backward gets `dy`, the gradient of the loss
# with respect to the output, and returns the gradients of the inputs in their order.

# %% Install handgrad
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("handgrad") is None:
    source = "handgrad @ git+https://github.com/handgrad/handgrad"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %% [markdown]
# ## The judge
#
# For a loss $L = \sum y \odot dy$, the derivative by one input is nearly $(L(x + h) - L(x - h)) / 2h$. In float64, with
# $h = 10^{-5}$, that agrees with the exact gradient to about nine digits.

# %%
import math

import torch

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def differences(forward, inputs, dy, h=1e-5):
    """The gradient of sum(forward(*inputs) * dy) with respect to each input, by central differences."""
    gradients = []
    for tensor in inputs:
        gradient = torch.zeros_like(tensor)
        for place in range(tensor.numel()):
            values = []
            for step in (h, -h):
                tensor.view(-1)[place] += step
                values.append((forward(*inputs) * dy).sum())
                tensor.view(-1)[place] -= step
            gradient.view(-1)[place] = (values[0] - values[1]) / (2 * h)
        gradients.append(gradient)
    return gradients


def check(name, forward, backward, *inputs):
    """Compares `backward(dy, *inputs)` with differences of `forward(*inputs)`."""
    dy = torch.randn_like(forward(*inputs))
    answers = backward(dy, *inputs)
    if answers is None:
        print(f"{name}: not written yet")
        return
    errors = [
        ((answer - exact).norm() / exact.norm()).item()
        for answer, exact in zip(answers, differences(forward, inputs, dy), strict=True)
    ]
    verdict = "right" if max(errors) < 1e-6 else "wrong"
    print(f"{name}: {verdict}, relative errors {', '.join(f'{error:.0e}' for error in errors)}")


# %% [markdown]
# ## 1. A linear layer
#
# $y = x W^T$ with $x$ $(N, I)$, $W$ $(O, I)$. Each $y_{no}$ is a sum over $i$, so $dx_{ni} = \sum_o dy_{no} W_{oi}$.
# What is $dW$? The shapes leave one choice.


# %%
def linear(x, weight):
    return x @ weight.T


def linear_backward(dy, x, weight): ...


check("linear", linear, linear_backward, torch.randn(5, 3), torch.randn(4, 3))


# %% solution
def linear_backward(dy, x, weight):
    return dy @ weight, dy.T @ x


check("linear", linear, linear_backward, torch.randn(5, 3), torch.randn(4, 3))

# %% [markdown]
# ## 2. GELU
#
# $y = x \, \Phi(x)$ with the normal distribution's $\Phi$. Elementwise, so $dx = dy \odot y'(x)$, by the product rule.


# %%
def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_backward(dy, x): ...


check("gelu", gelu, gelu_backward, torch.randn(4, 6))


# %% solution
def gelu_backward(dy, x):
    density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return (dy * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density),)


check("gelu", gelu, gelu_backward, torch.randn(4, 6))

# %% [markdown]
# ## 3. Softmax and cross-entropy
#
# The loss of a row is $-\log p_t$, with $p = \mathrm{softmax}(z)$ and the target $t$. Here `dy` has a number for each row. Write
# $\log p_t = z_t - \log \sum_j e^{z_j}$ first: the gradient has one term for each part, and no quotient rule is needed.

# %%
targets = torch.tensor([1, 4, 0, 2])


def cross_entropy(logits):
    return torch.logsumexp(logits, 1) - logits[torch.arange(4), targets]


def cross_entropy_backward(dy, logits): ...


check("cross-entropy", cross_entropy, cross_entropy_backward, torch.randn(4, 5))


# %% solution
def cross_entropy_backward(dy, logits):
    dlogits = torch.softmax(logits, 1)
    dlogits[torch.arange(4), targets] -= 1
    return (dy[:, None] * dlogits,)


check("cross-entropy", cross_entropy, cross_entropy_backward, torch.randn(4, 5))

# %% [markdown]
# ## 4. Layer norm
#
# $\hat x = (x - \mu) / \sigma$ for each row, $y = \hat x \odot w + b$. Mean and deviation depend on every $x$ of the row: with
# $g = dy \odot w$, what must leave $g$ so that a shift of the row, or a scaling, changes nothing?


# %%
def normalised(x):
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred**2).mean(1, keepdim=True).sqrt()


def layernorm(x, weight, bias):
    return normalised(x) * weight + bias


def layernorm_backward(dy, x, weight, bias): ...


check("layer norm", layernorm, layernorm_backward, torch.randn(4, 6), torch.randn(6), torch.randn(6))


# %% solution
def layernorm_backward(dy, x, weight, bias):
    hat, g = normalised(x), dy * weight
    sigma = x.std(1, keepdim=True, correction=0)
    dx = (g - g.mean(1, keepdim=True) - hat * (g * hat).mean(1, keepdim=True)) / sigma
    return dx, (dy * hat).sum(0), dy.sum(0)


check("layer norm", layernorm, layernorm_backward, torch.randn(4, 6), torch.randn(6), torch.randn(6))

# %% [markdown]
# ## 5. Attention
#
# One head, causal: $S = q k^T / \sqrt D$ where a key is not after its query, $P = \mathrm{softmax}(S)$, $y = P v$. Go backwards:
# two products as in stage 1, with the softmax of stage 3 between them, now with a whole row $dP$ instead of one target.


# %%
def weights(q, k):
    later = torch.ones(len(q), len(q)).triu(1).bool()
    return torch.softmax((q @ k.T / math.sqrt(q.shape[1])).masked_fill(later, -math.inf), 1)


def attention(q, k, v):
    return weights(q, k) @ v


def attention_backward(dy, q, k, v): ...


check("attention", attention, attention_backward, *torch.randn(3, 6, 4))


# %% solution
def attention_backward(dy, q, k, v):
    P, y = weights(q, k), attention(q, k, v)
    dP = dy @ v.T
    dS = P * (dP - (dy * y).sum(1, keepdim=True)) / math.sqrt(q.shape[1])  # rowsum(P dP) is rowsum(dy y)
    return dS @ k, dS.T @ q, P.T @ dy


check("attention", attention, attention_backward, *torch.randn(3, 6, 4))

# %% [markdown]
# ## 6. The summit
#
# handgrad's reference is these formulas, on buffers that the caller gives. `handgrad gradcheck` judges each of its backwards as you
# were judged:

# %%
from handgrad.tools.gradient_checks import check_operations

checked = list(check_operations())
for found in checked:
    worst = max(gradient.error for gradient in found.gradients)
    print(f"{'wrong' if found.wrong else 'ok':5} {worst:.0e}  {found.name}")

# %% [markdown]
# Read on: [the derivation of every operation](https://github.com/handgrad/handgrad/blob/main/docs/operations/README.md), the
# reference in `handgrad/ops/reference`, and in `handgrad/models/gpt2.py` how they join to a model.
