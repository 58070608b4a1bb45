"""Time of one whole GPTQ solve against the dense algebra it stands on.

    python benchmarks/kernels/gptq_solve.py --output benchmarks/results/gptq_solve.json

A solve is: damping, factor of the Hessian, column loop with group scales (4 bit, groups of 128).
It is compared in the same run with
  paper_algebra  Cholesky, inverse, Cholesky of the inverse (upper) and the block matrix products:
                 what Algorithm 1 of the paper cannot avoid;
  least_algebra  one Cholesky and the block matrix products: what our form of it cannot avoid.
"""

import argparse
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from compress_kernels import Grid, SearchedScales, gptq_columns, hessian_factor, status

GROUP = 128


def damped_hessian(columns: int) -> Tensor:
    x = torch.randn(2 * columns, columns)
    h = x.T @ x / len(x)
    h.diagonal().add_(0.01 * h.diagonal().mean())
    return h


def block_products(weight: Tensor, factor: Tensor) -> None:
    work = weight.clone()
    for stop in range(GROUP, weight.shape[1], GROUP):
        work[:, stop:].addmm_(work[:, stop - GROUP : stop], factor[stop - GROUP : stop, stop:])


def paper_algebra(weight: Tensor, h: Tensor) -> None:
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    block_products(weight, torch.linalg.cholesky(inverse, upper=True))


def least_algebra(weight: Tensor, h: Tensor) -> None:
    block_products(weight, torch.linalg.cholesky(h))


def solve(weight: Tensor, h: Tensor, ratios: Tensor, importance: bool) -> None:
    damped = h.clone()
    damped.diagonal().add_(1e-4 * damped.diagonal().mean())
    factor = hessian_factor(damped)
    scales = SearchedScales(ratios, factor.diagonal().square() if importance else None)
    gptq_columns(weight, factor, Grid(4, True, torch.bfloat16), GROUP, scales)


def measure(size: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    weight, h = torch.randn(size, size), damped_hessian(size)
    cases: dict[str, Callable[[], object]] = {
        "paper_algebra": lambda: paper_algebra(weight, h),
        "least_algebra": lambda: least_algebra(weight, h),
        "solve_minmax": lambda: solve(weight, h, torch.ones(1), False),
        "solve_search_40": lambda: solve(weight, h, torch.linspace(1.0, 0.5, 40), True),
    }
    times = timing.alternate(cases, rounds)
    ratios = {
        f"{case}/{base}": {
            unit: round(times[case][unit] / times[base][unit], 3)
            for unit in ("wall_s", "cpu_s", "least_wall_s")
        }
        for case in ("solve_minmax", "solve_search_40")
        for base in ("paper_algebra", "least_algebra")
    }
    return {"rounds": rounds, "times": times, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="at the largest size; small: x 5")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", help="file for the JSON result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = {"kernels": "compiled" if status()["cpu"].startswith("compiled") else "torch"}
    result = {**timing.setting(), **kernels, "group_size": GROUP, "bits": 4, "sizes": {}}
    for size in arguments.sizes:
        rounds = arguments.rounds if size == max(arguments.sizes) else 5 * arguments.rounds
        result["sizes"][str(size)] = measure(size, rounds)
    timing.write(arguments.output, result)


if __name__ == "__main__":
    main()
