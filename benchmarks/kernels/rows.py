"""Time of norms, rotations and gates, against the same in torch and a copy of the bytes.

    python benchmarks/kernels/rows.py --output benchmarks/results/kernel_rows.json

`torch` is the reference: five to ten operations of torch. `ceiling copy` reads what the operation
reads and writes what it writes, in one call, into memory that is there.
"""

from functools import partial

import timing
import torch

from compress_kernels.ops import rows
from compress_kernels.reference import rows as reference

# Width of the hidden states, heads and width of one, width of the MLP: tale-6m, 400M.
MODELS = {"tale-6m": (256, 8, 32, 704), "400M": (1024, 16, 64, 2816)}
ROWS = (1, 64, 512)
DTYPES = (torch.float32, torch.bfloat16)


def norm(model: str, count: int, dtype: torch.dtype) -> timing.Cases:
    width = MODELS[model][0]
    x, weight = torch.randn(count, width).to(dtype), torch.ones(width, dtype=dtype)
    return {
        "rms_norm": lambda: rows.rms_norm(x, weight, 1e-6, False),
        "torch": lambda: reference.rms_norm(x, weight, 1e-6, False),
        "ceiling copy": partial(torch.empty_like(x).copy_, x),
    }


def rotate(model: str, count: int, dtype: torch.dtype) -> timing.Cases:
    heads, dim = MODELS[model][1:3]
    x = torch.randn(count, heads, dim).to(dtype)
    cos, sin = torch.rand(2, count, dim // 2).to(dtype).unbind()
    return {
        "rotate": lambda: rows.rotate(x, cos, sin),
        "torch": lambda: reference.rotate(x, cos, sin),
        "ceiling copy": partial(torch.empty_like(x).copy_, x),
    }


def gate(model: str, count: int, dtype: torch.dtype) -> timing.Cases:
    left, right = torch.randn(2, count, MODELS[model][3]).to(dtype).unbind()
    return {
        "gate": lambda: rows.gate(left, right, "silu"),
        "torch": lambda: reference.gate(left, right, "silu"),
        "ceiling copy": partial(torch.add, left, right, out=torch.empty_like(left)),
    }


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "",
        {
            f"{make.__name__}, {model}, {count} rows, {str(dtype).removeprefix('torch.')}": partial(
                make, model, count, dtype
            )
            for make in (norm, rotate, gate)
            for model in MODELS
            for count in ROWS
            for dtype in DTYPES
        },
    )
