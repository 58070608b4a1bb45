"""Heads that share keys and values: nothing is lost where they are alike, and else the least."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from compress.edits import pool as rooms
from compress.edits.pool import chosen_groups, normed, principal
from compress.edits.pool.evidence import (
    HeadEvidence,
    SharedHead,
    key_energy,
    lost_keys,
    lost_values,
    value_energy,
)
from compress.edits.pool.partition import partition

POOLS = {name: way.pool for name, way in rooms.POOLS.items()}
HEADS, FREQUENCIES, WIDTH, HIDDEN, TOKENS = 4, 3, 5, 12, 200


def random_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    real, imaginary = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return torch.complex(real, imaginary)


def evidence_of(keys: Tensor, queries: Tensor, values: Tensor, weight: Tensor) -> HeadEvidence:
    """keys, queries: complex [T, H, F]; values: [T, H, D]; weight: [hidden, H, D]."""
    grams = torch.einsum("thf,tgf->fhg", keys, keys.conj())
    flat = values.flatten(1)
    outputs = torch.einsum("nhi,nhj->hij", weight, weight)
    return HeadEvidence(grams, queries.abs().square().sum(dim=0), flat.T @ flat, outputs)


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = random_numbers(TOKENS, HEADS, FREQUENCIES, seed=0)
    queries = random_numbers(TOKENS, HEADS, FREQUENCIES, seed=1) * torch.tensor([1, 3, 0.2, 1])[
        :, None
    ]  # fmt: skip
    values = random_numbers(TOKENS, HEADS, WIDTH, seed=2).real
    weight = random_numbers(HIDDEN, HEADS, WIDTH, seed=3).real
    return keys, queries, values, weight


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("members", [(1,), (0, 2), (0, 1, 3)])
def test_what_is_lost_is_what_the_tokens_lose(parts, pool, members: Sequence[int]) -> None:
    keys, queries, values, weight = parts
    seen = evidence_of(*parts)
    shared = pool(seen, members)
    index = list(members)
    k, v = keys[:, index], values[:, index]
    one = torch.einsum("thf,hf->tf", k, shared.key_in)
    missed = k - one[:, None] * shared.key_out
    energy = queries[:, index].abs().square().sum(dim=0)
    expected = float((missed.abs().square().sum(dim=0) * energy).sum())
    assert lost_keys(seen, shared) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    given = v.flatten(1) @ shared.value_in.T
    left = v - torch.einsum("ti,hji->thj", given, shared.value_out)
    outputs = torch.einsum("nhi,thi->thn", weight[:, index], left)
    assert lost_values(seen, shared) == pytest.approx(
        float(outputs.square().sum()), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("members", [(0, 2), (0, 1, 2, 3)])
def test_principal_components_lose_the_least(parts, members: Sequence[int]) -> None:
    """Less than any other way, than itself a little changed, and as much as its eigenvalues say."""
    seen = evidence_of(*parts)
    best = principal.pool(seen, members)
    losses = lost_keys(seen, best), lost_values(seen, best)
    assert losses == pytest.approx(principal.lost(seen, members), rel=1e-9)
    for pool in POOLS.values():
        other = pool(seen, members)
        assert losses[0] <= lost_keys(seen, other) * (1 + 1e-9)
        assert losses[1] <= lost_values(seen, other) * (1 + 1e-9)
    for seed in range(8):
        moved = SharedHead(
            best.members,
            best.key_in + 1e-3 * random_numbers(*best.key_in.shape, seed=seed),
            best.key_out + 1e-3 * random_numbers(*best.key_out.shape, seed=seed + 1),
            best.value_in + 1e-3 * random_numbers(*best.value_in.shape, seed=seed).real,
            best.value_out + 1e-3 * random_numbers(*best.value_out.shape, seed=seed).real,
        )
        assert lost_keys(seen, moved) > losses[0]
        assert lost_values(seen, moved) > losses[1]


@pytest.mark.parametrize("pool", ["pca", "align"])
def test_turned_copies_lose_nothing(parts, pool: str) -> None:
    """Heads that are one head, turned: keys by a phase for each frequency, values by a rotation.
    The mean of them loses something."""
    keys, queries, values, weight = parts
    phases = random_numbers(HEADS, FREQUENCIES, seed=4)
    phases /= phases.abs()
    turns = torch.linalg.qr(random_numbers(HEADS, WIDTH, WIDTH, seed=5).real)[0]
    copies = keys[:, :1] * phases, torch.einsum("tj,hij->thi", values[:, 0], turns)
    seen = evidence_of(copies[0], queries, copies[1], weight)
    everyone = range(HEADS)
    shared, mean = POOLS[pool](seen, everyone), POOLS["mean"](seen, everyone)
    assert lost_keys(seen, shared) <= 1e-12 * key_energy(seen)
    assert lost_values(seen, shared) <= 1e-12 * value_energy(seen)
    assert lost_keys(seen, mean) > 0.1 * key_energy(seen)
    assert lost_values(seen, mean) > 0.1 * value_energy(seen)


def test_a_head_alone_keeps_its_keys_and_its_function(parts) -> None:
    seen = evidence_of(*parts)
    for pool in POOLS.values():
        shared = pool(seen, (2,))
        torch.testing.assert_close(shared.key_in, torch.ones_like(shared.key_in))
        torch.testing.assert_close(shared.key_out, torch.ones_like(shared.key_out))
        made = shared.value_out[0] @ shared.value_in
        torch.testing.assert_close(made, torch.eye(WIDTH, dtype=torch.float64))


def test_heads_that_no_query_and_no_output_reads_do_no_harm(parts) -> None:
    keys, queries, values, weight = parts
    queries, weight = queries.clone(), weight.clone()
    queries[:, 1], weight[:, 1], keys[:, :, 2] = 0, 0, 0
    seen = evidence_of(keys, queries, values, weight)
    for members in ((0, 1), (1,)):
        shared = principal.pool(seen, members)
        for tensor in (shared.key_in, shared.key_out, shared.value_in, shared.value_out):
            assert bool(torch.isfinite(torch.view_as_real(tensor + 0j)).all())
    shared = principal.pool(seen, (0, 1))
    assert lost_keys(seen, shared) <= 1e-9 * key_energy(seen)


def brute_force(heads: int, size: int, cost) -> float:
    def least(left: tuple[int, ...]) -> float:
        if not left:
            return 0.0
        found = []
        for rest in combinations(left[1:], size - 1):
            group = (left[0], *rest)
            others = tuple(x for x in left if x not in group)
            found.append(cost(group) + least(others))
        return min(found)

    return least(tuple(range(heads)))


@pytest.mark.parametrize(("heads", "size"), [(6, 2), (6, 3), (8, 4), (12, 2)])
def test_the_partition_is_the_best_there_is(heads: int, size: int) -> None:
    """12 heads by twos are more partitions than are all tried, and costs of pairs are exact."""
    pairs = torch.rand(heads, heads, generator=torch.Generator().manual_seed(heads + size))

    def cost(group: tuple[int, ...]) -> float:
        return sum(float(pairs[a, b]) for a, b in combinations(group, 2))

    found = partition(heads, size, cost)
    assert sorted(x for group in found for x in group) == list(range(heads))
    assert sum(map(cost, found)) == pytest.approx(brute_force(heads, size, cost))


def test_heads_that_are_alike_find_each_other_among_many() -> None:
    """16 heads of 4 kinds, shuffled."""
    kinds = torch.randperm(16, generator=torch.Generator().manual_seed(0)) % 4
    keys = random_numbers(TOKENS, 4, FREQUENCIES, seed=1)[:, kinds]
    values = random_numbers(TOKENS, 4, WIDTH, seed=2).real[:, kinds]
    weight = random_numbers(HIDDEN, 16, WIDTH, seed=3).real
    queries = random_numbers(TOKENS, 16, FREQUENCIES, seed=4)
    seen = evidence_of(keys, queries, values, weight)
    for group in chosen_groups(seen, 4):
        assert len({int(kinds[x]) for x in group}) == 1


def test_behind_a_norm_no_other_key_of_a_group_loses_less(parts) -> None:
    """All heads read the same: any other weights of the mean lose more."""
    seen, members = evidence_of(*parts), (0, 1, 3)
    shared = normed.pool(seen, members)
    assert torch.equal(shared.key_out, torch.ones_like(shared.key_out))
    torch.testing.assert_close(shared.key_in.sum(dim=0), shared.key_out[0])
    least = lost_keys(seen, shared)
    assert normed.lost(seen, members) == pytest.approx((least, lost_values(seen, shared)))
    for seed in range(20):
        moved = random_numbers(len(members), FREQUENCIES, seed=seed) * 0.1
        assert lost_keys(seen, replace(shared, key_in=shared.key_in + moved)) > least
