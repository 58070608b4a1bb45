"""Time of writing keys or values into blocks, against torch and a copy of the bytes.

    python benchmarks/kernels/states.py --output benchmarks/results/kernel_states.json

`torch` is the reference. `ceiling copy` writes the same numbers side by side, in the dtype that is
stored; for int8 it rounds nothing.
"""

from functools import partial

import timing
import torch

from compress_kernels.ops.states import store_states
from compress_kernels.reference import states as reference

BLOCK = 16
# Heads of keys and values, and width of one.
HEADS = {"tale-6m": (8, 32), "400M": (16, 64), "8B": (8, 128)}
TOKENS = (1, 64, 512)
STORED = (torch.float32, torch.bfloat16, torch.int8)


def cases(name: str, tokens: int, dtype: torch.dtype) -> timing.Cases:
    heads, dim = HEADS[name]
    source = torch.randn(tokens, heads, dim)
    blocks = 2 * -(-tokens // BLOCK)
    target = torch.zeros(blocks, heads, BLOCK, dim, dtype=dtype)
    scales = torch.zeros(blocks, heads, BLOCK, dtype=torch.float16)
    own = scales if dtype == torch.int8 else None
    slots = torch.randperm(blocks * BLOCK)[:tokens]
    flat = torch.empty(tokens, heads, dim, dtype=dtype)
    return {
        "store_states": lambda: store_states(source, target, slots, own),
        "torch": lambda: reference.store_states(source, target, slots, own),
        "ceiling copy": lambda: flat.copy_(source),
    }


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "",
        {
            f"{name}, {tokens} tokens, {str(dtype).removeprefix('torch.')}": partial(
                cases, name, tokens, dtype
            )
            for name in HEADS
            for tokens in TOKENS
            for dtype in STORED
        },
    )
