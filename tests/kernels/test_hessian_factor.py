"""R with H = R Rᵀ, and what GPTQ needs of it."""

import pytest
import torch

from compress_kernels import hessian_factor
from compress_kernels.gptq.factor import inverse_upper


def test_its_inverse_is_the_upper_cholesky_factor_of_the_inverse() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 90, dtype=torch.float64)
    h = x.T @ x
    factor = hessian_factor(h)
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor @ factor.T, h)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    torch.testing.assert_close(inverse_upper(factor), upper)


def test_refuses_what_is_not_positive_definite() -> None:
    h = torch.eye(4)
    h[2, 2] = -1.0
    with pytest.raises(torch.linalg.LinAlgError):
        hessian_factor(h)


def test_misuse() -> None:
    with pytest.raises(ValueError, match=r"hessian has shape \[3, 4\]; a square matrix"):
        hessian_factor(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"hessian is torch.bfloat16; fp32"):
        hessian_factor(torch.eye(3).bfloat16())
