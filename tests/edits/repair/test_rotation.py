"""One basis for the residual stream: exact with all directions, and the best of its kind with
fewer."""

import pytest
import torch

from compress.edits.repair.ridge import Affine, refit
from compress.edits.repair.rotation import (
    channels,
    norm_gain,
    normalised,
    principal,
    reader_map,
    rotated_rows,
)
from compress_calibration.moments import MomentsAccumulator

HIDDEN, INNER, WORDS, EPS = 24, 32, 400, 1e-5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model():
    """Blocks of norm, reader, tanh and writer on a residual stream; gains far from 1."""
    blocks = [
        {
            "gain": 1 + normal(HIDDEN, seed=i).abs(),
            "reader": normal(INNER, HIDDEN, seed=10 + i) / 8,
            "writer": normal(HIDDEN, INNER, seed=20 + i) / 4,
            "bias": normal(HIDDEN, seed=30 + i) / 4,
        }
        for i in range(3)
    ]
    table = normal(WORDS, HIDDEN, seed=40) * torch.linspace(3, 0.05, HIDDEN)
    head = normal(WORDS, HIDDEN, seed=41)
    return {"table": table, "blocks": blocks, "head": head, "gain": 1 + normal(HIDDEN).abs()}


def run(m, ids):
    """Logits, and the normalised stream at every norm."""
    h, seen = m["table"][ids], []
    for b in m["blocks"]:
        seen.append(normalised(h, EPS))
        h = h + torch.tanh((seen[-1] * b["gain"]) @ b["reader"].T) @ b["writer"].T + b["bias"]
    seen.append(normalised(h, EPS))
    return (seen[-1] * m["gain"]) @ m["head"].T, seen


def rotated(m, basis, gains=None):
    gains = gains or [1.0] * (len(m["blocks"]) + 1)
    ones = [torch.full((basis.directions.shape[1],), g) for g in gains]
    blocks = [
        {
            "gain": one,
            "reader": rotated_reader(b["reader"], b["gain"], basis).float(),
            "writer": rotated_writer(b["writer"], basis).float(),
            "bias": rotated_writer(b["bias"], basis).float(),
        }
        for b, one in zip(m["blocks"], ones, strict=False)
    ]
    table = rotated_rows(m["table"], basis).float()
    head = rotated_reader(m["head"], m["gain"], basis).float()
    return {"table": table, "blocks": blocks, "head": head, "gain": ones[-1]}


def rotated_reader(weight, gain, basis):
    return weight.double() @ reader_map(gain, basis)


def rotated_writer(weight, basis):
    return rotated_rows(weight.movedim(0, -1), basis).movedim(-1, 0)


def gram(seen):
    x = torch.cat([s.flatten(0, -2) for s in seen]).double()
    return x.T @ x


IDS = torch.arange(WORDS)


@pytest.mark.parametrize("kind", ["principal", "channels", "random"])
def test_with_all_directions_the_model_computes_the_same(kind):
    m = model()
    logits, seen = run(m, IDS)
    basis = {
        "principal": lambda: principal(gram(seen), HIDDEN),
        "channels": lambda: channels(torch.rand(HIDDEN), HIDDEN),
        "random": lambda: principal(gram([normal(99, HIDDEN)]), HIDDEN),
    }[kind]()
    got, _ = run(rotated(m, basis), IDS)
    assert float((got - logits).norm() / logits.norm()) < 1e-6
    assert basis.share == pytest.approx(1)


def test_principal_directions_lose_least():
    """Of the normalised stream, as much as lies in the directions left out (Eckart-Young)."""
    _, seen = run(model(), IDS)
    total, x = gram(seen), torch.cat(seen).double()
    for keep in (1, 7, 23):
        basis = principal(total, keep)
        r = basis.directions
        torch.testing.assert_close(r.T @ r, torch.eye(keep, dtype=torch.float64))
        lost = float((x - x @ r @ r.T).square().sum() / x.square().sum())
        assert lost == pytest.approx(1 - basis.share, rel=1e-6)
        other = torch.linalg.qr(r + 0.05 * normal(HIDDEN, keep).double()).Q
        assert lost < float((x - x @ other @ other.T).square().sum() / x.square().sum())


def test_a_direction_has_one_sign():
    total = gram([normal(99, HIDDEN)])
    flip = torch.where(torch.arange(HIDDEN) % 2 == 0, 1.0, -1.0).double()
    one, other = principal(total, 9), principal(total * flip * flip[:, None], 9)
    torch.testing.assert_close(one.directions.abs(), other.directions.abs(), rtol=1e-6, atol=1e-9)
    largest = one.directions.abs().argmax(dim=0)
    assert (one.directions[largest, range(9)] > 0).all()


def test_channels_are_a_slice():
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0])
    basis = channels(scores, 2)
    weight = normal(5, 4)
    assert torch.equal(rotated_reader(weight, None, basis).float(), weight[:, [0, 2]])
    assert torch.equal(rotated_writer(weight.T, basis).float(), weight.T[[0, 2]])
    assert basis.share == pytest.approx(5 / 8)


def moments(x, y):
    sums = MomentsAccumulator.create("norm", x.shape[1], y.shape[1])
    sums.add(x, y)
    return sums.moments()


def test_the_gain_is_the_best_single_factor():
    x, y = normal(80, 6), 0.7 * normal(80, 6) + 0.1 * normal(80, 6, seed=1)
    eye = torch.eye(6).double()
    got = norm_gain(moments(x, y), eye)
    error = [float((y - g * x).square().sum()) for g in (got - 1e-2, got, got + 1e-2)]
    assert error[1] < min(error[0], error[2])
    assert got == pytest.approx(float((x * y).sum() / x.square().sum()), rel=1e-5)
    assert norm_gain(moments(0 * x, y), eye) == 1.0


def test_gain_and_refit_bring_a_cut_model_nearer():
    """Each reader again sees what the source's saw, as far as the cut leaves it."""
    m = model()
    logits, seen = run(m, IDS)
    basis = principal(gram(seen), 18)
    plain = rotated(m, basis)
    _, narrow = run(plain, IDS)
    r = basis.directions.float()
    gains = [
        norm_gain(moments(b, a @ r), torch.eye(18).double())
        for a, b in zip(seen, narrow, strict=True)
    ]
    scaled = rotated(m, basis, gains)
    sees = run(scaled, IDS)[1][-1] * scaled["gain"]
    fit, held = (moments(sees[p::2], logits[p::2]) for p in (0, 1))
    head = refit(fit, held, Affine(scaled["head"])).linear.weight
    errors = [
        float((run(x, IDS)[0] - logits).norm()) for x in (plain, scaled, {**scaled, "head": head})
    ]
    assert errors[0] > errors[1] > errors[2]


def test_a_head_that_is_the_embedding_needs_channels_scaled_by_half_the_gain():
    """One matrix for both gives the source's logits, but for the scale that a norm takes out."""
    table, gain = normal(WORDS, HIDDEN).double(), 1 + normal(HIDDEN, seed=1).double().abs()
    stream = normal(50, HIDDEN, seed=2).double()
    basis = principal(stream.T @ stream, HIDDEN, gain.sqrt())
    shared = rotated_rows(table, basis)
    logits = (stream @ basis.into) @ shared.T
    torch.testing.assert_close(logits, (stream * gain) @ table.T)
    torch.testing.assert_close(basis.into @ basis.back, torch.eye(HIDDEN, dtype=torch.float64))
