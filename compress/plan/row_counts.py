"""How much goes through memory at once; shared by the passes and by the estimate of them."""

import torch

from compress.arch.spec import DecoderSpec
from compress.blocks.live import MAX_BATCH_TOKENS, MAX_LIVE, live_bytes

# A copy or a plain rounding holds this many elements at once (256 MB in fp32).
ROWS_AT_ONCE = 1 << 26


def rows_at_once(shape: tuple[int, int, int], dtype: torch.dtype, budget: int) -> int:
    """Rows of [rows, length, hidden] that go through a block together.

    budget: bytes that inputs and outputs of one batch may take.
    """
    rows, length, hidden = shape
    fitting = budget // (2 * length * hidden * dtype.itemsize)
    return max(1, min(rows, fitting, MAX_BATCH_TOKENS // length))


# Of rows that edits look at, one of so many, and at least one, is held out of fits.
EDIT_ROWS_PER_HELD = 8


def chain_rows(spec: DecoderSpec, rows: int, length: int, budget: int) -> int:
    """Rows of [rows, length] tokens that go together through a block of two models, in fp32.

    budget: bytes that inputs and outputs of one batch may take, of both.
    """
    dtype = torch.float32
    fitting = MAX_LIVE // live_bytes(spec, length, dtype.itemsize)
    return max(1, min(fitting, rows_at_once((rows, length, 2 * spec.hidden), dtype, budget)))


MAX_ROWS = 1024


# Numbers of one logits chunk: 64 MiB in fp32. Half a dozen such buffers are alive at a time.
MAX_CHUNK = 1 << 24


def chunk_rows(vocab: int) -> int:
    """Rows whose logits are held at once for that vocabulary: 1 to 1,024."""
    return max(1, min(MAX_ROWS, MAX_CHUNK // vocab))
