"""AWQ: activation-aware weight quantization for LLM compression and acceleration.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han 2023, https://arxiv.org/abs/2306.00978

Few input channels matter more than the others: those with large activations. Multiplying their
columns by s > 1 before rounding and dividing the channel by s where it is written makes their
errors smaller by s, as long as the scale of the group does not grow with them (section 3.2). The
scales are a search over one number a pair of modules (eqs. 4 and 5):

    s* = argmin_s L(s),  L(s) = || Q(W s) (x / s) - W x ||²,  s = mean|x|^r,  0 <= r <= 1

and, as the authors' code has it since ("duo scaling"), s = mean|x|^r / mean|w|^(1-r) with |w|
relative to the largest of its group, normalised by sqrt(max s · min s). The scale is a fold
(compress.methods.folding); rounding is the business of the next stage.

What differs from the paper, and why:
* The loss is that of the linears that read the channels: with D = Q(W s) / s - W it is tr(D H Dᵀ),
  H the mean of x xᵀ, which equals L(s) for a linear. The authors rerun the attention or the MLP
  that the linears are in for each of 20 scales over all samples.
* Q has the search for clipped ranges in it that the authors run after the scales are fixed, so
  that candidates are judged by what can be stored. It weighs errors by the diagonal of the scaled
  H. Clipping itself comes with the rounding; `scale_search: output` is the authors', which judges
  the ranges of a group by their exact share of the output, here d H_gg dᵀ in place of samples, and
  for all layers (the authors leave q and k alone).
* No scaling at all is a candidate. So the scale found never has a higher loss than none: over the
  sampled rows of the readers, under plain rounding, before the norm is rounded to its dtype. What
  it costs the rows of a linear that writes the channels is not part of the loss.
* Rows are subsampled evenly to ROWS for each pair. Scales that span rows (granularity tensor or
  block, NVFP4's) are then those of the sampled rows.
* Outputs of grouped-query attention are scaled too (the authors skip v and o unless they have the
  same shape): a channel of v has the mean magnitude of the columns that read it.
* The last step of the grid is r = 1; the authors stop one step before.

Left out: nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods import fp8, nvfp4, rtn
from compress.methods.folding import UNDRIVEN, FoldChoice, FoldReader, PairView, by_channel, expand
from compress.methods.observed import Needs
from compress.methods.rtn import GroupSearch, RtnConfig, ScaleSearch, column_importance
from compress.quant.floats import global_scale, quantize_fp4, quantize_fp8
from compress.quant.scheme import Signs

ROWS = 2048  # of all readers of a pair together


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """Options of an `awq` stage.

    grid: ratios r that are tried, from 0 to 1.
    duo_scaling: divide by the weights' magnitudes as well.
    scale_search: how ranges are clipped, as in `rtn`, where no other stage rounds the layers;
        candidates are rounded so too, but for "output", which takes ten times as long and picks
        no better scales than "importance".
    signs: as in `rtn`, where no other stage rounds the layers; candidates are rounded as the layers
        will be.
    """

    grid: int = 20
    duo_scaling: bool = True
    scale_search: GroupSearch = "output"
    signs: Signs = "auto"

    def __post_init__(self) -> None:
        if self.grid < 2:
            raise RecipeError(f"grid is {self.grid}; a search tries 2 ratios or more, such as 20")


def needs(config: AwqConfig) -> Needs:
    """The magnitudes it scales by, and the Hessian that candidates are judged by."""
    return Needs(hessian=True, magnitudes=True)


def search(view: PairView, config: AwqConfig) -> FoldChoice:
    """The scale for the channels of one pair that costs the quantized readers least.

    `plain` and `loss` of the choice are tr(D H Dᵀ) / tr(W H Wᵀ) over the sampled rows.
    """
    if not view.readers:
        return FoldChoice(None, "none of its readers is quantized")
    if not bool((view.absmean > 0).any()):
        return FoldChoice(None, UNDRIVEN)
    weights = sample_rows(view)
    clip: ScaleSearch = "importance" if config.scale_search == "output" else config.scale_search
    whole = sum(_energy(w, view.hessian) for w in weights)
    plain = best = loss(view, weights, None, clip)
    scale, note = None, "no scale costs less than none"
    for ratio, candidate in candidates(view, weights, config):
        cost = loss(view, weights, candidate, clip)
        if isfinite(cost) and cost < best:
            best, scale, note = cost, candidate, f"ratio {ratio:.2f}"
    whole = whole if whole > 0 else 1.0
    return FoldChoice(scale, note, plain / whole, best / whole)


def candidates(
    view: PairView, weights: list[Tensor], config: AwqConfig
) -> Iterator[tuple[float, Tensor]]:
    """(ratio, scale fp32 [C]) over the grid; channels that are never driven keep scale 1."""
    x = by_channel(view.pair, view.absmean).mean(dim=0)  # x: [C]
    w = by_channel(view.pair, relative_magnitude(view, weights)).mean(dim=0)  # w: [C]
    alive = (x > 0) & (w > 0)
    if not bool(alive.any()):
        return
    for step in range(config.grid):
        ratio = step / (config.grid - 1)
        scale = x.pow(ratio)
        if config.duo_scaling:
            scale = scale / w.pow(1 - ratio)
        ends = scale[alive].max() * scale[alive].min()
        scale = torch.where(alive, scale / ends.sqrt(), 1.0)
        if bool((torch.isfinite(scale) & (scale > 0)).all()):
            yield ratio, scale


def relative_magnitude(view: PairView, weights: list[Tensor]) -> Tensor:
    """Mean over the rows of weights [n_i, K] of |w| / largest |w| of its scale group: fp32 [K]."""
    total = torch.zeros_like(view.absmean)
    for reader, weight in zip(view.readers, weights, strict=True):
        size = weight.abs()
        step = reader.scheme.columns_per_scale(size.shape[1])
        for start in range(0, size.shape[1], step):
            group = size[:, start : start + step]
            group /= group.amax(dim=1, keepdim=True).clamp_min(1e-30)
        total += size.sum(dim=0)
    return total / sum(weight.shape[0] for weight in weights)


def loss(
    view: PairView, weights: list[Tensor], scale: Tensor | None, scale_search: ScaleSearch
) -> float:
    """tr(D H Dᵀ), D = Q(W s) / s - W, summed over weights [n_i, K]; scale fp32 [C], None for 1."""
    hessian = view.hessian
    columns = None if scale is None else expand(view.pair, scale)
    if columns is not None:
        hessian = hessian / columns[:, None] / columns
    total = 0.0
    for reader, weight in zip(view.readers, weights, strict=True):
        scaled = weight if columns is None else weight * columns
        rounded = _rounded(scaled, reader, hessian, scale_search)
        total += _energy(rounded - scaled, hessian)
    return total


def sample_rows(view: PairView) -> list[Tensor]:
    """Evenly spaced rows of every reader, one at least: fp32 [n_i, K], about ROWS together."""
    step = -(-sum(reader.weight.shape[0] for reader in view.readers) // ROWS)
    return [reader.folded(step) for reader in view.readers]


def _rounded(weight: Tensor, reader: FoldReader, hessian: Tensor, search: ScaleSearch) -> Tensor:
    """Plainly rounded weight, fp32 [N, K], as the reader will be, under a scheme of any kind."""
    scheme, dtype = reader.scheme, reader.weight.dtype
    if scheme.type == "int":
        config = RtnConfig(search, reader.signs)
        return rtn.rounded(weight, scheme, config, hessian, dtype).dequantize()
    importance = column_importance(hessian) if search == "importance" else None
    if scheme.is_fp4:
        offsets = nvfp4.OFFSETS[:1] if search == "minmax" else nvfp4.OFFSETS
        divisor = global_scale([weight])
        return quantize_fp4(weight, scheme, offsets, divisor, importance=importance).dequantize()
    factors = fp8.RATIOS[:1] if search == "minmax" else fp8.RATIOS
    q = quantize_fp8(weight, scheme, factors, scale_dtype=dtype, importance=importance)
    return q.dequantize()


def _energy(rows: Tensor, hessian: Tensor) -> float:
    """tr(R H Rᵀ) of rows [n, K]."""
    return float(torch.sum((rows @ hessian).mul_(rows), dtype=torch.float64))
