"""Muon against torch's own, which multiplies in bf16, and against AdamW where it is that."""

import pytest
import torch

from compress.distill.muon import orthogonal
from compress.distill.optimizer import make


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_all_directions_count_alike(shape: tuple[int, int]) -> None:
    found = torch.linalg.svdvals(orthogonal(normal(*shape)))
    assert found.min() > 0.6
    assert found.max() < 1.3


def test_turns_and_sizes_go_through() -> None:
    """Of a matrix that is turned and made larger the result is turned alike."""
    matrix = normal(6, 9)
    left, right = (torch.linalg.qr(normal(n, n, seed=n)).Q for n in (6, 9))
    turned = orthogonal(1e3 * left @ matrix @ right)
    torch.testing.assert_close(turned, left @ orthogonal(matrix) @ right, rtol=1e-4, atol=1e-4)


def test_a_zero_matrix_stays() -> None:
    assert not orthogonal(torch.zeros(3, 5)).any()


def test_steps_are_those_of_torch() -> None:
    ours, theirs = ({"w": normal(8, 24).requires_grad_()} for _ in range(2))
    start = ours["w"].detach().clone()
    mine = make("muon", ours, 1e-2, ["w"])
    reference = torch.optim.Muon(
        theirs.values(), lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(3):
        for each in (ours, theirs):
            each["w"].grad = normal(8, 24, seed=seed + 1)
        mine.step()
        reference.step()
    moved, want = (each["w"].detach() - start for each in (ours, theirs))
    assert (moved - want).norm() < 0.02 * want.norm()  # bf16 is 2^-8


def test_the_rest_moves_as_by_adamw() -> None:
    ours, theirs = ({"norm": normal(7).requires_grad_()} for _ in range(2))
    both = make("muon", ours, 1e-2), make("adamw", theirs, 1e-2)
    for seed in range(4):
        for each, optimizer in zip((ours, theirs), both, strict=True):
            each["norm"].grad = normal(7, seed=seed + 1)
            optimizer.step()
    torch.testing.assert_close(ours["norm"], theirs["norm"], rtol=1e-6, atol=1e-6)
