"""Structured OBS: greedy removal of the channels that a linear can best do without.

ZipLM: inference-aware structured pruning of language models. Kurtic, Frantar, Alistarh 2023,
https://arxiv.org/abs/2302.04089; SlimGPT, Ling et al. 2024, https://arxiv.org/abs/2412.18110.

For a linear W of least squared error over inputs with gram H, the error rises by
tr(M_BB (Hinv_BB)⁻¹) when the columns B go and all others make up for it, with Hinv the inverse of
H and M = Wᵀ W (ZipLM, eq. 2, summed over the rows of W). The group with the least rise goes; Hinv
and W become those of the linear without it, and so on. Each step is exact: it removes the group
whose removal leaves the least error after a refit of all that is left.

What differs from the papers, and why:
* M stands for W, so no step depends on the number of outputs.
* Downdates are delayed, as in GPTQ. With L Lᵀ = Hinv_BB, removing B is Hinv - U Uᵀ and
  M - T Uᵀ - U Tᵀ, where U = Hinv[:, B] L⁻ᵀ and T = M[:, B] L⁻ᵀ - U (L⁻¹ M_BB L⁻ᵀ) / 2. U and T
  are gathered and subtracted by one product a block. Until then only what is looked at is brought
  up to date: the diagonal blocks, for the rises, and the rows of the group that goes. So the order
  is that of the undelayed loop.
* Damping is a share of each number of the diagonal, not of their mean: a channel that is much
  larger than the others, as activations of LLMs are, changes nothing for them. With six channels
  of each FFN of tale-6m 64 to 256 times as large (the same function), FFN 768 to 512 and drift cost
  +4.1 % perplexity with it, +6.3 % with the mean; +4.0 and +4.0 % with the model as it is.
* The inverse is made in fp64 and downdated in the gram's dtype. From fp32 grams of five hard kinds
  (fewer tokens than columns, copies, scales 10⁻³ to 10³, ...; K = 1024) the same 341 channels go as
  in fp64 with a damping of 0.01 and of 0.0001; with an fp32 inverse up to 31 others in the latter.
* Groups lie in pools that each keep the same number, as grouped-query attention asks of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import ALONE, Groups
from compress.errors import DataError

# Columns that are removed between two updates of whole matrices. K = 4096, N = 1536, a third goes:
# 4.25, 4.20, 4.16 and 4.37 s with 32, 64, 128 and 256 (one thread, AMD EPYC).
BLOCK = 128
LEAST_UNIT = 1e-12  # of the mean of the gram's diagonal, for a column that no token drove
STRIP = (
    1024  # rows; a strip leaves out what lies left of its diagonal block, so K = 11008 costs 55 %
)


@dataclass(frozen=True, slots=True, eq=False)
class Removals:
    """Groups in the order in which they go.

    order: int64 [R]. rise: fp64 [R], what each adds to the squared error. So the first r of both
    say which groups go, and what that costs, for every r up to R.
    """

    order: Tensor
    rise: Tensor


@dataclass(slots=True, eq=False)
class _Downdated:
    """Hinv and M, [K, K], when the last block began, and what was removed since.

    Of both, only what lies right of the first column of a row's strip is kept up.
    taken, turned: Uᵀ and Tᵀ of the removals since, [BLOCK or more, K], of which `filled` rows
    are used. inverse_blocks, weight_blocks: diagonal blocks [G, width, width], up to date.
    """

    inverse: Tensor
    products: Tensor
    taken: Tensor
    turned: Tensor
    inverse_blocks: Tensor
    weight_blocks: Tensor
    strips: tuple[slice, ...]
    filled: int = 0


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups that stay, of a linear of least squared error."""
    assert seen.moments is not None, "obs looks at moments"
    return select(seen.moments.gram, seen.weight, keep, groups)


