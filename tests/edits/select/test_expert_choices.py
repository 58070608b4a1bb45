"""Which experts stay: errors from inner products are those of the mixture, and each choice keeps
what its paper says."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.arch.forward.forward import Routing
from compress.edits.select import experts
from compress.edits.select.experts import EXPERT_CHOICES, ExpertEvidence, missed

TOKENS, EXPERTS, HIDDEN = 40, 6, 5
ROUTINGS = [Routing(2, True), Routing(2, False)]


def answers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores [T, E] and what all experts give [E, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    return scores, torch.randn(EXPERTS, TOKENS, HIDDEN, generator=generator)


def mixed(scores: Tensor, given: Tensor, kept: list[int], routing: Routing) -> Tensor:
    """The mixture of some experts, token by token as a router has it."""
    out = torch.zeros(given.shape[1:], dtype=torch.float64)
    for token, row in enumerate(scores[:, kept].softmax(dim=1).double()):
        best = row.argsort(descending=True)[: routing.chosen]
        whole = row[best].sum() if routing.normalised else 1.0
        for place in best.tolist():
            out[token] += row[place] / whole * given[kept[place], token].double()
    return out


def evidence(scores: Tensor, given: Tensor, wanted: Tensor, routing: Routing) -> ExpertEvidence:
    return ExpertEvidence(
        routing,
        scores=scores,
        products=torch.einsum("eth,fth->tef", given, given),
        asked=torch.einsum("eth,th->te", given.double(), wanted),
        energy=wanted.square().sum(dim=1),
        held=torch.ones(len(scores), dtype=torch.bool),
        sizes=torch.arange(len(given), dtype=torch.float64),
    )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_error_of_a_subset_is_that_of_its_mixture(routing: Routing) -> None:
    scores, given = answers()
    wanted = mixed(scores, given, [*range(EXPERTS)], routing) + 0.1
    seen = evidence(scores, given, wanted, routing)
    for kept in ([*range(EXPERTS)], [0, 3, 5], [1, 2]):
        error = (mixed(scores, given, kept, routing) - wanted).square().sum(dim=1)
        torch.testing.assert_close(missed(seen, torch.tensor(kept)), error, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_obs_keeps_the_best_subset_and_goes_one_by_one_among_many(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, given = answers(1)
    seen = evidence(scores, given, mixed(scores, given, [*range(EXPERTS)], routing), routing)

    def lost(kept: Tensor) -> float:
        return float(missed(seen, kept).sum())

    for keep in (5, 3):
        best = min(map(torch.tensor, combinations(range(EXPERTS), keep)), key=lost)
        assert experts.by_error(seen, keep).equal(best)
    monkeypatch.setattr(experts, "SUBSETS", 0)
    kept = torch.arange(EXPERTS)
    while len(kept) > 2:
        left = [torch.cat([kept[:i], kept[i + 1 :]]) for i in range(len(kept))]
        kept = min(left, key=lost)
        assert experts.by_error(seen, len(kept)).equal(kept)


def test_each_choice_keeps_what_it_says() -> None:
    """Expert 0 gets few tokens and gives much to them, 1 many and little, 2 few and little."""
    routing, scores = Routing(1, True), torch.full((TOKENS, 3), -9.0)
    scores[:8, 0], scores[8:36, 1], scores[36:, 2] = 0, 0, 0
    sizes = torch.tensor([3.0, 2.0, 2.4])[:, None, None]
    given = sizes * torch.ones(3, TOKENS, HIDDEN) / HIDDEN**0.5
    seen = evidence(scores, given, mixed(scores, given, [0, 1, 2], routing), routing)
    kept = {name: choose(seen, 1).tolist() for name, choose in EXPERT_CHOICES.items()}
    # Σ |f|² is 72, 112 and 23; the mean of |f| 3, 2 and 2.4; weights go up. In place of the others
    # 1 errs by 8.6, 2 by 7.4.
    assert kept["contribution"] == [1]
    assert kept["activation"] == [0]
    assert kept["magnitude"] == [2]
    assert kept["obs"] == [2]
    assert all(choose(seen, 3).tolist() == [0, 1, 2] for choose in EXPERT_CHOICES.values())
