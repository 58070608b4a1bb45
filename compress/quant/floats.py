"""Weights as small floats: E4M3 (8 bits) and E2M1 (4 bits), and the scales that go with them.

E4M3 (4 bits of exponent, 3 of mantissa) holds ±448 at most, its smallest step is 2^-9, it has no
infinity. E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives. Casts round to the nearest
value, ties to the even mantissa, and saturate. As on integer grids, a scale is rounded to the
dtype it is stored in before any code is chosen.

An array of weights that share a scale is a cell here: a row, a group of columns, a square block or
the whole tensor; cells at the right and lower edge may be smaller.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.quant.scheme import FP4_GROUP, QuantScheme
from compress.quant.tensor import QuantizedTensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_TOP_BYTE = 126  # 448; 127 is NaN
RUN = 1 << 18  # weights that are looked at at once: 1 MB in fp32, which caches hold
FP32_EXPONENT = 0x7F800000

Rounding = Callable[[Tensor], Tensor]


def nearest_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 number of every fp32 value, in fp32; ±448 beyond that, for infinities too."""
    return _nearest(x, E4M3_MAX, mantissa=3, least=2.0**-9)


def nearest_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 number of every fp32 value, in fp32; ±6 beyond that, for infinities too."""
    return _nearest(x, E2M1_MAX, mantissa=1, least=0.5)


def _nearest(x: Tensor, largest: float, *, mantissa: int, least: float) -> Tensor:
    """Nearest float of `mantissa` stored bits whose subnormals are multiples of `least`.

    Multiples of a step are rounded to even ones, which are the even mantissas; what rounds up to
    the next power of two is a multiple of the step there too.
    """
    x = x.clamp(-largest, largest)
    power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    step = power.mul_(2.0**-mantissa).clamp_(min=least)
    return x.div_(step).round_().mul_(step)


def quantize_fp8(
    weight: Tensor,
    scheme: QuantScheme,
    ratios: Iterable[float],
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """E4M3 codes of weight [N, K] under the best scale of `ratios` for every cell of the scheme.

    ratios: of the scale to the one that puts amax on 448; the first wins a tie.
    importance: fp32 [K], weight of each column's squared error in the choice; None for equal.
    """
    amax = _per_cell(weight, scheme, lambda cells, _: cells.abs().amax(dim=(1, 3)), largest=True)
    candidates = [_stored(amax / E4M3_MAX * ratio, scale_dtype) for ratio in ratios]
    scale = _cheapest(weight, scheme, candidates, Tensor.float, nearest_e4m3, importance)
    codes = _encode(weight, scheme, scale.float(), nearest_e4m3)
    return QuantizedTensor(codes, scale, None, None, scheme)


def global_scale(weights: Iterable[Tensor]) -> Tensor:
    """NVFP4's divisor of all E4M3 scales, shared by `weights`: fp32 [1].

    448 · 6 / amax, with which the group of amax gets the largest scale; 1 where amax is 0 or so
    small that the quotient is infinite (compressed-tensors' rule).
    """
    amax = torch.stack([weight.abs().max().float() for weight in weights]).max()
    divisor = E4M3_MAX * E2M1_MAX / amax
    return torch.where(divisor.isfinite(), divisor, 1.0).reshape(1)


def quantize_fp4(
    weight: Tensor,
    scheme: QuantScheme,
    offsets: Iterable[int],
    divisor: Tensor,
    *,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """E2M1 codes of weight [N, K], K a multiple of 16, under the best E4M3 scale of every group.

    offsets: E4M3 numbers to try, counted from the one nearest to amax / 6 · divisor; the first
    wins a tie. divisor: `global_scale`, fp32 [1]. importance: as in `quantize_fp8`.
    """
    assert weight.shape[1] % FP4_GROUP == 0, "the plan refuses other widths"
    amax = _per_cell(weight, scheme, lambda cells, _: cells.abs().amax(dim=(1, 3)), largest=True)
    plain = nearest_e4m3(amax / E2M1_MAX * divisor).to(torch.float8_e4m3fn)
    byte = plain.view(torch.uint8).to(torch.int16)
    # Positive E4M3 numbers are in the order of their bytes.
    candidates = [
        (byte + i).clamp(1, E4M3_TOP_BYTE).to(torch.uint8).view(torch.float8_e4m3fn)
        for i in offsets
    ]

    def steps(scale: Tensor) -> Tensor:
        return scale.float() / divisor

    scale = _cheapest(weight, scheme, candidates, steps, nearest_e2m1, importance)
    codes = _encode(weight, scheme, steps(scale), nearest_e2m1)
    return QuantizedTensor(codes, scale, None, None, scheme, global_scale=divisor)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 scales as `dtype` holds them, finite and above 0; 1 for a cell of zeros."""
    info = torch.finfo(dtype)
    kept = scale.clamp(info.smallest_normal * info.eps, info.max).to(dtype)
    return torch.where(scale == 0, torch.ones_like(kept), kept)


def _cheapest(
    weight: Tensor,
    scheme: QuantScheme,
    candidates: list[Tensor],
    steps: Callable[[Tensor], Tensor],
    nearest: Rounding,
    importance: Tensor | None,
) -> Tensor:
    """For every cell the candidate with the least weighted squared error, the first in a tie."""
    best = candidates[0]
    if len(candidates) == 1:
        return best
    columns = None if importance is None else _columns(importance, scheme)
    least = _losses(weight, scheme, steps(best), nearest, columns)
    for scale in candidates[1:]:
        loss = _losses(weight, scheme, steps(scale), nearest, columns)
        best = torch.where(loss < least, scale, best)
        least = torch.minimum(loss, least)
    return best


def _losses(
    weight: Tensor, scheme: QuantScheme, step: Tensor, nearest: Rounding, importance: Tensor | None
) -> Tensor:
    """Weighted squared error of every cell. importance: [1, 1, cells, columns of a cell]."""

    def loss(cells: Tensor, rows: slice) -> Tensor:
        s = _of_cells(step, rows)
        lost = (cells - nearest(cells / s).mul_(s)).square_()
        return (lost if importance is None else lost.mul_(importance)).sum(dim=(1, 3))

    return _per_cell(weight, scheme, loss, largest=False)


def _encode(weight: Tensor, scheme: QuantScheme, step: Tensor, nearest: Rounding) -> Tensor:
    """Codes [N, K] for given steps, float8_e4m3fn."""
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=weight.device)
    for run, cells in _runs(weight, scheme):
        found = nearest(cells / _of_cells(step, _cell_rows(run, scheme, n)))
        whole = found.reshape(found.shape[0] * found.shape[1], -1)
        codes[run] = whole[: run.stop - run.start, :k]
    return codes


