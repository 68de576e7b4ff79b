"""Step 9: one matrix, read at the beginning and at the end."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    for N, C, V in ((7, 3, 5), (5, 4, 4), (9, 6, 11)):
        tokens = (torch.arange(N) ** 2 * 2 + 1) % V
        yield Case(
            {"N": N, "C": C, "V": V}, x=draw(N, C), dlogits=draw(N, V), tokens=tokens, dembedded=draw(N, C), wte=draw(V, C)
        )


def answers(c):
    dx, dwte = torch.empty_like(c.x), torch.zeros_like(c.wte)
    reference.linear_backward(dx, dwte, None, c.dlogits, c.x, c.wte)
    c.head = dwte.clone()
    reference.token_embedding_backward(dwte, c.dembedded, c.tokens, torch.empty(0))
    c.lookup, c.dwte, c.dx = dwte - c.head, dwte, dx
    return {"dx": dx, "dwte": dwte}


def written(c, start, *, adding):
    """`start[tokens] = dembedded` or `start[tokens] += dembedded`: of a word that repeats the last place stays."""
    found = start.clone()
    for token, row in zip(c.tokens.tolist(), c.dembedded, strict=True):
        found[token] = row + start[token] if adding else row
    return found


TERMS = {"dwte": lambda c: {"the head's path": c.head, "the lookup's path": c.lookup}}
MISTAKES = (
    ("dwte", "lacks the lookup's path: the embedding reads the same matrix", lambda c: c.head),
    ("dwte", "lacks the head's path: the logits read the same matrix", lambda c: c.lookup),
    ("dwte", "loses gradients of words that repeat: `dwte[tokens] += ...` keeps one place of each", lambda c: written(c, c.head, adding=True)),
    ("dwte", "overwrites the head's path in the rows that were looked up: the two paths add", lambda c: written(c, c.head, adding=False)),
    ("dwte", "is the mean of the two paths: they add", lambda c: c.dwte / 2),
    ("dwte", "is a mean over the tokens in the head's path: it takes their sum", lambda c: c.head / len(c.x) + c.lookup),
    ("dwte", "adds dx, where dembedded belongs", lambda c: c.head.index_add(0, c.tokens, c.dx)),
    ("dwte", "adds x, where dembedded belongs", lambda c: c.head.index_add(0, c.tokens, c.x)),
    ("dwte", "reads dembedded in the head's path, where x belongs", lambda c: c.dlogits.T @ c.dembedded + c.lookup),
    ("dwte", "multiplies the paths, which add", lambda c: c.head * c.lookup),
    ("dwte", "subtracts the lookup's path", lambda c: c.head - c.lookup),
    ("dwte", "has wte added: weight decay belongs to the optimizer", lambda c: c.dwte + c.wte),
    ("dx", "has dembedded added: that gradient belongs to another place of the model", lambda c: c.dx + c.dembedded),
    ("dx", "is a mean over the words: it takes their sum", lambda c: c.dx / len(c.wte)),
    ("dx", "looks the row of the token up: every word's row takes part, weighted by dlogits", lambda c: c.wte[c.tokens]),
    ("dx", "reads the gradient dwte, where wte belongs", lambda c: c.dlogits @ c.dwte),
    ("dx", "is multiplied by x", lambda c: c.dx * c.x),
)  # fmt: skip
