"""Time of rows times an fp32 weight, against torch's product and what the machine can do.

    python benchmarks/kernels/linear.py --output benchmarks/results/kernel_linear.json

One row reads a weight once: `ceiling read` is torch's product of a matrix of as many bytes and a
vector, the fastest of the reads that were tried (sums, maxima, copies). Many rows compute: `ceiling
product` is torch's of square matrices with as many multiplications.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import timing
import torch
from torch.nn.functional import linear as torch_linear

from compress_kernels.ops.linear import linear

# Rows, outputs, columns: of tale-6m, of a 400M and of a 7B shape.
SHAPES = [
    *((rows, 256, 256) for rows in (1, 8, 64, 512)),
    *((rows, 2816, 1024) for rows in (1, 8, 64, 512)),
    *((rows, 4096, 4096) for rows in (1, 8, 64)),
]
# Bytes of weights that are gone through in turn: more than caches hold.
COLD = 256 << 20


def cases(rows: int, outputs: int, columns: int) -> timing.Cases:
    x, vector = torch.randn(rows, columns), torch.randn(columns)
    count = max(1, COLD // (4 * outputs * columns))
    weights = torch.randn(count, outputs, columns)
    turns = [cycle(weights) for _ in range(3)]
    found: dict[str, Callable[[], object]] = {
        "linear": lambda: linear(x, next(turns[0])),
        "torch": lambda: torch_linear(x, next(turns[1])),
        "ceiling read": lambda: torch.mv(next(turns[2]), vector),
    }
    if rows >= 8:
        side = round((rows * outputs * columns) ** (1 / 3))
        square = torch.randn(side, side)
        found["ceiling product"] = partial(torch.mm, square, square)
    return found


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "", {f"{m} x {n} x {k}": partial(cases, m, n, k) for m, n, k in SHAPES}
    )
