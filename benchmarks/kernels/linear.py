"""Time of fp32 rows times a weight of fp32, bf16 or fp16, against torch and the machine's best.

    python benchmarks/kernels/linear.py --output benchmarks/results/kernel_linear.json

One row reads a weight once: `ceiling read` is torch's product of a matrix of as many bytes and a
vector, the fastest of torch's reads that were tried (sums, maxima, copies). Many rows compute:
`ceiling product` is torch's of square matrices with as many multiplications. `torch` multiplies
rows of the weight's own dtype. Shapes that end in "strip" have so few outputs that a call takes
less than a millisecond: where other programs run, compare `least_wall_s` of many rounds of them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle

import timing
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from compress_kernels.ops.linear import linear

# Rows, outputs, columns: of tale-6m, of a 400M and of a 7B shape.
SHAPES = [
    *((rows, 256, 256) for rows in (1, 8, 64, 512)),
    *((rows, 2816, 1024) for rows in (1, 8, 64, 512)),
    *((rows, 4096, 4096) for rows in (1, 8, 64)),
]
# Part of the largest, for each dtype.
STRIPS = [(rows, 512 if rows <= 8 else 128, 4096) for rows in (1, 8, 64)]
# Bytes of weights that are gone through in turn: more than caches hold.
COLD = 256 << 20


def cases(
    rows: int, outputs: int, columns: int, dtype: torch.dtype = torch.float32
) -> timing.Cases:
    x, vector = torch.randn(rows, columns), torch.randn(columns)
    own = x.to(dtype)
    count = max(1, COLD // (dtype.itemsize * outputs * columns))
    weights = torch.randn(count, outputs, columns).to(dtype)
    read = weights.view(torch.float32)  # the same bytes
    # Each begins elsewhere: what another has just read lies in a cache.
    turns = [_from(weights, i * count // 3) for i in range(2)]
    reads = _from(read, 2 * count // 3)
    found: dict[str, Callable[[], object]] = {
        "linear": lambda: linear(x, next(turns[0])),
        "torch": lambda: torch_linear(own, next(turns[1])),
        "ceiling read": lambda: torch.mv(next(reads), vector[: read.shape[2]]),
    }
    if rows >= 8:
        side = round((rows * outputs * columns) ** (1 / 3))
        square = torch.randn(side, side)
        found["ceiling product"] = partial(torch.mm, square, square)
    return found


def _from(weights: Tensor, first: int) -> Iterator[Tensor]:
    return cycle([*weights[first:], *weights[:first]])


def shapes() -> Mapping[str, Callable[[], timing.Cases]]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    whole = {f"{m} x {n} x {k}": partial(cases, m, n, k) for m, n, k in SHAPES}
    strips = {
        f"{m} x {n} x {k}, {str(dtype).removeprefix('torch.')}, strip": partial(
            cases, m, n, k, dtype
        )
        for m, n, k in STRIPS
        for dtype in dtypes
    }
    return whole | strips


if __name__ == "__main__":
    timing.kernel_main(__doc__ or "", shapes())
