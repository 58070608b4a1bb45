"""The mathematics of nll, KL and agreement against brute force in fp64."""

import math

import pytest
import torch
from torch import Tensor

from compress.evaluation.divergence import kl
from compress.evaluation.head import FinalStates, ScoredTokens, Totals, score
from compress.evaluation.perplexity import log_softmax, nll, perplexity
from compress.plan.row_counts import MAX_CHUNK, MAX_ROWS, chunk_rows

TOKENS, HIDDEN, VOCAB = 2500, 16, 300


def side(seed: int, seen: list[int] | None = None, weight: Tensor | None = None) -> FinalStates:
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(TOKENS, HIDDEN, generator=random)
    head = torch.randn(VOCAB, HIDDEN, generator=random) if weight is None else weight

    def logits(rows: Tensor) -> Tensor:
        if seen is not None:
            seen.append(len(rows))
        return rows @ head.T

    return FinalStates(lambda start, stop: states[start:stop], logits)


def totals(
    result: FinalStates, source: FinalStates | None, rows: int = 1024, **options: bool
) -> Totals:
    random = torch.Generator().manual_seed(7)
    targets = torch.randint(VOCAB, (TOKENS,), generator=random)
    text = torch.randint(2, (TOKENS,), generator=random)
    return score(result, source, ScoredTokens(targets, text, 2), rows=rows, **options)


def test_sums_equal_brute_force_over_all_tokens_at_once() -> None:
    source, result = side(1), side(2)
    got = totals(result, source)
    random = torch.Generator().manual_seed(7)
    targets = torch.randint(VOCAB, (TOKENS,), generator=random)
    text = torch.randint(2, (TOKENS,), generator=random)
    # [tokens, vocab] in fp64
    log_p = source.head(source.rows(0, TOKENS)).double().log_softmax(-1)
    log_q = result.head(result.rows(0, TOKENS)).double().log_softmax(-1)
    per_token = {
        "nll_source": -log_p[torch.arange(TOKENS), targets],
        "nll_result": -log_q[torch.arange(TOKENS), targets],
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "agreement": (log_p.argmax(-1) == log_q.argmax(-1)).double(),
    }
    for name, values in per_token.items():
        wanted = torch.stack([values[text == 0].sum(), values[text == 1].sum()])
        torch.testing.assert_close(getattr(got, name), wanted, rtol=1e-6, atol=0)
    assert got.tokens.tolist() == [int((text == 0).sum()), int((text == 1).sum())]


def test_agreement_goes_by_logits_where_their_log_probabilities_are_equal() -> None:
    """Logits near 0 that differ have one log-probability in fp32: rounding is no tie."""
    logits = 1e-9 * torch.eye(VOCAB)[[5, 9]]
    assert bool((log_softmax(logits) == log_softmax(logits)[0, 0]).all())
    sides = [
        FinalStates(lambda start, stop: logits[start:stop], lambda x, n=n: x.roll(n, -1))
        for n in (0, 1, 0)
    ]
    tokens = ScoredTokens(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1)
    agreed = [score(sides[0], other, tokens, rows=2).agreement for other in sides[1:]]
    assert [float(x) for x in agreed if x is not None] == [0.0, 2.0]


def test_divergence_of_a_model_from_itself_is_exactly_zero() -> None:
    got = totals(side(3), side(3))
    assert got.kl is not None
    assert got.agreement is not None
    assert got.kl.tolist() == [0.0, 0.0]
    assert torch.equal(got.agreement, got.tokens.double())


def test_small_divergences_keep_their_digits() -> None:
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    moved = logits + 1e-3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    p, q = logits.double().log_softmax(-1), moved.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).mean()
    got = kl(log_softmax(logits), log_softmax(moved)).mean()
    assert got == pytest.approx(float(exact), rel=0.05)
    assert float(exact) < 1e-6


def test_tokens_the_source_excludes_do_not_count_and_those_the_result_excludes_are_infinite() -> (
    None
):
    p = torch.tensor([[0.0, -math.inf], [math.log(0.5)] * 2])
    q = torch.tensor([[0.0, -math.inf], [0.0, -math.inf]])
    assert kl(p, q).tolist() == [0.0, math.inf]


def test_perplexity_of_uniform_logits_is_the_vocabulary() -> None:
    uniform = side(0, weight=torch.zeros(VOCAB, HIDDEN))
    got = totals(uniform, None)
    assert got.nll_source is got.kl is got.agreement is None
    for total, tokens in zip(got.nll_result.tolist(), got.tokens.tolist(), strict=True):
        assert perplexity(total, tokens) == pytest.approx(VOCAB, rel=1e-6)


def test_perplexity_beyond_floats_is_infinite() -> None:
    assert perplexity(1e9, 1) == math.inf


@pytest.mark.parametrize("rows", [1, 13, 1024, 100_000])
def test_chunk_size_does_not_matter(rows: int) -> None:
    got, wanted = totals(side(1), side(2), rows), totals(side(1), side(2))
    assert got.kl is not None
    assert wanted.kl is not None
    torch.testing.assert_close(got.kl, wanted.kl, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.nll_result, wanted.nll_result, rtol=1e-6, atol=0)


def test_without_divergence_the_source_has_its_perplexity_only() -> None:
    got = totals(side(1), side(2), divergence=False)
    assert got.nll_source is not None
    assert got.kl is got.agreement is None


@pytest.mark.parametrize("vocab", [1, 300, 32_000, 152_064, 1 << 26])
def test_heads_never_see_more_than_a_chunk(vocab: int) -> None:
    rows = chunk_rows(vocab)
    assert 1 <= rows <= MAX_ROWS
    assert rows == 1 or rows * vocab <= MAX_CHUNK
    seen: list[int] = []
    totals(side(1, seen), side(2, seen), max(rows, 64))
    assert max(seen) <= MAX_ROWS
    assert sum(seen) == 2 * TOKENS


def test_nll_is_minus_the_log_probability_of_the_target() -> None:
    log_probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    assert nll(log_probs, torch.tensor([1, 0])).exp().tolist() == pytest.approx([4 / 3, 2.0])
