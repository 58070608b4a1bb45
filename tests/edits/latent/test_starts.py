"""What others begin a latent with: each is the best in its own metric, and as its paper has it."""

import pytest
import torch
from torch import Tensor

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started, joint_latent
from compress.edits.latent.rotated import components_of, rotated_key, without
from compress.edits.latent.starts import STARTS
from compress.edits.latent.transmla import by_size
from compress.edits.repair.ridge import Affine
from compress.edits.turned import Turned

HEADS, GROUPS, FREQUENCIES, VALUES, INPUTS, TOKENS = 4, 2, 4, 6, 13, 300
WIDTH, RANK = 2 * FREQUENCIES, 7
TURNED = Turned(torch.arange(FREQUENCIES), torch.arange(FREQUENCIES) + FREQUENCIES)
KEPT = [0, 2]


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) @ mixed


X = numbers(TOKENS, INPUTS, seed=0)
PARTS = {
    role: Affine(numbers(rows, INPUTS, seed=seed).float(), None)
    for seed, (role, rows) in enumerate(
        {"q": HEADS * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * VALUES}.items(), start=1
    )
}
Q, K, V = (X @ PARTS[role].weight.double().T for role in "qkv")
W = torch.cat([PARTS[role].weight.double() for role in "kv"])


@pytest.fixture(scope="module")
def seen() -> AttentionEvidence:
    states, q = torch.cat([K, V], dim=1), Q.unflatten(1, (HEADS, -1))
    outputs = numbers(GROUPS, VALUES, VALUES, seed=5)
    return AttentionEvidence(
        TURNED,
        states.T @ states / TOKENS,
        torch.einsum("thi,thj->hij", q, q) / TOKENS,
        torch.full((HEADS, FREQUENCIES), 0.5 + 0.1j, dtype=torch.complex128),
        outputs @ outputs.mT,
    )


def left_by(start: Started) -> Tensor:
    """[W_K; W_V] without what the shared key has of it."""
    rest = without(start.seen, start.key)
    return torch.cat([rest @ W[: GROUPS * WIDTH], W[GROUPS * WIDTH :]])


def made_of(start: Started, rank: int) -> Tensor:
    """The same as the latent has it."""
    made = joint_latent(start, rank)
    return torch.cat([made.keys.flatten(0, 1), made.values.flatten(0, 1)]) @ made.into @ W


def started(seen: AttentionEvidence, way: str, kept=KEPT, fold: int = 1) -> Started:
    return STARTS[way](seen, PARTS, kept, fold)


def test_care_is_the_whitened_svd_that_is_cut_and_unwhitened(seen) -> None:
    """As the paper writes it, with both roots of the covariance."""
    start = started(seen, "care")
    energy, vectors = torch.linalg.eigh(X.T @ X / TOKENS)
    root, inverse = ((vectors * energy**power) @ vectors.T for power in (0.5, -0.5))
    left, sizes, right = torch.linalg.svd(root @ left_by(start).T, full_matrices=False)
    theirs = inverse @ (left[:, :RANK] * sizes[:RANK]) @ right[:RANK]
    torch.testing.assert_close(made_of(start, RANK), theirs.T, rtol=1e-4, atol=1e-4)


def test_care_loses_the_least_of_keys_and_values(seen) -> None:
    """On data; TransMLA, which balances them, loses more of both together, and weights alone too,
    where the same key is taken out."""
    care = started(seen, "care")

    def lost(start: Started) -> float:
        gone = left_by(care) - made_of(start, RANK)
        return float((X @ gone.T).square().sum())

    weights = Started(started(seen, "svd").seen, care.key, balanced=False)
    assert lost(care) < lost(started(seen, "transmla"))
    assert lost(care) < lost(weights)


@pytest.mark.parametrize("way", ["transmla", "care", "svd"])
def test_a_whole_latent_loses_nothing_of_what_it_is_given(seen, way: str) -> None:
    start = started(seen, way)
    torch.testing.assert_close(made_of(start, len(W)), left_by(start), rtol=1e-5, atol=1e-5)


def test_weights_alone_are_cut_as_eckart_and_young_say(seen) -> None:
    start = started(seen, "svd")
    left = left_by(start)
    gone = (left - made_of(start, RANK)).square().sum()
    sizes = torch.linalg.svdvals(left)
    assert float(gone) == pytest.approx(float(sizes[RANK:].square().sum()), rel=1e-5)


