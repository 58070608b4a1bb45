"""The ops on a CUDA device against the references on the CPU."""

import pytest
import torch

from compress_kernels import Grid, SearchedScales, gptq_columns, gram_, group_scale, hessian_factor
from compress_kernels.reference import gram as reference_gram
from compress_kernels.reference import scale as reference_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
RATIOS = torch.linspace(1.0, 0.5, 11)


def devices() -> list[str]:
    """Every device: a launch must go where its tensors are, whichever one is current."""
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gram(dtype: torch.dtype) -> None:
    x = torch.randn(700, 257).to(dtype)
    want = torch.zeros(257, 257)
    reference_gram.gram_(x, want)
    for device in devices():
        got = torch.zeros(257, 257, device=device)
        gram_(x.to(device), got)
        assert torch.equal(got, got.T)
        assert (got.cpu() - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(67, 45), (300, 128), (1, 70000)])
def test_group_scale(shape: tuple[int, int], symmetric: bool) -> None:
    w, importance = torch.randn(shape), torch.rand(shape[1])
    grid = Grid(4, symmetric, torch.bfloat16)
    want, want_zero = reference_scale.group_scale(w, RATIOS, importance, grid)
    for device in devices():
        got, got_zero = group_scale(
            w.to(device), RATIOS, importance.to(device), 4, symmetric, torch.bfloat16
        )
        assert (got.cpu() == want).float().mean() >= 0.98
        if got_zero is not None and want_zero is not None:
            assert (got_zero.cpu() == want_zero).float().mean() >= 0.98


@pytest.mark.parametrize("group_size", [16, 96])
def test_gptq_columns(group_size: int) -> None:
    weight, x = torch.randn(50, 96), torch.randn(400, 96) @ torch.randn(96, 96)
    hessian = x.T @ x / 400 + 0.01 * torch.eye(96)
    factor = hessian_factor(hessian)

    def solve(device: str) -> float:
        grid, scales = Grid(4, True, torch.bfloat16), SearchedScales(RATIOS)
        result = gptq_columns(
            weight.to(device), factor.to(device), grid, group_size, scales, block=32
        )
        lost = weight - result.quantized.cpu()
        return float(((lost @ hessian) * lost).sum())

    want = solve("cpu")
    for device in devices():
        assert solve(device) == pytest.approx(want, rel=0.02)
