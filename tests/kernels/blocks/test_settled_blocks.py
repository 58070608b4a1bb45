"""GPTQ's loop within blocks: compiled and plain give the same bytes, and less is lost."""

import pytest
import torch
from torch import Tensor

from compress_kernels import decode_blocks, hessian_factor, round_blocks, settle_blocks
from compress_kernels.blocks.bytes import unpack
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.cpu import super_blocks as cpu
from compress_kernels.cpu.library import native
from compress_kernels.reference import super_blocks as reference

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
WIDTH = 256


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [21, 256], a Hessian, and an order of its columns."""
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(600, WIDTH, generator=seeded) @ torch.randn(WIDTH, WIDTH, generator=seeded)
    hessian = x.T @ x / 600
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    order = torch.randperm(WIDTH, generator=seeded)
    return torch.randn(21, WIDTH, generator=seeded) * 0.05, hessian, order


def lost_energy(weight: Tensor, found: Tensor, hessian: Tensor) -> float:
    difference = (weight - found).double()
    return float(((difference @ hessian.double()) * difference).sum())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_less_is_lost_and_scales_stay(kind: str) -> None:
    layout = LAYOUTS[kind]
    weight, hessian, order = problem()
    factor = hessian_factor(hessian[order][:, order])
    data = round_blocks(kind, weight, hessian.diagonal().contiguous())
    settled, lost = settle_blocks(kind, weight[:, order], data, factor, order)
    found = decode_blocks(kind, settled)
    assert torch.allclose(weight[:, order] - found[:, order], lost, atol=1e-6)
    before = lost_energy(weight, decode_blocks(kind, data), hessian)
    assert lost_energy(weight, found, hessian) < 0.85 * before
    old, new = (unpack(layout, x.view(-1, layout.size)) for x in (data, settled))
    assert torch.equal(old.scales, new.scales)
    assert torch.equal(old.d, new.d)


@needs_native
@pytest.mark.parametrize("kind", LAYOUTS)
def test_compiled_loop_gives_the_bytes_of_the_definition(kind: str) -> None:
    weight, hessian, order = problem(1)
    factor = hessian_factor(hessian[order][:, order])
    data = round_blocks(kind, weight, None)
    arguments = (LAYOUTS[kind], weight[:, order], data, factor, order)
    found, wanted = cpu.settle_blocks(*arguments), reference.settle_blocks(*arguments)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_diagonal_hessian_changes_nothing() -> None:
    weight, _, _ = problem()
    data = round_blocks("Q4_K", weight, None)
    order = torch.arange(WIDTH)
    assert torch.equal(settle_blocks("Q4_K", weight, data, torch.eye(WIDTH), order)[0], data)


def test_what_does_not_fit_is_refused() -> None:
    weight, hessian, order = problem()
    data = round_blocks("Q4_K", weight, None)
    with pytest.raises(ValueError, match=r"order is \[256\]; each of 0 to 255 once is needed"):
        settle_blocks("Q4_K", weight, data, hessian, order.clamp(min=1))
    with pytest.raises(ValueError, match=r"data is shape \[21, 210\]; \[21, 144\] is needed"):
        settle_blocks("Q4_K", weight, round_blocks("Q6_K", weight, None), hessian, order)
    with pytest.raises(ValueError, match=r"factor is shape \[2, 2\]; \[256, 256\] is needed"):
        settle_blocks("Q4_K", weight, data, torch.eye(2), order)
