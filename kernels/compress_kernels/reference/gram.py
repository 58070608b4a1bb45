"""Sum of xᵀx in fp32."""

from torch import Tensor

STRIP = 1024  # columns; a strip skips what lies left of it, so wide matrices cost little over half


def gram_(x: Tensor, out: Tensor) -> None:
    """out [K, K] fp32, symmetric, += xᵀx with x [tokens, K] of any float dtype."""
    columns = x.shape[1]
    x32 = x.float()
    for start in range(0, columns, STRIP):
        stop = min(start + STRIP, columns)
        out[start:stop, start:].addmm_(x32[:, start:stop].T, x32[:, start:])
        out[stop:, start:stop] = out[start:stop, stop:].T