def test_the_mean_stands_in_place_of_all_heads_at_its_frequencies(seen) -> None:
    start = started(seen, "svd")
    heads = TURNED.numbers(K.unflatten(1, (GROUPS, -1)))  # [tokens, G, F]
    shared = torch.einsum("gs,tgs->ts", start.key.key_in[:, 0], heads[..., KEPT])
    torch.testing.assert_close(shared, heads.mean(dim=1)[:, KEPT])
    assert (start.key.key_out == 1).all()
    rest = TURNED.numbers((K @ without(start.seen, start.key).T).unflatten(1, (GROUPS, -1)))
    expected = heads.clone()
    expected[..., KEPT] = 0
    torch.testing.assert_close(rest, expected)


def test_a_bias_is_one_more_column(seen) -> None:
    bias = numbers(len(W), seed=9).float()
    k, v = bias[: GROUPS * WIDTH], bias[GROUPS * WIDTH :]
    parts = {
        "k": Affine(PARTS["k"].weight, k),
        "v": Affine(PARTS["v"].weight, v),
    }
    found = STARTS["svd"](seen, parts, KEPT, 1).seen.states
    torch.testing.assert_close(found, W @ W.T + bias.double()[:, None] * bias.double())


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_folded_frequencies_leave_what_their_other_components_have(seen, fold: int) -> None:
    start = started(seen, "transmla", fold=fold)
    rest = K @ without(start.seen, start.key).T
    energy = components_of(by_size(seen, fold)).energy / (2 * HEADS // GROUPS)
    kept = [sum(f // fold == block for f in KEPT) for block in range(FREQUENCIES // fold)]
    expected = sum(float(row[count:].sum()) for row, count in zip(energy, kept, strict=True))
    assert float(rest.square().sum() / TOKENS) == pytest.approx(expected, rel=1e-9)


def test_the_more_frequencies_are_folded_the_more_energy_few_components_have(seen) -> None:
    """Proposition 2 of the paper; with as many components of each block."""
    most = []
    for fold in (1, 2, 4):
        energy = components_of(by_size(seen, fold)).energy
        most.append(float(energy[:, :fold].sum()))
    assert most == sorted(most)


def test_folded_components_have_the_most_of_all_real_directions(seen) -> None:
    """The same for both numbers of a pair."""
    parts = components_of(by_size(seen, 2))
    assert float(parts.vectors.imag.abs().max()) < 1e-12
    heads = TURNED.numbers(K.unflatten(1, (GROUPS, -1)))
    for seed in range(10):
        other = numbers(FREQUENCIES // 2, GROUPS, 2, seed=seed)
        other = other / other.flatten(1).norm(dim=1)[:, None, None]
        folded = heads.unflatten(2, (-1, 2)).permute(0, 2, 1, 3)  # [tokens, F / 2, G, 2]
        has = (folded * other).sum(dim=(2, 3)).abs().square().mean(dim=0)
        best = parts.energy[:, 0] / (2 * HEADS // GROUPS)
        assert (has <= best * (1 + 1e-12)).all()


def test_folded_frequencies_that_are_one_lose_nothing(seen) -> None:
    """All components of a block, all turned alike: scores stay as they are."""
    every = [f for f in range(FREQUENCIES) for _ in range(GROUPS)]
    key = rotated_key(by_size(seen, 2), every)
    assert float(without(by_size(seen, 2), key).abs().max()) < 1e-12
    turn = torch.polar(torch.ones(2, dtype=torch.float64), torch.tensor([0.3, 2.0]).double())
    q, k = (TURNED.numbers(x[:9].unflatten(1, (-1, WIDTH))) for x in (Q, K))
    shared = torch.einsum("gms,tgms->ts", key.key_in, k[..., key.made_of])
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        each = turn.repeat_interleave(2)
        plain = (q[:, None, head] * k[None, :, group].conj() * each).real.sum(dim=-1)
        reads = torch.einsum("ms,tms->ts", key.key_out[group].conj(), q[:, head][:, key.made_of])
        made = (reads[:, None] * shared.conj() * turn[key.blocks]).real.sum(dim=-1)
        torch.testing.assert_close(made, plain)
