"""Time of rows times the codes of every kind of scheme, beside the dense products of its source.

    python benchmarks/kernels/packed_kinds.py --output benchmarks/results/kernel_packed_kinds.json

Sides take turns, on copies of the weight that caches do not hold; `dense bf16` and `dense fp32` are
ours, of weights that stay so. Inputs that FP8 schemes round are rounded before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

import timing
import torch
from torch import Tensor

from compress_kernels import round_blocks
from compress_kernels.block_panels import block_panels
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import layout_for, packed_linear
from compress_kernels.panels import Codes, Layout, Math, Panels, by_panel, lay_out
from compress_kernels.rounding import RowRounding

SHAPES = [(rows, n, k) for n, k in ((1024, 1024), (4096, 4096)) for rows in (1, 8, 64)]
COLD = 128 << 20
TOKEN = RowRounding("token", 127.5)
OUTLIERS = RowRounding("outliers", 127.0, threshold=6.0)
# Of each kind: codes, their bits and columns of a scale (0: all), math, and what rounds inputs.
KINDS: dict[str, tuple[Codes, int, int, Math, RowRounding | None]] = {
    "nvfp4 int16": ("e2m1", 4, 16, "int16", None),
    "nvfp4 exact": ("e2m1", 4, 16, "exact", None),
    "fp8": ("e4m3", 8, 0, "exact", None),
    "w8a8": ("int", 8, 0, "int16", TOKEN),
    "llm.int8": ("int", 8, 0, "int16", OUTLIERS),
    "int8 exact": ("int", 8, 0, "exact", None),
    "int4 g32 int16": ("int", 4, 32, "int16", None),
    "int4 g32 exact": ("int", 4, 32, "exact", None),
}
# The same of llama.cpp's blocks: their type, and math.
BLOCKS: dict[str, tuple[str, Math]] = {
    f"{kind.lower()} {math}": (kind, math)
    for kind in ("Q4_K", "Q6_K", "Q4_0", "Q8_0")
    for math in ("int16", "exact")
}


def panels_of(kind: str, outputs: int, columns: int) -> Panels:
    codes_are, bits, group, math, _ = KINDS[kind]
    layout: Layout = "rows" if math == "exact" else "dots"
    scales = torch.rand(outputs, columns // (group or columns)) + 0.5
    if codes_are == "int":
        codes = torch.randint(-128, 128, (outputs, columns), dtype=torch.int8)
    elif codes_are == "e4m3":
        codes = (torch.randn(outputs, columns) * 100).to(torch.float8_e4m3fn)
    else:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = values[torch.randint(0, 8, (outputs, columns))].to(torch.float8_e4m3fn)
        scales = scales.to(torch.float8_e4m3fn)
    return Panels(
        lay_out(codes, bits, layout), by_panel(scales), None, None, (outputs, columns), bits,
        group or columns, layout, torch.bfloat16, codes_are,
    )  # fmt: skip


def dense(x: Tensor, outputs: int, dtype: torch.dtype) -> Callable[[], object]:
    weight = torch.randn(outputs, x.shape[1]).to(dtype)
    turn = cycle([weight.clone() for _ in range(max(1, COLD // weight.nbytes))])
    return lambda: linear(x, next(turn), None)


def cases(kind: str, rows: int, outputs: int, columns: int) -> timing.Cases:
    x, rounding = torch.randn(rows, columns), None
    if kind in BLOCKS:
        of, math = BLOCKS[kind]
        some = round_blocks(of, torch.randn(16, columns) * 0.05, None)
        one = block_panels(of, some.repeat(outputs // 16, 1), layout_for(math))
    else:
        one, (_, _, _, math, rounding) = panels_of(kind, outputs, columns), KINDS[kind]
    copies = max(1, COLD // one.codes.numel())
    turn = cycle([replace(one, codes=one.codes.clone()) for _ in range(copies)])
    return {
        kind: lambda: packed_linear(x, next(turn), None, math, rounding),
        "dense bf16": dense(x, outputs, torch.bfloat16),
        "dense fp32": dense(x, outputs, torch.float32),
    }


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "",
        {f"{kind} {m} x {n} x {k}": partial(cases, kind, m, n, k)
         for kind in (*KINDS, *BLOCKS) for m, n, k in SHAPES},
    )  # fmt: skip
