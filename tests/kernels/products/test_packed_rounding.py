"""Rows that a scheme rounds, times whole codes: exact sums a group, then what is left as it is."""

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.ops.packed import MOST, packed_linear
from compress_kernels.panels import Panels, by_panel, decoded, lay_out
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import RowRounding
from tests.kernels.products.shuffled import check_shuffled

ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 513)
# Bits, columns that share a scale, whether there are zeros.
GROUPED = ((8, 128, True), (4, 32, False), (2, 256, True))
# Sums of one step or two of 16 columns, and how many columns.
SHORT = ((4, 32, True, 576), (8, 16, False, 304), (8, 32, False, 32), (4, 9, True, 9))
needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
KINDS = {
    "token": RowRounding("token", 127.5),
    "token of 4 bits": RowRounding("token", 7.5),
    "fixed": RowRounding("fixed", 127.5, scale=0.031),
    "absmax": RowRounding("absmax", 127.0),
    "outliers": RowRounding("outliers", 127.0, threshold=2.5),
}


def made(shape: tuple[int, int], bits: int, group: int, *, zeros: bool = False) -> Panels:
    (n, k), seed = shape, torch.Generator().manual_seed(bits + group)
    half, groups = 1 << (bits - 1), -(-k // group)
    codes = torch.randint(-half, half, shape, dtype=torch.int8, generator=seed)
    scales = (torch.rand(n, groups, generator=seed) * 0.01).bfloat16()
    zero = torch.randint(-half, half, (n, groups), dtype=torch.int8, generator=seed)
    return Panels(
        lay_out(codes, bits, "dots"), by_panel(scales), by_panel(zero) if zeros else None, None,
        shape, bits, group, "dots",
    )  # fmt: skip


def rows_of(k: int, count: int = max(ROWS)) -> Tensor:
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(k))
    x[3], x[4, : k // 2] = 0, 0
    return x


@needs_native
@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_the_definition(name: str) -> None:
    """Rows alone and beside others, odd shapes, one scale a row or several, codes of any width."""
    cases = ((8, 301, False, 301), *((*case, 301) for case in GROUPED), *SHORT)
    for bits, group, zeros, k in cases:
        rows = ROWS if group == 301 else ROWS[:-1]
        panels, x = made((37, k), bits, group, zeros=zeros), rows_of(k, rows[-1])
        bias = torch.linspace(-1, 1, 37)
        wanted = reference.packed_linear(x, panels, bias, "int8", KINDS[name])
        for m in rows:
            for math in ("int8", "int16"):
                found = packed_linear(x[:m], panels, bias, math, KINDS[name])
                assert torch.equal(found, wanted[:m]), (bits, group, m)


@needs_native
@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    for bits, group in ((8, 1000), (4, 128)):
        panels, bias = made((600, 1000), bits, group, zeros=bits == 4), torch.randn(600)
        check_shuffled(
            lambda x, of=panels, plus=bias: packed_linear(x, of, plus, "int8", KINDS[name]),
            rows_of(1000, 80),
        )


@needs_native
def test_a_long_row_is_one_sum() -> None:
    """All codes and inputs at their largest: 2^30."""
    codes = torch.full((16, MOST), -128, dtype=torch.int8)
    panels = Panels(
        lay_out(codes, 8, "dots"), by_panel(torch.ones(16, 1)), None, None, (16, MOST), 8, MOST,
        "dots",
    )  # fmt: skip
    for sign in (1.0, -1.0):
        x = torch.full((1, MOST), sign * 3)
        found = packed_linear(x, panels, None, "int8", RowRounding("fixed", 127.5, scale=1.0))
        assert (found == -128.0 * 3 * sign * MOST).all()
        found = packed_linear(x, panels, None, "int8", RowRounding("fixed", 127.5, scale=1e-3))
        assert (found == (-128.0 * (127 if sign > 0 else -128) * MOST) * torch.tensor(1e-3)).all()


@needs_native
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_through(value: float, name: str) -> None:
    """A fixed scale takes infinity for the largest code, an outlier is multiplied as it is."""
    panels, x = made((20, 300), 8, 300), rows_of(300)[:6]
    want = packed_linear(x, panels, None, "int8", KINDS[name])
    x[2, 140] = value
    found = packed_linear(x, panels, None, "int8", KINDS[name])
    if name == "fixed" and value == torch.inf:
        assert found.isfinite().all()
    else:
        assert not found[2].isfinite().any()
    kept = torch.arange(6) != 2
    assert torch.equal(found[kept], want[kept])


def test_outliers_are_multiplied_as_they_are() -> None:
    panels, x = made((20, 300), 8, 300), torch.zeros(2, 300)
    x[0, 7], x[1, 9] = 100.25, 3.0
    found = packed_linear(x, panels, None, "int8", KINDS["outliers"])
    assert torch.equal(
        found, torch.stack((decoded(panels)[:, 7] * 100.25, decoded(panels)[:, 9] * 3))
    )


def test_wrong_arguments_are_named() -> None:
    panels = made((20, 64), 8, 64)
    how = KINDS["token"]
    with pytest.raises(ValueError, match="rounding is given; None for exact is needed"):
        packed_linear(torch.zeros(1, 64), panels, None, "exact", how)