def _runs(weight: Tensor, scheme: QuantScheme) -> Iterator[tuple[slice, Tensor]]:
    """(rows, those rows as fp32 cells [cell rows, rows of a cell, cell columns, columns of one]).

    Runs hold whole cells, but for a tensor with one scale, which is seen as one cell a run. What
    cells lack at the edges is filled with zeros.
    """
    n, k = weight.shape
    height = 1 if scheme.granularity == "tensor" else scheme.rows_per_scale(n)
    rows = max(height, RUN // k // height * height)
    width = scheme.columns_per_scale(k)
    for start in range(0, n, rows):
        run = slice(start, min(start + rows, n))
        w = weight[run].float()
        tall = w.shape[0] if scheme.granularity == "tensor" else height
        missing = (-k % width, -w.shape[0] % tall)
        if any(missing):
            w = pad(w, (0, missing[0], 0, missing[1]))
        yield run, w.reshape(w.shape[0] // tall, tall, w.shape[1] // width, width)


def _cell_rows(run: slice, scheme: QuantScheme, n: int) -> slice:
    """Rows of the scales that belong to a run of rows of a weight with n rows."""
    if scheme.granularity == "tensor":
        return slice(0, 1)
    height = scheme.rows_per_scale(n)
    return slice(run.start // height, -(-run.stop // height))


def _of_cells(scale: Tensor, rows: slice) -> Tensor:
    """Scales of some rows of cells, shaped to go with the cells."""
    return scale[rows, None, :, None]


def _per_cell(
    weight: Tensor,
    scheme: QuantScheme,
    reduce: Callable[[Tensor, slice], Tensor],
    *,
    largest: bool,
) -> Tensor:
    """`reduce` of the cells of every run, [cell rows, cell columns] together.

    largest: whether a cell that spans several runs has the maximum of theirs, or their sum.
    """
    n = weight.shape[0]
    parts = [reduce(cells, _cell_rows(run, scheme, n)) for run, cells in _runs(weight, scheme)]
    if scheme.granularity != "tensor":
        return torch.cat(parts)
    stacked = torch.stack(parts)
    return stacked.amax(dim=0) if largest else stacked.sum(dim=0)


def _columns(importance: Tensor, scheme: QuantScheme) -> Tensor:
    """[K] -> [1, 1, cell columns, columns of a cell], zeros where the last cell has none."""
    k = importance.shape[0]
    width = scheme.columns_per_scale(k)
    return pad(importance, (0, -k % width)).view(1, 1, -1, width)