def select(
    gram: Tensor, weight: Tensor, keep: int, groups: Groups = ALONE, *, damping: float = 0.01
) -> Tensor:
    """The groups that stay: int64 [keep], ascending. Arguments and errors as of `removals`."""
    count = groups.count(gram.shape[0])
    if keep == count:  # nothing is to be known of the others
        return torch.arange(count)
    gone = removals(gram, weight, count - keep, groups, damping=damping).order
    stays = torch.ones(count, dtype=torch.bool)
    stays[gone] = False
    return stays.nonzero().flatten()


def removals(
    gram: Tensor,
    weight: Tensor,
    remove: int,
    groups: Groups = ALONE,
    *,
    damping: float = 0.01,
    block: int = BLOCK,
) -> Removals:
    """Remove groups of columns one by one, the one with the least rise in squared error each time.

    gram: fp32 or fp64 [K, K], sum or mean of x xᵀ; the rises have its scale. weight: [N, K], the
    linear of least error: its own weight for its own output, the ridge fit for another target.
    remove: how many go, an equal share of every pool. damping: added to each number of the gram's
    diagonal, as a share of itself, so that the scale of a channel changes nothing.

    Works in the gram's dtype with two [K, K] matrices, after an inverse in fp64. Raises DataError
    for a gram that has none under this damping.
    """
    count = groups.count(gram.shape[0])
    assert 0 <= remove < count, f"{remove} of {count} groups"
    assert remove % groups.pools == 0, f"{remove} groups of {groups.pools} pools"
    state = _start(gram, weight, groups, damping, max(block, groups.width))
    pool = torch.arange(count, device=gram.device) // (count // groups.pools)
    left = [remove // groups.pools] * groups.pools
    order, rise = [], []
    closed = torch.zeros(count, dtype=torch.bool, device=gram.device)
    for _ in range(remove):
        rises = _rises(state).masked_fill_(closed, torch.inf)
        group = int(rises.argmin())
        order.append(group)
        rise.append(float(rises[group]))
        _remove(state, group)
        closed[group] = True
        home = group * groups.pools // count
        left[home] -= 1
        if left[home] == 0:
            closed |= pool == home
    return Removals(torch.tensor(order, dtype=torch.int64), torch.tensor(rise, dtype=torch.float64))


def select_bytes(k: int) -> int:
    """Most bytes that a selection by the moments of k columns holds: their sum over all rows, its
    inverse in fp64 and in fp32; or that and the products, with what was removed since an update."""
    return 4 * k * k * 4 + 2 * 4 * max(BLOCK, 1) * k


def _start(gram: Tensor, weight: Tensor, groups: Groups, damping: float, block: int) -> _Downdated:
    """Hinv and M of the linear with all its columns, and room for `block` removals."""
    inverse = _inverse(gram, damping).to(gram.dtype)
    products = torch.zeros_like(inverse)
    strips = _strips(inverse.shape[0], groups.width)
    wide = weight.to(gram.dtype)
    _add_product(products, wide, wide, strips)
    taken, turned = inverse.new_empty(2, block, inverse.shape[0])
    blocks = groups.blocks(inverse), groups.blocks(products)
    return _Downdated(inverse, products, taken, turned, *blocks, strips)


def _inverse(gram: Tensor, damping: float) -> Tensor:
    """Inverse of the damped gram, fp64."""
    damped = gram.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    diagonal += damping * diagonal.clamp(min=LEAST_UNIT * float(diagonal.mean()))
    failed = torch.empty((), dtype=torch.int32, device=gram.device)
    columns = damped.mT  # the order of LAPACK; of the other, torch makes copies
    torch.linalg.cholesky_ex(columns, out=(columns, failed))
    if int(failed):
        raise DataError(f"a gram has no inverse with a damping of {damping}; take a greater one")
    return torch.cholesky_inverse(columns, out=columns).mT


def _strips(columns: int, width: int) -> tuple[slice, ...]:
    """Runs of rows; a strip of a symmetric matrix begins at its diagonal block."""
    step = max(1, STRIP // width) * width
    return tuple(slice(a, min(a + step, columns)) for a in range(0, columns, step))


def _add_product(
    matrix: Tensor, left: Tensor, right: Tensor, strips: Sequence[slice], sign: int = 1
) -> None:
    """matrix += sign leftᵀ right, in the part of each strip that is kept."""
    for s in strips:
        matrix[s, s.start :].addmm_(left[:, s].T, right[:, s.start :], alpha=sign)


def _rows(matrix: Tensor, here: slice, strips: Sequence[slice]) -> Tensor:
    """Rows of a symmetric matrix that is kept in strips: a copy, [width, K]."""
    start = next(s.start for s in reversed(strips) if s.start <= here.start)
    return torch.cat([matrix[:start, here].T, matrix[here, start:]], dim=1)


def _rises(state: _Downdated) -> Tensor:
    """tr(M_BB (Hinv_BB)⁻¹) of every group, fp64 [G]."""
    inverse, products = state.inverse_blocks, state.weight_blocks
    if inverse.shape[1] == 1:
        return (products / inverse).flatten()
    factor = torch.linalg.cholesky_ex(inverse)[0]
    return torch.cholesky_solve(products, factor).diagonal(dim1=1, dim2=2).sum(dim=1)


def _remove(state: _Downdated, group: int) -> None:
    """Take a group out of Hinv and M."""
    width = state.inverse_blocks.shape[1]
    if state.filled + width > state.taken.shape[0]:
        _update(state)
    here = slice(group * width, (group + 1) * width)
    inverse, products = _current_rows(state, here)  # [width, K]
    factor = torch.linalg.cholesky(state.inverse_blocks[group])
    u = torch.linalg.solve_triangular(factor, inverse, upper=False)
    t = torch.linalg.solve_triangular(factor, products, upper=False)
    inner = torch.linalg.solve_triangular(factor, t[:, here].T, upper=False)  # L⁻¹ M_BB L⁻ᵀ
    t -= inner @ u / 2
    new = slice(state.filled, state.filled + width)
    state.taken[new], state.turned[new] = u, t
    state.filled += width
    _update_blocks(state, _by_group(u, width), _by_group(t, width))
    # What is gone is never asked for again; an identity keeps it from breaking a factorisation.
    state.inverse_blocks[group] = torch.eye(width, dtype=u.dtype, device=u.device)
    state.weight_blocks[group] = 0


def _by_group(rows: Tensor, width: int) -> Tensor:
    """[width, K] -> [G, width, width]: the columns of each group."""
    return rows.view(width, -1, width).transpose(0, 1)


def _update_blocks(state: _Downdated, u: Tensor, t: Tensor) -> None:
    """Bring the diagonal blocks up to date; u, t: [G, width, width] of one removal."""
    turned = t.mT @ u
    state.inverse_blocks -= u.mT @ u
    state.weight_blocks -= turned + turned.mT


def _current_rows(state: _Downdated, here: slice) -> tuple[Tensor, Tensor]:
    """Rows of Hinv and M, [width, K] each, up to date."""
    taken, turned = state.taken[: state.filled], state.turned[: state.filled]
    inverse = _rows(state.inverse, here, state.strips)
    inverse.addmm_(taken[:, here].T, taken, alpha=-1)
    products = _rows(state.products, here, state.strips)
    products.addmm_(turned[:, here].T, taken, alpha=-1)
    products.addmm_(taken[:, here].T, turned, alpha=-1)
    return inverse, products


def _update(state: _Downdated) -> None:
    """Subtract what was removed since the last update from the whole matrices."""
    taken, turned = state.taken[: state.filled], state.turned[: state.filled]
    _add_product(state.inverse, taken, taken, state.strips, -1)
    _add_product(state.products, turned, taken, state.strips, -1)
    _add_product(state.products, taken, turned, state.strips, -1)
    state.filled = 0
