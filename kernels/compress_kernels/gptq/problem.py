"""What the column loop is given and what it returns."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Signed integer codes in [code_min, code_max] and the dtype their scales are stored in."""

    bits: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def code_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True, eq=False)
class SearchedScales:
    """The scale of a group is chosen when the loop reaches it, from the weights as updated so far.

    ratios: fp32 [R], candidates as `group_scale` takes them. importance: fp32 [K], what an error in
    each column costs; None where all cost the same.
    """

    ratios: Tensor
    importance: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FixedScales:
    """Scales chosen before the loop.

    scale: fp32 [N, G], exact in the grid's scale dtype. zero: int8 [N, G], of asymmetric codes
    only. groups: integers [K], the scale of each column (act-order); None for k // group_size.
    """

    scale: Tensor
    zero: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A column loop, arguments checked.

    ratios: fp32 [R], candidates of the scale search. importance: fp32 [K] or None.
    scale: fp32 [N, G] and zero: int8 [N, G], fixed up front, or None to search at each group start.
    groups: int32 [K], the group of every column.
    """

    grid: Grid
    group_size: int
    ratios: Tensor
    importance: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    groups: Tensor
    block: int

    def borders(self) -> Iterator[tuple[int, int]]:
        """Blocks [start, stop): every searched group lies in one block, or starts one.

        So the columns of a group are all up to date when its scale is chosen.
        """
        columns = self.groups.shape[0]
        size = min(self.group_size, columns) if self.scale is None else 1
        unit = max(size, self.block // size * size)
        for outer in range(0, columns, unit):
            end = min(outer + unit, columns)
            for start in range(outer, end, self.block):
                yield start, min(start + self.block, end)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnResult:
    """codes: int8 [N, K]. scale: fp32 [N, G], exact in the grid's scale dtype.

    zero: int8 [N, G], None when symmetric. quantized: fp32 [N, K], (code - zero) * scale.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    quantized: Tensor


def empty_result(weight: Tensor, problem: Problem) -> ColumnResult:
    """Buffers for a loop over weight [N, K]: scales copied when fixed, else unset."""
    rows, columns = weight.shape
    scale, zero = problem.scale, problem.zero
    if scale is None:
        shape = (rows, -(-columns // problem.group_size))
        scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
        if not problem.grid.symmetric:
            zero = torch.empty(shape, dtype=torch.int8, device=weight.device)
    else:
        scale, zero = scale.clone(), None if zero is None else zero.clone()
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    return ColumnResult(
        codes, scale, zero, torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    )
