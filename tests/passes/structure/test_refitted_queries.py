"""Queries are fitted head by head, as far as texts that are held out gain."""

import pytest
import torch
from torch import Tensor

from compress.edits.latent import queries as bounds
from compress.edits.latent.queries import AskingText, LatentKeys
from compress.passes.ranks import ONE_RANK
from compress.passes.structure.attention import queries
from compress.passes.structure.attention.queries import fit_queries

HEADS, LENGTH, WIDTH, RANK, PAIRS, INPUTS = 4, 12, 3, 5, 1, 6


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KEYS = LatentKeys(numbers(HEADS, WIDTH, RANK, seed=1), 0.5)
THERE = numbers(HEADS, WIDTH + 2 * PAIRS, INPUTS, seed=2)


def text_of(seed: int) -> AskingText:
    """Attention is what the queries of THERE give."""
    positions = torch.arange(LENGTH)
    turns = torch.polar(torch.ones(()), 0.3 * positions[:, None].float())
    text = AskingText(
        numbers(LENGTH, INPUTS, seed=seed),
        numbers(LENGTH, RANK, seed=seed + 1),
        torch.view_as_complex(numbers(LENGTH, PAIRS, 2, seed=seed + 2)) * turns,
        turns,
        torch.zeros(HEADS, LENGTH, LENGTH),
        positions > positions[:, None],
    )
    text.attended.copy_(KEYS.attention(text, KEYS.scores(text, THERE)).exp())
    return text


TEXTS = [(text_of(10 * i), i % 8 == 7) for i in range(40)]
NEAR = THERE + 0.2 * numbers(*THERE.shape, seed=3)


def test_attention_that_queries_can_give_is_found() -> None:
    fit = fit_queries(TEXTS, NEAR, KEYS, ONE_RANK)
    assert fit.after < 0.05 * fit.before


def test_heads_that_attend_as_they_should_keep_their_bits() -> None:
    """Also beside one that does not."""
    assert torch.equal(fit_queries(TEXTS, THERE, KEYS, ONE_RANK).weight, THERE)
    one = torch.cat([NEAR[:1], THERE[1:]])
    made = fit_queries(TEXTS, one, KEYS, ONE_RANK).weight
    assert torch.equal(made[1:], THERE[1:])
    assert not torch.equal(made[:1], NEAR[:1])


def test_what_only_fits_its_own_texts_is_not_taken() -> None:
    """Attention that has nothing to do with what queries read."""
    torch.manual_seed(0)
    noise = []
    for text, held in TEXTS:
        scores = 3 * torch.randn(HEADS, LENGTH, LENGTH)
        attended = KEYS.attention(text, scores).exp()
        noise.append(
            (
                AskingText(text.read, text.latents, text.keys, text.turns, attended, text.later),
                held,
            )
        )
    flat = torch.zeros_like(THERE)
    fit = fit_queries(noise, flat, KEYS, ONE_RANK)
    assert fit.after <= fit.before


@pytest.mark.parametrize("at_once", [1, 3])
def test_heads_are_fitted_alone_or_together_alike(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    whole = fit_queries(TEXTS, NEAR, KEYS, ONE_RANK)
    one = 4 * bounds.SLOPED * NEAR[0].numel()
    monkeypatch.setattr(bounds, "SLOPES", at_once * one)
    calls = []
    really = queries._fit
    monkeypatch.setattr(queries, "_fit", lambda *x: calls.append(len(x[1])) or really(*x))
    parts = fit_queries(TEXTS, NEAR, KEYS, ONE_RANK)
    assert calls == {1: [1, 1, 1, 1], 3: [3, 1]}[at_once]
    torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-3, atol=1e-4)
    assert parts.after == pytest.approx(whole.after, rel=1e-3)
