"""A latent and a rotated key: exact where they are whole, and else the least is lost."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started, joint_latent
from compress.edits.latent.rotated import (
    chosen_frequencies,
    components_of,
    rotated_key,
    turned_on_average,
    without,
)
from compress.edits.turned import Turned

HEADS, GROUPS, FREQUENCIES, VALUES, HIDDEN, TOKENS = 4, 2, 3, 5, 9, 400
WIDTH = 2 * FREQUENCIES
TURNED = Turned(torch.arange(FREQUENCIES), torch.arange(FREQUENCIES) + FREQUENCIES)


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) @ mixed


Q = numbers(TOKENS, HEADS, WIDTH, seed=0)
K = numbers(TOKENS, GROUPS * WIDTH, seed=1).view(TOKENS, GROUPS, WIDTH)
V = numbers(TOKENS, GROUPS * VALUES, seed=2).view(TOKENS, GROUPS, VALUES)
O = numbers(HIDDEN, HEADS, VALUES, seed=3)  # noqa: E741 (beside Q, K and V)
ROTATION = torch.polar(
    torch.linspace(0.2, 0.9, HEADS * FREQUENCIES, dtype=torch.float64),
    torch.linspace(-1, 2, HEADS * FREQUENCIES, dtype=torch.float64),
).view(HEADS, FREQUENCIES)


@pytest.fixture(scope="module")
def seen() -> AttentionEvidence:
    states = torch.cat([K.flatten(1), V.flatten(1)], dim=1)
    outputs = torch.einsum("nhi,nhj->hij", O, O).view(GROUPS, -1, VALUES, VALUES).sum(dim=1)
    queries = torch.einsum("thi,thj->hij", Q, Q) / TOKENS
    return AttentionEvidence(TURNED, states.T @ states / TOKENS, queries, ROTATION, outputs)


EVERY = [f for f in range(FREQUENCIES) for _ in range(GROUPS)]


def test_every_component_leaves_nothing_of_the_keys(seen) -> None:
    """The shared key then has all scores, at every two positions."""
    key = rotated_key(seen, EVERY)
    torch.testing.assert_close(without(seen, key), torch.zeros(12, 12, dtype=torch.float64))
    q, k = TURNED.numbers(Q), TURNED.numbers(K)
    shared = torch.einsum("gs,tgs->ts", key.key_in[:, 0], k[..., key.frequencies])
    reads = key.key_out[:, 0].repeat_interleave(HEADS // GROUPS, dim=0).conj()
    asked = reads * q[..., key.frequencies]
    turn = torch.polar(
        torch.ones(FREQUENCIES, dtype=torch.float64), torch.tensor([0.3, 2.0, 5.0]).double()
    )
    for head in range(HEADS):
        plain = (q[:9, None, head] * k[None, :7, head // 2].conj() * turn).real.sum(dim=-1)
        made = (asked[:9, None, head] * shared[None, :7].conj() * turn[key.frequencies]).real
        torch.testing.assert_close(made.sum(dim=-1), plain)


@pytest.mark.parametrize("kept", [[0], [1, 1], [0, 2, 2]])
def test_what_is_left_of_scores_is_what_the_other_components_have(seen, kept: list[int]) -> None:
    left = K.flatten(1) @ without(seen, rotated_key(seen, kept)).T
    rest = TURNED.numbers(left.view(TOKENS, GROUPS, WIDTH)).abs().square().mean(dim=0)  # [G, F]
    energy = seen.by_group(seen.query_energy()).sum(dim=1)
    parts = components_of(seen)
    expected = sum(float(parts.energy[f, kept.count(f) :].sum()) for f in range(FREQUENCIES))
    assert float((rest * energy).sum()) == pytest.approx(expected, rel=1e-9)


def test_no_other_direction_has_more_of_the_scores(seen) -> None:
    """Components are the best of all ways to share a key at a frequency."""
    parts = components_of(seen)
    for seed in range(20):
        other = torch.view_as_complex(numbers(FREQUENCIES, GROUPS, 2, seed=seed))
        other = other / other.norm(dim=1, keepdim=True)
        weighted = seen.key_grams() * parts.weights[:, :, None] * parts.weights[:, None, :]
        has = torch.einsum("fg,fgh,fh->f", other.conj(), weighted, other).real
        assert (has <= parts.energy.amax(dim=1) * (1 + 1e-12)).all()


def test_a_rotation_that_is_nearly_constant_gains_little(seen) -> None:
    still = AttentionEvidence(
        TURNED, seen.states, seen.queries, torch.ones_like(seen.rotation), seen.outputs
    )
    assert float(components_of(still).gains.abs().max()) < 1e-12
    never = AttentionEvidence(
        TURNED, seen.states, seen.queries, torch.zeros_like(seen.rotation), seen.outputs
    )
    torch.testing.assert_close(components_of(never).gains, components_of(never).energy)
    best = chosen_frequencies(components_of(seen).gains, 4)
    assert list(best) == sorted(best)
    lowest = min(float(components_of(seen).gains[f, best.count(f) - 1]) for f in set(best))
    for f in range(FREQUENCIES):
        if best.count(f) < GROUPS:
            assert float(components_of(seen).gains[f, best.count(f)]) <= lowest


def test_a_mean_rotation_turns_queries_as_numbers(seen) -> None:
    turned = torch.einsum("hij,thj->thi", turned_on_average(seen), Q)
    torch.testing.assert_close(TURNED.numbers(turned), TURNED.numbers(Q) * ROTATION)


def lost(seen: AttentionEvidence, kept: list[int], into: Tensor, out: tuple[Tensor, Tensor]):
    """Scores without rotation and outputs that are lost, measured token by token."""
    left = (K.flatten(1) @ without(seen, rotated_key(seen, kept)).T).view(TOKENS, GROUPS, WIDTH)
    latent = torch.cat([K.flatten(1), V.flatten(1)], dim=1) @ into.T
    keys = left - torch.einsum("tr,gdr->tgd", latent, out[0])
    values = V - torch.einsum("tr,gdr->tgd", latent, out[1])
    asked = torch.einsum("hij,thj->thi", turned_on_average(seen), Q)
    of_keys = (
        sum(
            float((keys[:, h // 2] @ (asked[:, h].T @ asked[:, h]) * keys[:, h // 2]).sum())
            for h in range(HEADS)
        )
        / TOKENS**2
    )
    of_values = (
        sum(float((values[:, h // 2] @ O[:, h].T).square().sum()) for h in range(HEADS)) / TOKENS
    )
    return of_keys, of_values


@pytest.mark.parametrize("kept", [EVERY, [0, 1]])
def test_a_whole_latent_loses_nothing(seen, kept: list[int]) -> None:
    rank = GROUPS * (VALUES if kept == EVERY else VALUES + WIDTH)
    made = joint_latent(Started(seen, rotated_key(seen, kept)), rank)
    of_keys, of_values = lost(seen, kept, made.into, (made.keys, made.values))
    assert max(of_keys, of_values) < 1e-12
    assert made.lost < 1e-6  # as it is counted, in fp32


@pytest.mark.parametrize("rank", [2, 5])
def test_no_latent_near_it_loses_less(seen, rank: int) -> None:
    """Of scores and outputs, each as a share of all of its kind."""
    kept = [0, 1]
    made = joint_latent(Started(seen, rotated_key(seen, kept)), rank)
    nothing = torch.zeros_like(made.into)
    whole = lost(seen, kept, nothing, (made.keys, made.values))

    def share(into: Tensor, keys: Tensor, values: Tensor) -> float:
        now = lost(seen, kept, into, (keys, values))
        return (now[0] / whole[0] + now[1] / whole[1]) / 2

    best = share(made.into, made.keys, made.values)
    assert best == pytest.approx(made.lost, rel=1e-6)
    for seed in range(10):
        moved = [
            x + 1e-3 * float(x.norm()) * numbers(*x.shape, seed=seed + i) / math.sqrt(x.numel())
            for i, x in enumerate((made.into, made.keys, made.values))
        ]
        assert share(*moved) > best
    latent = torch.cat([K.flatten(1), V.flatten(1)], dim=1) @ made.into.T
    assert float(latent.square().mean()) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("larger", [1e-3, 1.0, 300.0])
def test_the_shared_key_is_as_large_as_the_latent(seen, larger: float) -> None:
    """Whatever the sizes of queries and keys: both share a scale in caches of 8 bits."""
    states = seen.states.clone()
    states[: seen.keys] *= larger
    states[:, : seen.keys] *= larger
    grown = replace(seen, states=states)
    key = rotated_key(grown, EVERY[:4])
    joint = joint_latent(Started(grown, key), 5)
    shared = torch.einsum(
        "gs,tgs->ts", key.key_in[:, 0], larger * TURNED.numbers(K)[..., key.frequencies]
    )
    assert 0.5 <= float(shared.abs().square().mean()) / 2 <= 2
    latent = torch.cat([larger * K.flatten(1), V.flatten(1)], dim=1) @ joint.into.T
    assert 0.5 <= float(latent.square().mean()) <= 2
