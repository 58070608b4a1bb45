"""Queries of a latent: slopes are those of the divergence, and steps bring it down."""

import pytest
import torch
from torch import Tensor

from compress.edits.latent import queries as bounds
from compress.edits.latent.queries import (
    AskingText,
    LatentKeys,
    Looked,
    damped_inverse,
    divergences,
    step,
)

HEADS, TOKENS, WIDTH, RANK, PAIRS = 2, 7, 3, 4, 2
QUERIES = WIDTH + 2 * PAIRS


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def text_of(inputs: int, seed: int = 0) -> AskingText:
    """Every second token asks."""
    positions = torch.arange(TOKENS)
    asking = positions[1::2]
    later = positions > asking[:, None]
    turns = torch.polar(
        torch.ones((), dtype=torch.float64), positions[:, None] * torch.tensor([1.0, 0.1]).double()
    )
    keys = torch.view_as_complex(numbers(TOKENS, PAIRS, 2, seed=seed + 1)) * turns
    wanted = numbers(HEADS, len(asking), TOKENS, seed=seed + 2).masked_fill(later, -torch.inf)
    return AskingText(
        numbers(len(asking), inputs, seed=seed + 3),
        numbers(TOKENS, RANK, seed=seed + 4),
        keys,
        turns[asking],
        wanted.softmax(dim=-1),
        later,
    )


KEYS = LatentKeys(numbers(HEADS, WIDTH, RANK, seed=9), 0.3)


def off(text: AskingText, weight: Tensor) -> Tensor:
    """By the words of the definition."""
    shares = KEYS.attention(text, KEYS.scores(text, weight)).exp()
    total = []
    for head in range(HEADS):
        parts = [
            text.attended[head, t, s] * (text.attended[head, t, s] / shares[head, t, s]).log()
            for t in range(len(text.read))
            for s in range(TOKENS)
            if not text.later[t, s]
        ]
        total.append(torch.stack(parts).sum())
    return torch.stack(total)


def test_scores_are_of_each_heads_own_key_and_the_rotated_one() -> None:
    text, weight = text_of(5), numbers(HEADS, QUERIES, 5, seed=20)
    scores = KEYS.scores(text, weight)
    for head in range(HEADS):
        queries = text.read @ weight[head].T
        plain = queries[:, :WIDTH] @ (text.latents @ KEYS.unfolding[head].T).T
        pairs = torch.view_as_complex(queries[:, WIDTH:].unflatten(-1, (-1, 2)).contiguous())
        rotated = ((pairs * text.turns)[:, None] * text.keys.conj()).real.sum(dim=-1)
        torch.testing.assert_close(scores[head], 0.3 * (plain + rotated))


def test_the_gradient_is_that_of_the_divergence() -> None:
    text = text_of(5)
    weight = numbers(HEADS, QUERIES, 5, seed=20).requires_grad_()
    found = off(text, weight)
    torch.testing.assert_close(
        divergences(text, KEYS.attention(text, KEYS.scores(text, weight))), found
    )
    found.sum().backward()
    with torch.no_grad():
        slopes = KEYS.gradient(text, KEYS.scores(text, weight))
    torch.testing.assert_close(slopes, weight.grad)


def test_the_curvature_is_that_of_the_divergence() -> None:
    """Where queries read one number that is 1, a row of the weight is the query."""
    text = text_of(1)
    text.read.fill_(1.0)
    weight = numbers(HEADS, QUERIES, 1, seed=20)
    whole = torch.autograd.functional.hessian(lambda w: off(text, w).sum(), weight)
    found = KEYS.curvature(text, KEYS.scores(text, weight), slice(None))
    for head in range(HEADS):
        torch.testing.assert_close(found[head], whole[head, :, 0, head, :, 0])


def test_a_step_comes_close_to_the_least_in_a_few() -> None:
    """The divergence from attention that some queries give goes to nothing."""
    texts = [text_of(3, seed=40 + 10 * i) for i in range(30)]
    there = numbers(HEADS, QUERIES, 3, seed=21)
    for text in texts:
        text.attended.copy_(KEYS.attention(text, KEYS.scores(text, there)).exp())
    weight = there + 0.5 * numbers(HEADS, QUERIES, 3, seed=22)
    asked = sum(len(text.read) for text in texts)
    moments = sum(text.read.T @ text.read for text in texts) / asked
    losses = []
    for _ in range(8):
        scores = [KEYS.scores(text, weight) for text in texts]
        losses.append(float(sum(off(t, weight).sum() for t in texts)))
        gradient = sum(KEYS.gradient(t, s) for t, s in zip(texts, scores, strict=True)) / asked
        curved = (KEYS.curvature(t, s, slice(None)) for t, s in zip(texts, scores, strict=True))
        weight = weight + step(gradient, sum(curved) / asked, damped_inverse(moments))
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize("tokens", [64, 32768, 50_000, 1 << 20])
@pytest.mark.parametrize(("heads", "length"), [(2, 64), (8, 256), (32, 256), (128, 4096)])
def test_what_is_kept_of_texts_is_bounded(tokens: int, heads: int, length: int) -> None:
    """However many there are: their tokens, and the attention of the source to them."""
    looked = Looked.of(tokens, heads, length)
    kept = tokens / looked.texts
    assert kept <= bounds.TOKENS
    assert 4 * kept / looked.tokens * heads * length <= bounds.ATTENDED
    assert tokens > bounds.TOKENS or looked.texts == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_step_goes_downhill(seed: int) -> None:
    text, weight = text_of(5, seed=60 + seed), numbers(HEADS, QUERIES, 5, seed=seed)
    scores = KEYS.scores(text, weight)
    gradient = KEYS.gradient(text, scores)
    curvature = KEYS.curvature(text, scores, slice(None))
    change = step(gradient, curvature, damped_inverse(text.read.T @ text.read))
    for head in range(HEADS):
        assert float((gradient[head] * change[head]).sum()) < 0
