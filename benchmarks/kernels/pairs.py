"""Time of rows in bf16 times a weight in bf16, beside torch's and what the machine can do.

    python benchmarks/kernels/pairs.py --output benchmarks/results/kernel_pairs.json

`panels` is what an engine runs, `by rows` the same of a weight that is not laid out. `ceiling read`
is torch's product of a fp32 matrix of as many bytes and a vector. `ceiling product` are as many
vdpbf16ps as the product needs, in registers alone; it is left out where the processor has none, and
is of one thread. Shapes that end in "strip" have so few outputs that a call takes less than a
millisecond: where other programs run, compare `least_wall_s` of many rounds of them. Sides take
turns, on copies of the weight that caches do not hold.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import timing
import torch
from peaks import at_peak
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from compress_kernels.ops.linear import linear
from compress_kernels.ops.pairs import pair_linear
from compress_kernels.pairs import lay_out_pairs

# Rows, outputs, columns.
SHAPES = [(rows, side, side) for side in (256, 1024, 4096) for rows in (1, 8, 64)]
STRIPS = [(rows, 512 if rows <= 8 else 128, 4096) for rows in (1, 8, 64)]
COLD = 96 << 20


def cases(rows: int, outputs: int, columns: int) -> timing.Cases:
    x, vector = torch.randn(rows, columns).bfloat16(), torch.randn(columns // 2)
    count = max(3, COLD // (2 * outputs * columns))
    weights = torch.randn(count, outputs, columns).bfloat16()
    panels = cycle([lay_out_pairs(weight) for weight in weights])
    # Each begins elsewhere: what another has just read lies in a cache.
    turns = [_from(weights, i * count // 3) for i in range(2)]
    reads = _from(weights.view(torch.float32), 2 * count // 3)
    found: dict[str, Callable[[], object]] = {
        "panels": lambda: pair_linear(x, next(panels)),
        "by rows": lambda: linear(x, next(turns[0])),
        "torch": lambda: torch_linear(x, next(turns[1])),
        "ceiling read": lambda: torch.mv(next(reads), vector),
    }
    peak = at_peak("bf16", rows * outputs * columns)
    if peak is not None:
        found["ceiling product"] = peak
    return found


def _from(weights: Tensor, first: int) -> Iterator[Tensor]:
    return cycle([*weights[first:], *weights[:first]])


if __name__ == "__main__":
    whole = {f"{m} x {n} x {k}": partial(cases, m, n, k) for m, n, k in SHAPES}
    strips = {f"{m} x {n} x {k}, strip": partial(cases, m, n, k) for m, n, k in STRIPS}
    timing.kernel_main(__doc__ or "", whole | strips)
