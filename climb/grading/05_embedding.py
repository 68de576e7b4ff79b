"""Step 5: token and position embedding."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    for B, T, V, M, C in ((2, 7, 5, 9, 3), (3, 5, 4, 5, 6), (1, 6, 11, 8, 2)):
        tokens = (torch.arange(B * T).view(B, T) ** 2 * 3 + 1) % V
        yield Case({"B": B, "T": T, "C": C}, tokens=tokens, wte=draw(V, C), wpe=draw(M, C), dx=draw(B, T, C))


def answers(c):
    x, dwte, dwpe = torch.empty_like(c.dx), torch.zeros_like(c.wte), torch.zeros_like(c.wpe)
    reference.embedding_forward(x.view(-1, x.shape[2]), c.tokens, c.wte, c.wpe)
    reference.embedding_backward(dwte, dwpe, c.dx.view(-1, x.shape[2]), c.tokens, torch.empty(0))
    c.count = torch.bincount(c.tokens.flatten(), minlength=len(c.wte))[:, None]
    c.T, c.dwte, c.x = c.tokens.shape[1], dwte, x
    return {"x": x, "dwte": dwte, "dwpe": dwpe}


def written(c, tokens, gradients, *, last):
    """Rows written one after another: the last (or the first) occurrence of a word stays."""
    found = torch.zeros_like(c.wte)
    order = list(zip(tokens.flatten().tolist(), gradients.reshape(-1, gradients.shape[-1]), strict=True))
    for token, row in order if last else reversed(order):
        found[token] = row
    return found


def added(c, gradients, tokens=None):
    tokens = c.tokens if tokens is None else tokens
    return torch.zeros_like(c.wte).index_add_(0, tokens.flatten(), gradients.reshape(-1, gradients.shape[-1]))


def padded(c, rows):
    return torch.cat([rows, torch.zeros_like(c.wpe[len(rows) :])])


def per_row(c):
    """Each sequence overwrites what the one before it left."""
    found = torch.zeros_like(c.wte)
    for tokens, gradients in zip(c.tokens, c.dx, strict=True):
        sums = added(c, gradients, tokens)
        found[tokens] = sums[tokens]
    return found


TERMS = {"x": lambda c: {"the row of the word": c.wte[c.tokens], "the row of the position": c.wpe[: c.T].expand_as(c.dx)}}
MISTAKES = (
    ("x", "reads the position's row from the end of wpe: positions begin at 0", lambda c: c.wte[c.tokens] + c.wpe[-c.T :]),
    ("x", "reads the positions from 1 on: they begin at 0", lambda c: c.wte[c.tokens] + c.wpe.roll(-1, 0)[: c.T]),
    ("x", "multiplies the two rows, which are added", lambda c: c.wte[c.tokens] * c.wpe[: c.T]),
    ("dwte", "loses gradients: of a word that repeats only the last place counts, as `dwte[tokens] += dx` has it", lambda c: written(c, c.tokens, c.dx, last=True)),
    ("dwte", "loses gradients: of a word that repeats only the first place counts", lambda c: written(c, c.tokens, c.dx, last=False)),
    ("dwte", "loses gradients: a word in two sequences keeps the last one's alone", per_row),
    ("dwte", "is a mean over the places of a word: each place adds its gradient", lambda c: c.dwte / c.count.clamp(min=1)),
    ("dwte", "is the gradient times the number of places: each place counts once", lambda c: c.dwte * c.count),
    ("dwte", "adds to rows by position, not by word", lambda c: added(c, c.dx, torch.arange(c.T).expand_as(c.tokens) % len(c.wte))),
    ("dwte", "adds x, where dx belongs", lambda c: added(c, c.x)),
    ("dwte", "counts the words: each place adds its dx, not 1", lambda c: c.count.double().expand_as(c.wte)),
    ("dwte", "reads the sequences' gradients transposed: (B, T) has become (T, B)", lambda c: added(c, c.dx.transpose(0, 1))),
    ("dwte", "has the weights themselves added", lambda c: c.dwte + c.wte),
    ("dwte", "adds the gradients in reversed order: place n belongs to word n", lambda c: added(c, c.dx.flatten(0, 1).flip(0))),
    ("dwpe", "is a mean over the batch: every sequence reads the row, so it takes their sum", lambda c: padded(c, c.dx.mean(0))),
    ("dwpe", "holds the last sequence alone: it has to be summed over the batch", lambda c: padded(c, c.dx[-1])),
    ("dwpe", "holds the first sequence alone: it has to be summed over the batch", lambda c: padded(c, c.dx[0])),
    ("dwpe", "sums over all positions: each has a row of its own", lambda c: padded(c, c.dx.sum((0, 1)).expand(c.T, -1))),
    ("dwpe", "fills the rows past T: no token reads them", lambda c: torch.cat([c.dx.sum(0), c.dx.sum((0, 1)).expand(len(c.wpe) - c.T, -1)])),
    ("dwpe", "stands at the end of wpe: positions begin at 0", lambda c: padded(c, c.dx.sum(0)).roll(len(c.wpe) - c.T, 0)),
    ("dwpe", "sums x, where dx belongs", lambda c: padded(c, c.x.sum(0))),
)  # fmt: skip


def operations(f):
    def forward(out, tokens, wte, wpe):
        out.copy_(f(tokens, wte, wpe, torch.zeros(*tokens.shape, wte.shape[1]))[0].view_as(out))

    def backward(dwte_acc, dwpe_acc, dout, tokens, sorted_positions, *, scratch=None):
        _, dwte, dwpe = f(tokens, torch.zeros_like(dwte_acc), torch.zeros_like(dwpe_acc), dout.view(*tokens.shape, -1))
        dwte_acc.add_(dwte)
        dwpe_acc.add_(dwpe)

    return {"embedding_forward": forward, "embedding_backward": backward}
