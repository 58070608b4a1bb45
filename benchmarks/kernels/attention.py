"""Time of attention over blocks of keys and values, against torch's on tensors that lie whole.

    python benchmarks/kernels/attention.py --output benchmarks/results/kernel_attention.json

torch's scaled_dot_product_attention gets the same numbers as a batch of equal lengths, which an
engine does not have, in fp32. `ceiling read` is torch's product of a vector and a matrix of as many
bytes as keys and values take, `ceiling multiply` its product of two fp32 matrices in as many
operations. `tiled` is what runs without a compiler. Behind 4,096 tokens one text is read a call, so
that a call is short, from copies in turn that no cache holds.
"""

from functools import partial
from itertools import cycle

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
TEXTS, LENGTH, PROMPTS = 8, 1024, (256, 512)
# Of a llama of 58M; with a quarter of the heads of keys and values; with a latent of a quarter.
LONG, COPIES_BYTES = 4096, 160 << 20
LONG_HEADS = {"58M": (8, 8, 64), "58M, 2 heads": (8, 2, 64), "58M, a latent": (8, 1, 256)}
LATENT = 192  # numbers of it that are values
SIDE = 256  # of the matrix of `ceiling multiply`, which stays in a cache


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


def behind_many(name: str, dtype: torch.dtype) -> timing.Cases:
    """The last token of one text of 4,096."""
    heads, kv_heads, dim = LONG_HEADS[name]
    q = torch.randn(1, heads, dim)

    def text() -> tuple[StoredStates, TokenPlaces]:
        keys, values = (torch.randn(1, kv_heads, LONG, dim) for _ in range(2))
        stored, table = stored_of(keys, values, dtype)
        if kv_heads == 1:
            scales = stored.key_scales
            stored = StoredStates(stored.keys, stored.keys[..., :LATENT], scales, scales)
        return stored, TokenPlaces(table, torch.zeros(1).int(), torch.tensor([LONG - 1]))

    first = text()
    nbytes = first[0].keys.nbytes + (0 if kv_heads == 1 else first[0].values.nbytes)
    copies = cycle([first, *(text() for _ in range(COPIES_BYTES // nbytes))])
    floats = torch.randn(COPIES_BYTES // nbytes + 1, nbytes // 4096, 1024)
    matrices, vector = cycle(floats), torch.randn(1024)
    products = LONG * heads * (dim + first[0].values.shape[3])
    square, columns = torch.randn(SIDE, SIDE), torch.randn(SIDE, products // SIDE**2)

    def attend() -> torch.Tensor:
        stored, places = next(copies)
        return paged_attention(q, stored, places, scale=dim**-0.5)

    return {
        "paged": attend,
        "ceiling read": lambda: torch.mv(next(matrices), vector),
        "ceiling multiply": partial(torch.mm, square, columns),
    }


def prompt(name: str, length: int) -> timing.Cases:
    """All tokens of one text."""
    heads, kv_heads, dim = HEADS[name]
    q = torch.randn(length, heads, dim)
    keys, values = (torch.randn(1, kv_heads, length, dim) for _ in range(2))
    stored, table = stored_of(keys, values, torch.float32)
    places = TokenPlaces(table, torch.zeros(length, dtype=torch.int32), torch.arange(length))
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
            **{
                f"{name}, behind {LONG} tokens, {str(dtype).removeprefix('torch.')}": partial(
                    behind_many, name, dtype
                )
                for name in LONG_HEADS
                for dtype in (torch.float32, torch.bfloat16, torch.int8)
            },
            **{
                f"{name}, a prompt of {length}": partial(prompt, name, length)
                for name in HEADS
                for length in PROMPTS
            },
        },
    )
