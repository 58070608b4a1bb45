"""Queries are refitted so that heads attend to what those of the source attend to.

A latent gives keys that are a little off, and what is off in the same way for many queries they can
make up for. The scores of a head are linear in its rows of the weight of queries, so the KL
divergence of its attention from the source's is convex in them. It is brought down in a few steps,
each the gradient between the inverses of two second moments: of what queries read, and of keys as
the head attends to them, which is the curvature (the factors of K-FAC, arXiv 1503.05671, equation
1). Each head goes as far as helps it on texts that are held out, and where nothing helps it stays.

Heads attend sharply: on tale-6m nine tenths of it go to one token, and a quarter of the cache puts
the attention of a head 0.9 to 2.5 nats from the source's behind the first block. Least squares on
scores, weighed by the attention of the source, know nothing of tokens that only the edited head
attends to; with them a third as much is gained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.sizes import BlockSizes

TOKENS = 32768  # of the texts that are looked at, which are all, or one in so many: 128 of 256
# Bytes of the source's attention that are kept. With one token in two the KL of tale-6m at a
# quarter of the cache is 3 % more.
ATTENDED = 256 << 20
DAMPING = 0.03  # of each number of a moment's diagonal is added, in a unit of its own
LEAST = 1e-9  # of the largest number of a diagonal: what nothing was seen of
WORKED = 6  # copies of the scores of a text
SLOPES = 256 << 20  # bytes of weights that are worked with, of as many heads as that takes
SLOPED = 6  # of them a weight, its gradient, its change and what sums of these take
STEPS = 5
LENGTHS = (1.0, 0.5, 0.25, 0.125)  # of a step, of which each head takes one or none


@dataclass(frozen=True, slots=True)
class Looked:
    """What is looked at of so many texts. texts: one in so many; tokens: of one that is, one in so
    many asks."""

    texts: int
    tokens: int

    @classmethod
    def of(cls, tokens: int, heads: int, length: int) -> "Looked":
        """tokens: of all texts. length: of the longest."""
        kept = min(tokens, TOKENS)
        fitting = -(-4 * kept * heads * length // ATTENDED)
        return cls(max(1, -(-tokens // TOKENS)), max(1, fitting))


def looked_bytes(tokens: int, length: int, sizes: BlockSizes, hidden: int) -> int:
    """Most bytes of what is kept of so many tokens in texts of a length, and of the scores of one
    text that are worked with. sizes: of a block with a latent."""
    latent = sizes.latent
    assert latent is not None, "it has none"
    looked = Looked.of(tokens, sizes.heads, length)
    kept = min(tokens, TOKENS)
    of_text = 4 * sizes.heads * length * (length // looked.tokens + 1)
    read = 4 * hidden + length + 4 * sizes.heads * length
    cached = 4 * (latent.rank + latent.rotated)
    queries = sizes.key_width
    weight = 2 * 4 * sizes.heads * queries * hidden  # as it was, and as it becomes
    curved = 2 * 4 * sizes.heads * queries**2 + 3 * 8 * max(queries, hidden) ** 2
    slopes = SLOPED * 4 * heads_at_once(sizes.heads, queries, hidden) * queries * hidden
    texts = kept * cached + kept // looked.tokens * read + WORKED * of_text
    return texts + weight + curved + slopes


def heads_at_once(heads: int, queries: int, inputs: int) -> int:
    """Heads that are fitted together. queries: numbers of one; inputs: that they are made of."""
    return min(heads, max(1, SLOPES // (SLOPED * 4 * queries * inputs)))


@dataclass(frozen=True, slots=True, eq=False)
class AskingText:
    """A text as the heads of a block with a latent see it: t of its T tokens ask.

    read: [t, in], what makes the queries. latents: [T, R], as heads read them. keys: complex
    [T, S], the rotated key. turns: complex [t, S], the rotation of the queries. attended: [H, t,
    T], the source's attention. later: bool [t, T], tokens that are not seen yet.
    """

    read: Tensor
    latents: Tensor
    keys: Tensor
    turns: Tensor
    attended: Tensor
    later: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LatentKeys:
    """What heads make of a latent. unfolding: [H, D, R]. scale: of scores."""

    unfolding: Tensor
    scale: float

    def scores(self, text: AskingText, weight: Tensor) -> Tensor:
        """[H, t, T]. weight: of the queries, [H, D + 2 * S, in]."""
        plain, numbers = self._apart(text.read @ weight.mT)
        asked = torch.cat([plain @ self.unfolding, _in_twos(numbers * text.turns)], dim=-1)
        return self.scale * (asked @ _joined(text).mT)

    def attention(self, text: AskingText, scores: Tensor) -> Tensor:
        """Logarithms of what scores make of a text: [H, t, T]."""
        return scores.masked_fill(text.later, -torch.inf).log_softmax(dim=-1)

    def gradient(self, text: AskingText, scores: Tensor) -> Tensor:
        """Of the sum of divergences, by the weight: [H, D + 2 * S, in]."""
        off = self.attention(text, scores).exp() - text.attended
        return self._by_queries(text, off).mT @ text.read

    def curvature(self, text: AskingText, scores: Tensor, some: slice) -> Tensor:
        """Sum over some of the tokens that ask: the covariance of the keys that a query has, by the
        attention of these scores: [H, D + 2 * S, D + 2 * S]."""
        shares = self.attention(text, scores).exp()[:, some]
        numbers = text.keys * text.turns[some].conj()[:, None]  # [t, T, S], as a query sees them
        turned = _in_twos(numbers)
        found = []
        for share, unfolding in zip(shares, self.unfolding, strict=True):
            plain = (text.latents @ unfolding.mT).expand(len(share), -1, -1)
            keys = self.scale * torch.cat([plain, turned], dim=-1)  # [t, T, D + 2 * S]
            away = keys - (share[:, None] @ keys)
            away = (away * share[..., None].sqrt()).flatten(0, 1)
            found.append(away.mT @ away)
        return torch.stack(found)

    def _by_queries(self, text: AskingText, off: Tensor) -> Tensor:
        """What is off in scores, [H, t, T], by the queries: [H, t, D + 2 * S]."""
        asked = self.scale * (off @ _joined(text))
        rank = self.unfolding.shape[-1]
        numbers = as_complex(asked[..., rank:])
        turned = _in_twos(numbers * text.turns.conj())
        return torch.cat([asked[..., :rank] @ self.unfolding.mT, turned], dim=-1)

    def _apart(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """[H, t, D + 2 * S] as [H, t, D] and complex [H, t, S]."""
        width = self.unfolding.shape[1]
        return queries[..., :width], as_complex(queries[..., width:])


def divergences(text: AskingText, attention: Tensor) -> Tensor:
    """Summed over the tokens that ask, in nats: fp64 [H]. attention: logarithms, [H, t, T]."""
    there = text.attended
    own = torch.xlogy(there, there) - there * attention.masked_fill(text.later, 0.0)
    return own.sum(dim=(1, 2), dtype=torch.float64)


def step(gradient: Tensor, curvature: Tensor, by_inputs: Tensor) -> Tensor:
    """What the weight changes by at length 1. gradient: [H, D + 2 * S, in], and curvature [H, D +
    2 * S, D + 2 * S], means over queries. by_inputs: fp64 [in, in], `damped_inverse` of the second
    moments of what queries read."""
    parts = [
        -(damped_inverse(curved) @ slope.double() @ by_inputs).to(slope.dtype)
        for slope, curved in zip(gradient, curvature, strict=True)
    ]
    return torch.stack(parts)


def damped_inverse(moments: Tensor) -> Tensor:
    """Of [n, n], in fp64."""
    whole = moments.to(torch.float64, copy=True)
    there = whole.diagonal()
    there.mul_(1 + DAMPING).clamp_(min=LEAST * float(there.max()) or 1.0)
    inverse: Tensor = torch.linalg.inv(whole)
    return inverse


def _joined(text: AskingText) -> Tensor:
    """Latents and rotated keys: [T, R + 2 * S]."""
    return torch.cat([text.latents, _in_twos(text.keys)], dim=-1)


def as_complex(pairs: Tensor) -> Tensor:
    """[..., 2 * S] as complex [..., S]."""
    return torch.view_as_complex(torch.unflatten(pairs.contiguous(), -1, (-1, 2)))


def _in_twos(numbers: Tensor) -> Tensor:
    """Complex [..., S] as [..., 2 * S], real and imaginary part of each side by side."""
    return torch.view_as_real(numbers).flatten(-2)
