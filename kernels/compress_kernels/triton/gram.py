"""Sum of xᵀx on tensor cores, upper triangle only; the specification is reference.gram."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton types the arguments of its kernels itself.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress_kernels.reference import gram as reference

SIDE = 128
TOKENS = 64
WIDEST = 46340  # columns; out is addressed in 32 bits, which saves registers


@triton.jit
def gram_kernel(x, out, tokens, columns, stride, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    """One SIDE x SIDE tile of out on or above the diagonal, stored with its mirror image."""
    band = tl.program_id(0)
    other = tl.program_id(1)
    if other < band:
        return
    i = band * SIDE + tl.arange(0, SIDE)
    j = other * SIDE + tl.arange(0, SIDE)
    token = tl.arange(0, TOKENS)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for first in range(0, tokens, TOKENS):
        t = token[:, None] * stride
        seen = (first + token < tokens)[:, None]
        left = tl.load(x + t + i[None, :], mask=seen & (i < columns)[None, :], other=0.0)
        right = tl.load(x + t + j[None, :], mask=seen & (j < columns)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total)
        x += TOKENS * stride
    inside = (i < columns)[:, None] & (j < columns)[None, :]
    place = i[:, None] * columns + j[None, :]
    total += tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, total, mask=inside & (i[:, None] <= j[None, :]))
    mirrored = j[None, :] * columns + i[:, None]
    tl.store(out + mirrored, total, mask=inside & (i[:, None] < j[None, :]))


def gram_(x: Tensor, out: Tensor) -> None:
    """As reference.gram.gram_; fp32 goes to torch."""
    if x.dtype == torch.float32 or x.shape[1] > WIDEST:
        reference.gram_(x, out)
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, columns = x.shape
    bands = triton.cdiv(columns, SIDE)
    gram_kernel[(bands, bands)](
        x, out, tokens, columns, x.stride(0), SIDE=SIDE, TOKENS=TOKENS, num_warps=8, num_stages=3
    )
