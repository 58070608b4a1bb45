"""One triangular factor of the Hessian; all that the column loop needs of it.

GPTQ (arXiv 2210.17323) works with U, the upper Cholesky factor of the inverse, H⁻¹ = UᵀU, which
takes a Cholesky, an inverse and a second Cholesky: 2/3 K³ multiply-adds and the accuracy of an
explicit inverse. With H = R Rᵀ, R upper triangular, H⁻¹ = R⁻ᵀ R⁻¹, so U = R⁻¹: R comes from one
Cholesky of H with rows and columns reversed, 1/6 K³ multiply-adds, and the compiled column loop
never inverts it; see `lazy`. The reference does, to read as the paper does.
"""

import torch
from torch import Tensor


def hessian_factor(hessian: Tensor) -> Tensor:
    """R, upper triangular with a positive diagonal, so that hessian = R Rᵀ: fp32 [K, K].

    hessian: symmetric positive definite, fp32 [K, K], damped by the caller; not modified.
    An error e in column i costs (e R_ii)² once all later columns have made up for it.
    Raises torch.linalg.LinAlgError if it is not positive definite, ValueError on a wrong shape.
    """
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"hessian has shape {list(hessian.shape)}; a square matrix is needed")
    if hessian.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"hessian is {hessian.dtype}; fp32 is needed")
    lower: Tensor = torch.linalg.cholesky(hessian.flip(0, 1))
    return lower.flip(0, 1)


def inverse_upper(factor: Tensor) -> Tensor:
    """Inverse of an upper triangular matrix [K, K]."""
    eye = torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=True)
    return inverse
