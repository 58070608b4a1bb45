"""Run by test_triton.py: every Triton kernel in the interpreter against its reference."""

import json
from dataclasses import replace

import torch

from compress_kernels import hessian_factor
from compress_kernels.gptq.problem import Grid, Problem
from compress_kernels.reference import columns as reference_columns
from compress_kernels.reference import gram as reference_gram
from compress_kernels.reference import scale as reference_scale
from compress_kernels.triton import columns, gram, scale

RATIOS = torch.tensor([1.0, 0.8])
BOTH = torch.cat([RATIOS, -RATIOS])  # for symmetric grids
# Rows for the loop over columns, of one program or of two: the interpreter takes 1 s for each.
ONE, TWO = 5, 11


def scales(grid: Grid, weighted: bool) -> dict[str, float]:
    w = torch.randn(9, 300) * torch.logspace(-8, 1, 9)[:, None]
    importance = torch.rand(300) if weighted else None
    ratios = BOTH if grid.symmetric else RATIOS
    got, got_zero = scale.group_scale(w, ratios, importance, grid)
    want, want_zero = reference_scale.group_scale(w, ratios, importance, grid)
    equal = float((got == want).float().mean())
    if got_zero is not None and want_zero is not None:
        equal = min(equal, float((got_zero == want_zero).float().mean()))
    return {"equal": equal, "error": float(((got - want) / want).abs().max())}


def loop(rows: int, group_size: int, symmetric: bool, fixed: bool = False) -> dict[str, float]:
    weight = torch.randn(rows, 48)
    x = torch.randn(96, 48) @ torch.randn(48, 48)
    factor = hessian_factor(x.T @ x / 96 + torch.eye(48))
    groups = (torch.arange(48) // group_size).to(torch.int32)
    grid = Grid(4, symmetric, torch.bfloat16)
    ratios = BOTH if symmetric else RATIOS
    problem = Problem(grid, group_size, ratios, None, None, None, groups, 16)
    if fixed:
        steps = (torch.rand(rows, 48 // group_size) / 4 + 0.1).bfloat16().float()
        zero = None if symmetric else torch.randint(-3, 3, steps.shape, dtype=torch.int8)
        problem = replace(problem, scale=steps, zero=zero, groups=groups[torch.randperm(48)])
    else:
        problem = replace(problem, importance=torch.rand(48) + 0.1)
    got = columns.gptq_columns(weight, factor, problem)
    want = reference_columns.gptq_columns(weight, factor, problem)
    equal = float((got.codes == want.codes).float().mean())
    return {"equal": equal, "error": float((got.quantized - want.quantized).abs().max())}


# bf16 is left out: the interpreter multiplies the bit patterns of bf16 as integers.
def sums(dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(70, 150).to(dtype)
    got, want = torch.ones(150, 150), torch.ones(150, 150)
    gram.gram_(x, got)
    reference_gram.gram_(x, want)
    error = float((got - want).norm() / want.norm())
    return {"equal": float(torch.equal(got, got.T)), "error": error}


def main() -> None:
    torch.manual_seed(0)
    results = {
        "scale-sym": scales(Grid(4, True, torch.bfloat16), False),
        "scale-asym-weighted": scales(Grid(3, False, torch.float32), True),
        "scale-sym-fp16": scales(Grid(4, True, torch.float16), True),
        "scale-fp16": scales(Grid(8, False, torch.float16), False),
        "columns-g8": loop(ONE, 8, True),
        "columns-g12-asym": loop(ONE, 12, False),
        "columns-wide-group": loop(TWO, 24, True),
        "columns-fixed-order": loop(TWO, 12, False, fixed=True),
        "gram-fp16": sums(torch.float16),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
