"""Sampling: what the documents say, row by row, and nobody's business but the row's."""

from array import array
from random import Random

import pytest
import torch
from torch import Tensor

from compress.runtime.sampling.filters import restrict
from compress.runtime.sampling.noise import gumbel, key_of
from compress.runtime.sampling.penalties import adjust
from compress.runtime.sampling.ranking import leading
from compress.runtime.sampling.sampling import Best, Choice, sample
from compress.runtime.sequences.request import Request, Sampling
from compress.runtime.sequences.sequence import Sequence, Times
from helpers.engine.plain_sampling import adjusted, probabilities

CPU = torch.device("cpu")


def sequence(
    sampling: Sampling,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    *,
    index: int = 0,
    ends: tuple[int, ...] = (),
) -> Sequence:
    return Sequence(
        request=Request("r", prompt, sampling),
        index=index,
        order=(0, index),
        tokens=array("i", [*prompt, *output]),
        root=b"",
        stop_ids=frozenset(ends),
        writer=None,
        times=Times(0.0),
        groups=1,
    )


def rows(count: int, vocabulary: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))


def drawn(random: Random, vocabulary: int) -> Sequence:
    """A sequence with any options."""

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(random.randrange(vocabulary) for _ in range(random.randint(0, most)))

    sampling = Sampling(
        temperature=random.choice((0, 0.3, 1, 2.5)),
        top_k=random.choice((0, 0, 1, 3, 40, 10**6)),
        top_p=random.choice((1.0, 1.0, 0.9, 0.5, 1e-9)),
        min_p=random.choice((0, 0, 0.05, 0.5, 1.0)),
        repetition_penalty=random.choice((1.0, 1.0, 1.3, 0.8)),
        frequency_penalty=random.choice((0, 0, 0.7, -0.4)),
        presence_penalty=random.choice((0, 0, 0.5, -2)),
        logit_bias={t: random.uniform(-5, 5) for t in tokens(3)} if random.random() < 0.3 else {},
        seed=random.randrange(2**64),
        logprobs=random.choice((0, 0, 2, 5)),
    )
    return sequence(sampling, (1, *tokens(8)), tokens(8), index=random.randrange(3))


@pytest.mark.parametrize("seed", range(30))
def test_as_the_plain_reference(seed: int) -> None:
    """The same tokens can be drawn, with the same probabilities; the noise then picks."""
    random, vocabulary = Random(seed), 61
    sequences = [drawn(random, vocabulary) for _ in range(9)]
    logits = rows(9, vocabulary, seed)
    choices = sample(logits.clone(), sequences)
    for row, each, choice in zip(logits, sequences, choices, strict=True):
        assert choice is not None
        start = each.prompt_length
        expected = adjusted(row.tolist(), each.sampling, each.tokens[:start], each.tokens[start:])
        best = max(range(vocabulary), key=lambda t: (expected[t], -t))
        if each.sampling.temperature == 0:
            assert choice.token == best
            continue
        weights = torch.tensor(probabilities(expected, each.sampling), dtype=torch.float64)
        noise = gumbel([key_of(each.sampling.seed, each.index, len(each.tokens))], vocabulary, CPU)
        assert choice.token == int((weights.log() + noise[0]).argmax())


