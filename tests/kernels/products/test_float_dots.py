"""Rows that become E4M3 numbers, times such codes: sums of codes in fp32, in one order."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.ops.packed import packed_linear, takes_groups
from compress_kernels.ops.through_codes import through_codes
from compress_kernels.panels import Panels, by_panel, decoded, lay_out
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import CodeRounding, FloatRounding, RowRounding
from tests.kernels.products.shuffled import check_shuffled

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
E4M3 = torch.float8_e4m3fn
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 513)
# Columns, those that share a scale of the weight, and of the inputs (0: all).
GROUPS = ((301, 301, 0), (256, 128, 128), (304, 32, 0), (144, 144, 16), (256, 64, 128), (20, 20, 0))


def made(shape: tuple[int, int], group: int, *, shared: bool = False) -> Panels:
    """Every number that there is, zeros of both signs and those below the least exponent among
    them."""
    (n, k), seed = shape, torch.Generator().manual_seed(group)
    codes = torch.randint(0, 254, shape, generator=seed).to(torch.uint8)
    codes = (codes + (codes >= 127)).view(E4M3)
    apart = torch.randn(n, -(-k // group), generator=seed) * 0.01
    scales = apart[: -(-n // 16), :, None].contiguous() if shared else by_panel(apart.bfloat16())
    laid = lay_out(codes, 8, "dots")
    return Panels(
        laid, scales, None, None, shape, 8, group, "dots", torch.bfloat16, "e4m3", factor=0.75
    )


def rows_of(k: int, count: int = max(ROWS)) -> Tensor:
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(k))
    x[3], x[4, : k // 2] = 0, 0
    return x


@needs_native
@pytest.mark.parametrize(("columns", "group", "own"), GROUPS)
def test_bits_are_those_of_the_definition(columns: int, group: int, own: int) -> None:
    """Rows alone and beside others, odd shapes, scales of all kinds."""
    for shared in (False, True):
        panels, x = made((37, columns), group, shared=shared), rows_of(columns)
        bias = torch.linspace(-1, 1, 37)
        for how in (FloatRounding(own), FloatRounding(scale=0.013)):
            wanted = reference.packed_linear(x, panels, bias, "int16", how)
            for m in ROWS:
                found = packed_linear(x[:m], panels, bias, "int16", how)
                assert torch.equal(found, wanted[:m]), (m, how, shared)


@needs_native
def test_permuted_columns_are_read_where_they_belong() -> None:
    panels, x = made((37, 256), 64), rows_of(256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    moved = replace(panels, columns=order.int())
    here = torch.empty_like(x)
    here[:, order] = x
    how = FloatRounding()
    found = packed_linear(here, moved, None, "int16", how)
    assert torch.equal(found, packed_linear(x, panels, None, "int16", how))


@pytest.mark.parametrize(("columns", "group", "own"), GROUPS)
def test_it_is_the_product_of_what_the_scheme_makes_of_both(
    columns: int, group: int, own: int
) -> None:
    """In fp64, of the rounded inputs and of decoded weights that are rounded to nothing more."""
    panels, x = made((37, columns), group), rows_of(columns)
    weight = decoded(replace(panels, plain=torch.float32)).double()
    for how, scale in ((FloatRounding(own), None), (FloatRounding(scale=0.013), 0.013)):
        rounded = through_codes(x, CodeRounding("e4m3", 448.0, own, scale)).double()
        found = packed_linear(x, panels, None, "int16", how).double()
        size = rounded.abs() @ weight.abs().T
        assert ((found - rounded @ weight.T).abs() <= 2e-6 * size).all()


@needs_native
@pytest.mark.parametrize("how", [FloatRounding(), FloatRounding(128), FloatRounding(scale=0.013)])
def test_a_row_has_the_same_bits_beside_any_others(how: FloatRounding) -> None:
    panels = made((1030, 512), 128)
    check_shuffled(lambda x: packed_linear(x, panels, None, "int16", how), rows_of(512, 80))


@needs_native
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_through(value: float) -> None:
    """A fixed scale takes infinity for the largest code."""
    panels = made((20, 256), 128)
    for how in (FloatRounding(), FloatRounding(128), FloatRounding(scale=0.013)):
        x = rows_of(256)[:6]
        want = packed_linear(x, panels, None, "int16", how)
        x[2, 140] = value
        found = packed_linear(x, panels, None, "int16", how)
        fixed = how.scale is not None and value == torch.inf
        assert found[2].isfinite().all() if fixed else found[2].isnan().all()
        kept = torch.arange(6) != 2
        assert torch.equal(found[kept], want[kept])


def test_groups_are_parts_of_each_other() -> None:
    fits = [(128, 128, 256), (300, 0, 300), (32, 0, 300), (64, 128, 256), (256, 16, 256)]
    assert all(takes_groups(*case) for case in fits)
    assert not any(takes_groups(*case) for case in [(128, 48, 256), (256, 8, 256)])


def test_wrong_arguments_are_named() -> None:
    panels, x = made((16, 96), 48), torch.zeros(1, 96)
    with pytest.raises(
        ValueError, match="codes are E4M3 numbers, which int8 reads for inputs that"
    ):
        packed_linear(x, panels, None, "int8")
    with pytest.raises(ValueError, match=r"rounding\.group is 32; a part or a multiple of 48 is"):
        packed_linear(x, panels, None, "int8", FloatRounding(32))
    whole = Panels(
        lay_out(torch.zeros(16, 96, dtype=torch.int8), 8, "dots"), by_panel(torch.ones(16, 1)),
        None, None, (16, 96), 8, 96, "dots",
    )  # fmt: skip
    with pytest.raises(ValueError, match="codes is int; e4m3 for inputs of E4M3 is needed"):
        packed_linear(x, whole, None, "int8", FloatRounding())
    with pytest.raises(ValueError, match="rounding is of whole numbers; FloatRounding for E4M3"):
        packed_linear(x, panels, None, "int8", RowRounding("token", 127.5))
