"""Time of attention over blocks of keys and values, against torch's on tensors that lie whole.

    python benchmarks/kernels/attention.py --output benchmarks/results/kernel_attention.json

torch's scaled_dot_product_attention gets the same numbers as a batch of equal lengths, which an
engine does not have, in fp32. `ceiling read` is torch's product of a vector and a matrix of as many
bytes as keys and values take. `tiled` is what runs without a compiler.
"""

from functools import partial

import timing
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from compress_kernels.ops import tiled_attention
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.states import store_states
from compress_kernels.paged import StoredStates, TokenPlaces

BLOCK = 16
# Heads, heads of keys and values, width of one: of tale-6m, of a 400M and of an 8B shape.
HEADS = {"tale-6m": (8, 8, 32), "400M": (16, 16, 64), "8B": (32, 8, 128)}
TEXTS, LENGTH, PROMPT = 8, 1024, 256


def stored_of(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> StoredStates:
    """keys, values: [texts, kv_heads, length, dim] -> blocks, in an order of their own."""
    texts, heads, length, dim = keys.shape
    blocks = texts * length // BLOCK
    order = torch.randperm(blocks)
    slots = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    made, scales = [], []
    for states in (keys, values):
        target = torch.zeros(blocks, heads, BLOCK, dim, dtype=dtype)
        scale = torch.zeros(blocks, heads, BLOCK, dtype=torch.float16)
        scales.append(scale if dtype == torch.int8 else None)
        store_states(states.transpose(1, 2).flatten(0, 1), target, slots, scales[-1])
        made.append((target, order.view(texts, -1).int()))
    return StoredStates(made[0][0], made[1][0], *scales), made[0][1]


def decode(name: str, dtype: torch.dtype) -> timing.Cases:
    """The last token of each text."""
    heads, kv_heads, dim = HEADS[name]
    q = torch.randn(TEXTS, heads, dim)
    keys, values = (torch.randn(TEXTS, kv_heads, LENGTH, dim) for _ in range(2))
    stored, table = stored_of(keys, values, dtype)
    last = torch.full((TEXTS,), LENGTH - 1)
    places = TokenPlaces(table, torch.arange(TEXTS).int(), last)
    scale = dim**-0.5
    nbytes = stored.keys.nbytes + stored.values.nbytes
    as_many, vector = torch.randn(nbytes // 4096, 1024), torch.randn(1024)
    return {
        "paged": lambda: paged_attention(q, stored, places, scale=scale),
        "torch": lambda: torch_attention(
            q[:, :, None], keys, values, scale=scale, enable_gqa=heads != kv_heads
        ),
        "tiled": lambda: tiled_attention.paged_attention(q, stored, places, scale=scale),
        "ceiling read": partial(torch.mv, as_many, vector),
    }


def prompt(name: str) -> timing.Cases:
    """All tokens of one text."""
    heads, kv_heads, dim = HEADS[name]
    q = torch.randn(PROMPT, heads, dim)
    keys, values = (torch.randn(1, kv_heads, PROMPT, dim) for _ in range(2))
    stored, table = stored_of(keys, values, torch.float32)
    places = TokenPlaces(table, torch.zeros(PROMPT, dtype=torch.int32), torch.arange(PROMPT))
    scale = dim**-0.5
    return {
        "paged": lambda: paged_attention(q, stored, places, scale=scale),
        "torch": lambda: torch_attention(
            q.transpose(0, 1)[None], keys, values, scale=scale, is_causal=True,
            enable_gqa=heads != kv_heads,
        ),
        "tiled": lambda: tiled_attention.paged_attention(q, stored, places, scale=scale),
    }  # fmt: skip


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "",
        {
            **{
                f"{name}, {TEXTS} texts of {LENGTH}, {str(dtype).removeprefix('torch.')}": partial(
                    decode, name, dtype
                )
                for name in HEADS
                for dtype in (torch.float32, torch.bfloat16, torch.int8)
            },
            **{f"{name}, a prompt of {PROMPT}": partial(prompt, name) for name in HEADS},
        },
    )
