"""Codes in panels, which products read as they are."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.input_rounding import (
    float_rounding,
    rounded,
    rounds_floats,
    rounds_rows,
    row_rounding,
)
from compress.runtime.forms.packed import PackedWeight
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import MOST, layout_for, packed_linear, takes_group, takes_groups
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.panels import (
    PANEL,
    WIDTHS,
    Codes,
    Math,
    OwnColumns,
    Panels,
    by_output,
    by_panel,
    codes_of,
    joined,
    lay_out,
    panel_bytes,
)
from compress_kernels.rounding import FloatRounding, RowRounding


@dataclass(frozen=True, slots=True, eq=False)
class PackedPanels:
    """scheme: of the codes, with a scale for every row where there is one for the tensor, and one
    for groups of columns where there is one for squares. math: of its products. outliers: columns
    that whole numbers leave out."""

    panels: Panels
    scheme: QuantScheme
    math: Math
    outliers: OutlierColumns | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.panels.shape

    @property
    def nbytes(self) -> int:
        kept = self.outliers
        beside = 0 if kept is None else kept.columns.nbytes + kept.weight.nbytes
        return self.panels.nbytes + beside

    def part(self, rows: slice) -> QuantizedTensor:
        """Some rows, their codes not packed."""
        panels, (n, k) = self.panels, self.panels.shape
        zero, g_idx = panels.zeros, None
        if panels.columns is not None:
            g_idx = torch.empty(k, dtype=torch.int32)
            g_idx[panels.columns.long()] = (torch.arange(k) // panels.group).int()
        whole = QuantizedTensor(
            codes=codes_of(panels),
            scale=by_output(panels.scales, n),
            zero=None if zero is None else by_output(zero, n),
            g_idx=g_idx,
            scheme=self.scheme,
            global_scale=None if panels.divisor == 1 else torch.tensor([panels.divisor]),
            global_factor=None if panels.factor == 1 else torch.tensor([panels.factor]),
            outliers=self.outliers,
        )
        return whole.part(rows)

    def dequantize(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of the weight, [rows, K], as `exact` multiplies with them."""
        return self.part(rows).dequantize(self.panels.plain).to(dtype)

    def rounding(self, inputs: InputQuantization | None) -> RowRounding | FloatRounding | None:
        """What the product itself does to a token's inputs in place of what the math does."""
        if inputs is None or self.math == "exact":
            return None
        return float_rounding(inputs) if self.panels.kind == "e4m3" else row_rounding(inputs)

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        if inputs is None:
            return packed_linear(x, self.panels, bias, self.math)
        if self.math == "exact":
            x = rounded(x, inputs)
            return packed_linear(x, self.panels, bias, self.math)
        rounding, outliers = self.rounding(inputs), self.outliers
        if outliers is None:
            return packed_linear(x, self.panels, bias, self.math, rounding)
        rest = x.index_fill(1, outliers.columns, 0.0)
        whole = packed_linear(rest, self.panels, bias, self.math, rounding)
        return whole + linear(x[:, outliers.columns], outliers.weight, None)

    def joined(self, others: tuple[LinearWeight, ...]) -> "PackedPanels | None":
        parts = [self, *(other for other in others if isinstance(other, PackedPanels))]
        alike = len(parts) == 1 + len(others) and all(_alike(self, part) for part in parts)
        if not alike:
            return None
        return replace(self, panels=joined([part.panels for part in parts]))