def test_penalties_as_the_plain_reference() -> None:
    random = Random(1)
    sequences = [drawn(random, 61) for _ in range(64)]
    logits = rows(64, 61)
    found = logits.clone()
    adjust(found, sequences)
    expected = [
        adjusted(row.tolist(), s.sampling, s.tokens[: s.prompt_length], s.tokens[s.prompt_length :])
        for row, s in zip(logits, sequences, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 1.0, 0.1),
        (20, 0.7, 0.0),
        (0, 0.95, 0.02),
        (300, 0.99, 0.0),
    ],
)
def test_filters_leave_what_transformers_leaves(top_k: int, top_p: float, min_p: float) -> None:
    from transformers.generation import logits_process as theirs

    logits = rows(16, 2000)
    expected = logits
    warpers = [theirs.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        expected = warper(torch.zeros(16, 1, dtype=torch.long), expected)
    found = restrict(logits, [top_k] * 16, [top_p] * 16, [min_p] * 16)
    assert torch.equal(found, expected)


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, ids = rows(1, 50), torch.tensor([[4, 9, 4, 30]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    found = logits.clone()
    adjust(found, [sequence(Sampling(repetition_penalty=1.7), (4, 9), (4, 30))])
    assert torch.equal(found, expected)


def test_of_equals_at_an_edge_the_lowest_ids_stay() -> None:
    logits = torch.tensor([[1.0, 3, 2, 2, 2, 3]])

    def kept(top_k: int = 0, top_p: float = 1.0) -> list[int]:
        found = restrict(logits, [top_k], [top_p], [0.0])
        return found.isfinite()[0].nonzero().flatten().tolist()

    assert [kept(top_k=k) for k in (1, 2, 3, 4)] == [[1], [1, 5], [1, 2, 5], [1, 2, 3, 5]]
    assert kept(top_p=0.7) == [1, 2, 5]
    (choice,) = sample(logits.clone(), [sequence(Sampling())])
    assert choice is not None
    assert choice.token == 1


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 0.9999999])
def test_flat_distributions_keep_many(top_p: float) -> None:
    """top_p reaches far; the rows beside it change nothing."""
    logits = 1e-3 * rows(3, 5000)
    logits[1] = rows(1, 5000)[0] * 4
    together = restrict(logits, [0] * 3, [top_p] * 3, [0.0] * 3)
    alone = [restrict(row[None], [0], [top_p], [0.0]) for row in logits]
    assert torch.equal(together, torch.cat(alone))
    assert together[0].isfinite().sum() == pytest.approx(5000 * top_p, rel=0.01)


@pytest.mark.parametrize("vocabulary", [23, 2003])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_beside_a_row_do_not_matter(vocabulary: int, threads: int) -> None:
    random = Random(vocabulary)
    sequences = [drawn(random, vocabulary) for _ in range(40)]
    logits = rows(40, vocabulary)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = sample(logits.clone(), sequences)
        for count in (1, 2, 7, 17):
            chosen = random.sample(range(40), count)
            part = sample(logits[chosen], [sequences[row] for row in chosen])
            assert part == [whole[row] for row in chosen]
    finally:
        torch.set_num_threads(before)


def test_draws_follow_the_probabilities() -> None:
    """Chi-square over positions, seeds and indices; 0.1 % of good generators would fail."""
    logits, count = torch.tensor([2.0, 1, 0.5, 0, -1, -2, -3]), 40_000
    expected = logits.softmax(-1) * count
    tries = {
        "positions": [(7, 0, position) for position in range(count)],
        "seeds": [(seed, 0, 5) for seed in range(count)],
        "indices": [(7, index, 5) for index in range(count)],
    }
    for name, keys in tries.items():
        noise = gumbel([key_of(*key) for key in keys], 7, CPU)
        found = (logits + noise).argmax(dim=-1)
        counts = torch.bincount(found, minlength=7)
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 22.5, name  # 6 degrees of freedom
        # Whatever came before says nothing of what comes next.
        pairs = torch.bincount(found[:-1] * 7 + found[1:], minlength=49)
        likely = (expected[:, None] * expected / count).flatten()
        assert float(((pairs - likely) ** 2 / likely).sum()) < 93, name  # 48 degrees


def test_noise_is_gumbel_and_differs_everywhere() -> None:
    noise = gumbel([key_of(0, 0, position) for position in range(20)], 30_000, CPU)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, rel=0.02)
    centred = (noise - noise.mean()) / noise.std()
    correlations = centred @ centred.T / 30_000
    assert correlations.fill_diagonal_(0).abs().max() < 0.03
    assert torch.equal(noise[3:4], gumbel([key_of(0, 0, 3)], 30_000, CPU))
    assert key_of(2**64 - 1, 2, 3) != key_of(2**64 - 1, 3, 2)


