"""Scales chosen by what a group's rounding errors do to the layer's output together.

The searches of `rounding` add up squared errors column by column. Inputs are correlated, so errors
of one group add to each other or cancel: with d the errors of a group and H_gg its block of the
Hessian, d H_gg dᵀ is the exact error of the group's share of the output. This is the measure by
which AWQ clips (arXiv 2306.00978, section 3.2).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.quant.scheme import QuantScheme
from compress_kernels import group_scale

RUN = 1 << 22  # weights that are looked at at once: 16 MB in fp32, a few times


def scales_by_output(
    weight: Tensor, scheme: QuantScheme, ratios: Tensor, scale_dtype: torch.dtype, hessian: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros as `rounding.choose_scales` gives them, for an integer scheme.

    weight: [N, K]. ratios: fp32 [R], the first wins a tie. hessian: fp32 [K, K], mean of x xᵀ.
    Takes 2 R N K g operations for groups of g columns, g = K where a row has one scale.
    """
    w = weight.float()
    blocks = _blocks(hessian, scheme)
    rows = w.shape[0] if scheme.granularity == "tensor" else max(1, RUN // w.shape[1])
    pieces = [
        _search(w[start : start + rows], blocks, scheme, ratios, scale_dtype)
        for start in range(0, w.shape[0], rows)
    ]
    scale = torch.cat([scale for scale, _ in pieces]).to(scale_dtype)
    return scale, None if scheme.symmetric else torch.cat([zero for _, zero in pieces])


def _blocks(hessian: Tensor, scheme: QuantScheme) -> Tensor:
    """The groups' blocks [G, g, g]; a column that is never driven still counts a little."""
    k = hessian.shape[0]
    step = scheme.columns_per_scale(k)
    blocks = hessian.new_zeros(scheme.groups(k), step, step)
    for i, start in enumerate(range(0, k, step)):
        part = hessian[start : start + step, start : start + step]
        blocks[i, : part.shape[0], : part.shape[0]] = part
    blocks.diagonal(dim1=1, dim2=2).add_(1e-6 * float(hessian.diagonal().mean()) + 1e-30)
    return blocks


def _search(
    weight: Tensor, blocks: Tensor, scheme: QuantScheme, ratios: Tensor, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale fp32 and zero int8 of weight fp32 [N, K], [N, G] or [1, 1] for granularity tensor."""
    groups, step = blocks.shape[0], blocks.shape[1]
    padded = pad(weight, (0, groups * step - weight.shape[1]))
    cells = padded.reshape(-1, groups, step).transpose(0, 1).contiguous()  # cells: [G, N, g]
    whole = scheme.granularity == "tensor"
    flat = cells.reshape(1, -1) if whole else cells.reshape(-1, step)  # one row a scale
    shape = (1, 1) if whole else cells.shape[:2]
    best = torch.full(shape, torch.inf, device=weight.device)
    scale, zero = torch.ones_like(best), torch.zeros_like(best, dtype=torch.int8)
    for i in range(ratios.shape[0]):
        s, z = group_scale(
            flat, ratios[i : i + 1], None, scheme.bits, scheme.symmetric, scale_dtype
        )
        s = s.reshape(shape)
        z = torch.zeros_like(zero) if z is None else z.reshape(shape)
        loss = _loss(cells, blocks, s, z, scheme)
        loss = loss.sum().reshape(1, 1) if whole else loss
        better = loss < best
        best = torch.where(better, loss, best)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return scale.t().contiguous(), zero.t().contiguous()


def _loss(
    cells: Tensor, blocks: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme
) -> Tensor:
    """d H_gg dᵀ of every row of every group: [G, N]."""
    s, z = scale[..., None], zero[..., None].float()
    codes = cells.div(s).round_().add_(z).clamp_(scheme.code_min, scheme.code_max)
    error = codes.sub_(z).mul_(s).sub_(cells)  # error: [G, N, g]
    return torch.bmm(error, blocks).mul_(error).sum(dim=2)
