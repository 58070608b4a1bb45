"""Which tokens may be drawn at all: top_k, top_p and min_p."""

import torch
from torch import Tensor

# So many of the most likely tokens are sorted at first; mostly top_p needs no more.
_SORTED = 256


def restrict(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """The logits with -inf for tokens that are left out, [rows, vocabulary]; a value for each row.

    First the top_k most likely stay (0: all). Of these the most likely stay whose probabilities,
    which add up to 1 again, reach top_p; at least one. Of these stay those whose probability is at
    least min_p times the highest. Of equals at an edge the lowest ids stay. As transformers has it.
    """
    vocabulary, device = logits.shape[-1], logits.device
    k = torch.tensor([min(x, vocabulary) or vocabulary for x in top_k], device=device)
    if min(top_p) < 1:
        p = torch.tensor(top_p, dtype=torch.float64, device=device)
        logits = _most_likely(logits, *_kept(logits, k, p))
    elif bool((k < vocabulary).any()):
        top = logits.topk(int((k * (k < vocabulary)).max()), dim=-1).values
        logits = _most_likely(logits, k, _lowest(top, k, vocabulary))
    if any(min_p):
        least = torch.tensor(min_p, dtype=torch.float64, device=device).log().float()
        least = least[:, None] + logits.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def _kept(logits: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens stay of each row, int64 [rows], and the lowest logit among them.

    Only the rows' beginnings are sorted, as far as one of them needs it. That does not change what
    comes out: sums run from the left.
    """
    vocabulary = logits.shape[-1]
    probabilities = logits.softmax(dim=-1)
    limited = k < vocabulary
    size = min(vocabulary, max(_SORTED, int((k * limited).max())))
    while True:
        top, ids = logits.topk(size, dim=-1)
        mass = probabilities.gather(-1, ids).double().cumsum(dim=-1)
        total = torch.where(limited, _at(mass, k.clamp(max=size)), 1.0)
        goal = p * total
        open_rows = ~limited & (p < 1) & (mass[:, -1] < goal)
        if size == vocabulary or not bool(open_rows.any()):
            break
        size = min(vocabulary, 8 * size)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    # None reaches it where logits are not finite; such rows are told apart elsewhere.
    reached = (before < goal[:, None]).sum(dim=-1).clamp(min=1)
    count = torch.minimum(torch.where(p < 1, reached, vocabulary), k)
    return count, _lowest(top, count, vocabulary)


def _lowest(top: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """The least of the `count` highest logits of each row; `top` are the highest, in order."""
    least = _at(top, count.clamp(max=top.shape[-1]))
    return torch.where(count < vocabulary, least, -torch.inf)


def _at(values: Tensor, count: Tensor) -> Tensor:
    """The value number `count` (from 1 on) of each row."""
    return values.gather(-1, count[:, None] - 1).squeeze(-1)


def _most_likely(logits: Tensor, count: Tensor, lowest: Tensor) -> Tensor:
    """`count` logits of each row, -inf for the others; `lowest` is the least that stays."""
    edge = lowest[:, None]
    kept = logits >= edge
    if bool((kept.sum(dim=-1) > count).any()):
        above, equal = logits > edge, logits == edge
        left = count - above.sum(dim=-1)
        kept = above | (equal & (equal.cumsum(dim=-1) <= left[:, None]))
    return logits.masked_fill(~kept, -torch.inf)