def test_logprobs_are_of_the_model_alone() -> None:
    logits = rows(2, 30)
    options = {"temperature": 2.0, "top_k": 3, "logit_bias": {4: 50.0}, "logprobs": 3}
    first, second = sample(logits.clone(), [sequence(Sampling(**options)), sequence(Sampling())])  # type: ignore[arg-type]
    assert first is not None
    assert first.token == 4
    assert first.report is not None
    expected = logits[0].log_softmax(-1)
    assert first.report.logprob == float(expected[4])
    values, ids = expected.topk(3)
    assert first.report.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))
    assert first.report.greedy == (int(ids[0]) == 4)
    assert second is not None
    assert second.report is None


TIED = {
    "apart": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "few": torch.round,
    "all": torch.zeros_like,
    # Unequal, but log_softmax rounds them to equal log-probabilities.
    "merged": lambda x: 1e-9 * x,
    "impossible": lambda x: x.masked_fill(x < 4, -torch.inf),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("vocabulary", [1, 7, 300])
def test_the_leading_are_those_of_a_plain_sort(kind: str, vocabulary: int) -> None:
    """By number, highest first, then by id; as many as are asked say nothing of the order."""
    values = TIED[kind](rows(12, vocabulary))
    order = [sorted(range(vocabulary), key=lambda t, r=row: (-r[t], t)) for row in values.tolist()]
    for count in {0, 1, 2, 5, vocabulary - 1, vocabulary}:
        if count <= vocabulary:
            assert leading(values, count).tolist() == [own[:count] for own in order]


@pytest.mark.parametrize("kind", TIED)
def test_what_is_reported_of_equals_depends_on_the_row_alone(kind: str) -> None:
    """The first of `top` is the greedy token, whatever the rows beside it ask for."""
    logits, counts = TIED[kind](rows(40, 300)), [1 + i % 20 for i in range(40)]
    sequences = [sequence(Sampling(logprobs=count)) for count in counts]
    together = sample(logits.clone(), sequences)
    for row, each, count, choice in zip(logits, sequences, counts, together, strict=True):
        assert sample(row[None].clone(), [each]) == [choice]
        assert choice is not None
        assert choice.report is not None
        assert choice.report.greedy
        assert choice.report.top[0] == (choice.token, choice.report.logprob)
        own = row.tolist()
        plain = sorted(range(300), key=lambda t, r=own: (-r[t], t))[:count]
        assert [token for token, _ in choice.report.top] == plain


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
def test_one_token_of_equals_is_the_greedy_one(kind: str, temperature: float) -> None:
    """Filters that leave one token in leave the one of temperature 0."""
    logits = TIED[kind](rows(20, 300))
    (greedy,) = {tuple(c.token for c in sample(logits.clone(), [sequence(Sampling())] * 20) if c)}
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        drawn = [sequence(Sampling(temperature=temperature, seed=3, **options))] * 20  # type: ignore[arg-type]
        assert tuple(c.token for c in sample(logits.clone(), drawn) if c) == greedy


def test_ends_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9, 8, 1]])
    for output, expected in (((), 3), ((3,), 3), ((3, 3), 1)):
        one = sequence(Sampling(min_tokens=2), (0,), output, ends=(1, 2))
        (choice,) = sample(logits.clone(), [one])
        assert choice is not None
        assert choice.token == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_no_choice(bad: float) -> None:
    logits = rows(3, 300)
    logits[1, 7] = bad
    options = Sampling(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1)
    found = sample(logits, [sequence(options)] * 3)
    assert [choice is None for choice in found] == [False, True, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = rows(40, 50)
    logits[:, 3] = -torch.inf
    sequences = [sequence(Sampling(temperature=temperature, seed=i)) for i in range(40)]
    tokens = [choice.token for choice in sample(logits.clone(), sequences) if choice is not None]
    assert len(tokens) == 40
    if temperature < 1:
        assert tokens == logits.argmax(-1).tolist()
    else:
        assert len(set(tokens)) > 20
        assert 3 not in tokens


def test_what_is_no_number_is_no_choice() -> None:
    values = [1.0, float("nan"), float("inf"), -float("inf")]
    logits = torch.full((4, 5), -1.0)
    logits[:, 2] = torch.tensor(values)
    logits[3] = values[3]
    best = Best([2, 2, 2, 0], values)
    assert best.choices() == [Choice(2, None), None, None, None]
    assert sample(logits, [sequence(Sampling())] * 4) == best.choices()
