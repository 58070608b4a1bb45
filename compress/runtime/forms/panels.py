"""Whole codes in panels, which products read as they are."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.quant.activations import fake_quantize
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.packed import PackedWeight
from compress_kernels.cpu.library import native
from compress_kernels.ops.packed import layout_for, packed_linear, takes_group
from compress_kernels.panels import (
    PANEL,
    Math,
    Panels,
    by_output,
    by_panel,
    codes_of,
    joined,
    lay_out,
    panel_bytes,
)

# Bits that a code of so many takes in panels.
WIDTHS = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}


@dataclass(frozen=True, slots=True, eq=False)
class PackedPanels:
    """scheme: of the codes, with a scale for every row where there is one for the tensor."""

    panels: Panels
    scheme: QuantScheme
    math: Math

    @property
    def shape(self) -> tuple[int, int]:
        return self.panels.shape

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

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
        )
        return whole.part(rows)

    def dequantize(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of the weight, [rows, K], as `exact` multiplies with them."""
        return self.part(rows).dequantize(self.panels.plain).to(dtype)

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        x = x if inputs is None else fake_quantize(x, inputs, alone=True)
        return packed_linear(x, self.panels, bias, self.math)

    def joined(self, others: tuple[LinearWeight, ...]) -> "PackedPanels | None":
        parts = [self, *(other for other in others if isinstance(other, PackedPanels))]
        alike = len(parts) == 1 + len(others) and all(_alike(self, part) for part in parts)
        if not alike:
            return None
        return replace(self, panels=joined([part.panels for part in parts]))


@dataclass(frozen=True, slots=True)
class PanelsForm:
    """Takes whole codes whose inputs are as they come. Those of 3 and of 5 to 7 bits take 4 and 8
    in memory; numbers are multiplied by them as `Arithmetic.math` says."""

    name: str = "codes in panels"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        if how.device.type != "cpu":
            return "they are for the CPU"
        if how.dtype != torch.float32:
            return "they are for dtype fp32"
        if facts.factored:
            return "inputs are multiplied by factors first"
        scheme = facts.scheme
        assert scheme is not None, "dense weights have a table of their own"
        return _unlike(scheme, facts.shape[1]) or (
            f"no compiled kernels: {native().reason}" if native().library is None else None
        )

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """Codes, scales and zeros, of outputs and columns that only fill up, too."""
        scheme, (rows, columns) = facts.scheme, facts.shape
        assert scheme is not None, "dense weights have a table of their own"
        each = panel_bytes(columns, WIDTHS[scheme.bits], layout_for(how.math))
        number = facts.stored.itemsize + torch.int8.itemsize * (not scheme.symmetric)
        return -(-rows // PANEL) * (each + PANEL * scheme.groups(columns) * number)

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        """As packed codes that are decoded, where groups of columns are not of one size."""
        n, k = weight.shape
        group = weight.scheme.columns_per_scale(k)
        columns = None if weight.g_idx is None else _by_group(weight.g_idx, group)
        irregular = weight.g_idx is not None and columns is None
        assert weight.input_factor is None, "why_not has refused it"
        assert weight.outliers is None, "why_not has refused it"
        if irregular:
            return PackedWeight.of(weight, how.device, facts.plain)
        layout, bits = layout_for(how.math), WIDTHS[weight.scheme.bits]
        codes = weight.codes if columns is None else weight.codes[:, columns.long()]
        groups = weight.scheme.groups(k)
        panels = Panels(
            codes=lay_out(codes, bits, layout),
            scales=by_panel(weight.scale.expand(n, groups)),
            zeros=None if weight.zero is None else by_panel(weight.zero.expand(n, groups)),
            columns=columns,
            shape=(n, k),
            bits=bits,
            group=group,
            layout=layout,
            plain=facts.plain,
        )
        scheme = weight.scheme
        if scheme.granularity == "tensor":
            scheme = replace(scheme, granularity="channel")
        return PackedPanels(panels, scheme, how.math)


def _unlike(scheme: QuantScheme, columns: int) -> str | None:
    """Why codes of a scheme are not laid out in panels."""
    if scheme.type != "int":
        return "codes are floats"
    if scheme.activation is not None:
        return "the scheme rounds inputs its own way"
    if scheme.granularity == "block":
        return "squares share a scale"
    group = scheme.columns_per_scale(columns)
    if not takes_group(group, columns):
        return f"groups of {group} columns are not 16, 32, 64 or a multiple of 128"
    return None


def _by_group(g_idx: Tensor, group: int) -> Tensor | None:
    """Columns in the order of their groups: int32 [K]; None where groups differ in size."""
    columns = torch.argsort(g_idx, stable=True)
    usual = torch.arange(len(g_idx)) // group
    return columns.int() if torch.equal(g_idx[columns].long(), usual) else None


def _alike(one: PackedPanels, other: PackedPanels) -> bool:
    """Whether two weights can be one."""
    a, b = one.panels, other.panels
    same = (one.scheme, a.shape[1], a.scales.dtype, a.plain) == (
        other.scheme, b.shape[1], b.scales.dtype, b.plain,
    )  # fmt: skip
    if a.columns is None or b.columns is None:
        return same and a.columns is b.columns
    return same and torch.equal(a.columns, b.columns)
