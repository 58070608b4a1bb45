"""Algorithm 1 of GPTQ (Frantar et al. 2022, arXiv 2210.17323) with group scales."""

import torch
from torch import Tensor

from compress_kernels.gptq.factor import inverse_upper
from compress_kernels.gptq.problem import ColumnResult, Problem, empty_result
from compress_kernels.reference.scale import group_scale, quantize_column


def gptq_columns(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    """Round weight [N, K] column by column; H = factor factorᵀ, fp32 [K, K] upper triangular."""
    upper = inverse_upper(factor)  # U of H⁻¹ = UᵀU
    result = empty_result(weight, problem)
    work = result.quantized.copy_(weight)
    errors = torch.empty_like(weight)
    groups = problem.groups.tolist()
    for start, stop in problem.borders():
        for k in range(start, stop):
            if problem.scale is None and k % problem.group_size == 0:
                _choose_scale(work, k, problem, result)
            quantized = _round_column(work[:, k], k, groups[k], problem, result)
            errors[:, k] = (work[:, k] - quantized) / upper[k, k]
            work[:, k + 1 : stop] -= torch.outer(errors[:, k], upper[k, k + 1 : stop])
            work[:, k] = quantized
        work[:, stop:] -= errors[:, start:stop] @ upper[start:stop, stop:]
    return result


def _choose_scale(work: Tensor, start: int, problem: Problem, result: ColumnResult) -> None:
    """Scale of the group that starts at this column, from the weights as updated so far."""
    columns = slice(start, start + problem.group_size)
    importance = None if problem.importance is None else problem.importance[columns]
    scale, zero = group_scale(work[:, columns], problem.ratios, importance, problem.grid)
    result.scale[:, start // problem.group_size] = scale
    if result.zero is not None and zero is not None:
        result.zero[:, start // problem.group_size] = zero


def _round_column(w: Tensor, k: int, group: int, problem: Problem, result: ColumnResult) -> Tensor:
    """Store the codes of column k, w [N]; return the values they stand for."""
    scale = result.scale[:, group]
    zero = torch.zeros_like(scale) if result.zero is None else result.zero[:, group].float()
    codes = quantize_column(w, scale, zero, problem.grid)
    result.codes[:, k] = codes.to(torch.int8)
    return (codes - zero) * scale