@dataclass(frozen=True, slots=True)
class PanelsForm:
    """Takes codes that products read as they are. Those of 3 and of 5 to 7 bits take 4 and 8 in
    memory; numbers are multiplied by them as `math_of` says."""

    name: str = "codes in panels"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        scheme = facts.scheme
        assert scheme is not None, "dense weights have a table of their own"
        unlike = "inputs are multiplied by factors first" if facts.factored else None
        return why_no_panels(how, unlike or _unlike(scheme, facts.shape[1], how))

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """Codes, scales and zeros, of outputs and columns that only fill up, too; not the columns
        beside them, which headers do not count."""
        scheme, (rows, columns) = facts.scheme, facts.shape
        assert scheme is not None, "dense weights have a table of their own"
        layout = layout_for(math_of(scheme, columns, how.math), how.dtype)
        each = panel_bytes(columns, WIDTHS[scheme.bits], layout)
        number = facts.stored.itemsize + torch.int8.itemsize * (not scheme.symmetric)
        outputs = 1 if scheme.granularity == "block" else PANEL
        return -(-rows // PANEL) * (each + outputs * scheme.groups(columns) * number)

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        """As packed codes that are decoded, where groups of columns are not of one size, or an
        8-bit float is none."""
        n, k = weight.shape
        scheme, groups = weight.scheme, weight.scheme.groups(k)
        group = scheme.columns_per_scale(k)
        columns = None if weight.g_idx is None else _by_group(weight.g_idx, group)
        irregular = weight.g_idx is not None and columns is None
        assert weight.input_factor is None, "why_not has refused it"
        if irregular or not _numbers(weight):
            return PackedWeight.of(weight, how.device, facts.plain)
        math = math_of(scheme, k, how.math)
        layout, bits = layout_for(math, how.dtype), WIDTHS[scheme.bits]
        codes = weight.codes if columns is None else weight.codes[:, columns.long()]
        panels = Panels(
            codes=lay_out(codes, bits, layout),
            scales=_scales(weight),
            zeros=None if weight.zero is None else by_panel(weight.zero.expand(n, groups)),
            columns=columns,
            shape=(n, k),
            bits=bits,
            group=group,
            layout=layout,
            plain=facts.plain,
            kind=_kind(scheme),
            divisor=1.0 if weight.global_scale is None else float(weight.global_scale),
            factor=1.0 if weight.global_factor is None else float(weight.global_factor),
        )
        if scheme.granularity == "tensor":
            scheme = replace(scheme, granularity="channel")
        if scheme.granularity == "block":
            scheme = replace(scheme, granularity="group")
        outliers = weight.outliers
        if outliers is not None:  # a view would keep all that it is a view of
            outliers = OutlierColumns(outliers.columns.clone(), outliers.weight.clone())
            if how.dtype == torch.bfloat16:
                panels = replace(panels, own=_own(outliers, facts.plain))
        return PackedPanels(panels, scheme, math, outliers)


def why_no_panels(how: Arithmetic, unlike: str | None = None) -> str | None:
    """Why an engine has no products with panels; unlike: why those of a weight are none."""
    if how.device.type != "cpu":
        return "they are for the CPU"
    unpaired = how.dtype == torch.bfloat16 and not compiled_pairs(how.device)
    if unpaired or (how.dtype != torch.float32 and how.math != "exact"):
        return "they are for dtype fp32"
    if unlike is None and native().library is None:
        return f"no compiled kernels: {native().reason}"
    if unlike is None and how.all_decoded:
        return "caches hold decoded weights"
    return unlike


def math_of(scheme: QuantScheme, columns: int, math: Math) -> Math:
    """That of a weight's products: 8-bit floats are multiplied as codes where inputs are rounded to
    such, whole codes where inputs are rounded to whole numbers, a row at a time, or by the math."""
    activation = scheme.activation
    if _kind(scheme) == "e4m3":
        if activation is None or not rounds_floats(activation):
            return "exact"
        group = scheme.columns_per_scale(columns)
        return math if takes_groups(group, activation.group_size, columns) else "exact"
    whole = activation is None or (rounds_rows(activation) and columns <= MOST)
    return math if whole else "exact"


def _unlike(scheme: QuantScheme, columns: int, how: Arithmetic) -> str | None:
    """Why codes of a scheme are not laid out in panels."""
    activation = scheme.activation
    fixed = activation is not None and activation.outliers == "calibrated"
    decoded = how.dtype != torch.bfloat16 and math_of(scheme, columns, how.math) == "exact"
    if fixed and decoded:
        return "outlier columns stand in for their codes"
    if scheme.granularity == "block":
        if not scheme.symmetric:
            return "squares share a zero"
        if scheme.group_size % PANEL:
            return f"squares of {scheme.group_size} rows share a scale; 16 would"
    group = scheme.columns_per_scale(columns)
    if not takes_group(group, columns):
        return f"groups of {group} columns are not 16, 32, 64 or a multiple of 128"
    return None


def _kind(scheme: QuantScheme) -> Codes:
    if scheme.type == "int":
        return "int"
    return "e2m1" if scheme.is_fp4 else "e4m3"


def _numbers(weight: QuantizedTensor) -> bool:
    """Whether no 8-bit float of a weight is NaN, which products do not know."""
    found = (weight.codes, weight.scale)
    floats = (x.view(torch.uint8) for x in found if x.dtype == torch.float8_e4m3fn)
    return not any(bool((x & 0x7F == 0x7F).any()) for x in floats)


def _scales(weight: QuantizedTensor) -> Tensor:
    """[panels, G, 16], or [panels, G, 1] of squares."""
    n, k = weight.shape
    if weight.scheme.granularity != "block":
        return by_panel(weight.scale.expand(n, weight.scheme.groups(k)))
    each = weight.scheme.group_size // PANEL
    panels = weight.scale.repeat_interleave(each, 0)[: -(-n // PANEL)]
    return panels[:, :, None].contiguous()


def _own(outliers: OutlierColumns, plain: torch.dtype) -> OwnColumns:
    """As products in bf16 read them."""
    return OwnColumns(outliers.columns.int(), outliers.weight.to(plain).bfloat16())


def _by_group(g_idx: Tensor, group: int) -> Tensor | None:
    """Columns in the order of their groups: int32 [K]; None where groups differ in size."""
    columns = torch.argsort(g_idx, stable=True)
    usual = torch.arange(len(g_idx)) // group
    return columns.int() if torch.equal(g_idx[columns].long(), usual) else None


def _alike(one: PackedPanels, other: PackedPanels) -> bool:
    """Whether two weights can be one."""
    a, b = one.panels, other.panels
    same = (one.scheme, a.shape[1], a.scales.dtype, a.plain, a.divisor, a.factor) == (
        other.scheme, b.shape[1], b.scales.dtype, b.plain, b.divisor, b.factor,
    )  # fmt: skip
    same = same and one.outliers is None and other.outliers is None
    same = same and a.scales.shape[2:] == b.scales.shape[2:]  # squares keep one a panel
    if a.columns is None or b.columns is None:
        return same and a.columns is b.columns
    return same and torch.equal(a.columns, b.columns)
