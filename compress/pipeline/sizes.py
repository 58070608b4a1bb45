"""How much goes through memory at once; shared by the passes and by the estimate of them."""

import torch

# A copy or a plain rounding holds this many elements at once (256 MB in fp32).
ROWS_AT_ONCE = 1 << 26
# Longer batches gain nothing, every matrix product is large enough by then, and cost memory:
# 16,384 tokens of a 256-wide model took 72 MB more than 8,192 and not a moment less.
MAX_BATCH_TOKENS = 8192


def rows_at_once(shape: tuple[int, int, int], dtype: torch.dtype, budget: int) -> int:
    """Rows of [rows, length, hidden] that go through a block together.

    budget: bytes that inputs and outputs of one batch may take.
    """
    rows, length, hidden = shape
    fitting = budget // (2 * length * hidden * dtype.itemsize)
    return max(1, min(rows, fitting, MAX_BATCH_TOKENS // length))
