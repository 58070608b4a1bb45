"""The integer grid inside Triton kernels: rounding, candidates, scales in their stored dtype.

Launches switch off the fusing of products and sums (`enable_fp_fusion=False`): a fused candidate
would round to another scale than the reference. Hot sums ask for `tl.fma` themselves.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton types the arguments of its kernels itself.)

import torch
import triton
import triton.language as tl

SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def nearest(x):
    """Round half to even for |x| < 2^22: the sum keeps no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_scale(x, KIND: tl.constexpr):
    """Nearest value the stored dtype holds, 1 in place of 0."""
    size = tl.abs(x)
    if KIND == 1:
        # In integers, for the interpreter truncates where the hardware rounds to nearest even.
        bits = tl.minimum(size, 3.3895314e38).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        size = bits.to(tl.float32, bitcast=True)
    if KIND == 2:
        size = tl.minimum(size, 65504.0).to(tl.float16).to(tl.float32)
    return tl.where(size == 0.0, 1.0, tl.where(x < 0.0, -size, size))


@triton.jit
def candidate(low, high, ratio, code_min, code_max, SYMMETRIC: tl.constexpr, KIND: tl.constexpr):
    """Scale and zero [R] of the min-max grid over [low, high] shrunk by ratio."""
    steps = code_max - code_min
    if SYMMETRIC:
        half = tl.zeros_like(low) + steps * 0.5
        scale = round_scale(tl.div_rn(tl.maximum(-low, high), half) * ratio, KIND)
        zero = tl.zeros_like(scale)
    else:
        low = low * ratio
        high = high * ratio
        scale = round_scale(tl.div_rn(high - low, tl.zeros_like(low) + steps), KIND)
        zero = tl.maximum(code_min - tl.div_rn(low, scale), code_min)
        zero = nearest(tl.minimum(zero, code_max))
    return scale, zero


@triton.jit
def squared_error(w, scale, zero, code_min, code_max):
    """Squared error [R, C] of w [R, C] on the grid of each row."""
    s = scale[:, None]
    z = zero[:, None]
    code = nearest(tl.minimum(tl.maximum(tl.div_rn(w, s + tl.zeros_like(w)), code_min - z),
                              code_max - z))  # fmt: skip
    error = tl.fma(-code, s + tl.zeros_like(w), w)
    return error * error
