"""llama.cpp's blocks in panels: decoded products' own bits, whole sums with minima, any rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels import decode_blocks, round_blocks
from compress_kernels.block_panels import block_panel_bytes, block_panels
from compress_kernels.blocks.bytes import BlockFields, pack
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import layout_for, packed_linear
from compress_kernels.panels import WIDTHS, Math, decoded, joined
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import RowRounding
from tests.kernels.products.halves import check_halves
from tests.kernels.products.shuffled import check_shuffled

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 513)
K = 512


def blocks(kind: str, rows: int, columns: int = K) -> Tensor:
    """Any codes and whole scales, numbers in fp16 of both signs, some of them below 2^-14."""
    of, seed = LAYOUTS[kind], torch.Generator().manual_seed(rows)
    count = rows * columns // of.numbers

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=seed)

    def half() -> Tensor:
        return (torch.randn(count, generator=seed) * 10.0 ** whole(-6, -2, count)).half()

    ones = torch.ones(count, of.subs, dtype=torch.int16)
    scales, minima = ones, -ones
    if "scales" in of.parts:
        scales = whole(*of.scale_range, count, of.subs).to(torch.int16)
        minima = whole(0, of.minima, count, of.subs).to(torch.int16)
    codes = whole(0, (1 << of.bits) - 1, count, of.numbers).to(torch.uint8)
    both = (half(), minima) if of.minima else (None, None)
    return pack(of, BlockFields(codes, half(), scales, *both)).view(rows, -1)


def rows_of(columns: int = K) -> Tensor:
    x = torch.randn(max(ROWS), columns, generator=torch.Generator().manual_seed(columns))
    x[::3, columns // 2] *= 50
    x[5] = 0
    return x


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_bits_are_those_of_the_decoded_blocks(kind: str, math: Math) -> None:
    """Outputs that do not fill a panel; inputs of which some are large, or all 0."""
    data, x, bias = blocks(kind, 37), rows_of(), torch.linspace(-1, 1, 37)
    weight, panels = decode_blocks(kind, data), block_panels(kind, data, layout_for(math))
    assert torch.equal(decoded(panels), weight)
    wanted = linear(x, weight, bias)
    if math != "exact":
        wanted = reference.packed_linear(x, panels, bias, math)
    for m in ROWS:
        assert torch.equal(packed_linear(x[:m], panels, bias, math), wanted[:m]), m
    if math == "exact":
        check_halves(panels, x, bias, ROWS)


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1", "IQ4_XS"])
def test_is_near_the_product_in_fp64(kind: str, math: Math) -> None:
    data = round_blocks(kind, torch.randn(40, K) * 0.05, None)
    x, weight = rows_of(), decode_blocks(kind, data).double()
    found = packed_linear(x, block_panels(kind, data, layout_for(math)), None, math)
    step = {"exact": 0.0, "int16": 0.5 / 32512, "int8": 0.5 / 127}[math]
    group = LAYOUTS[kind].sub
    tops = x.view(len(x), -1, group).abs().amax(2).repeat_interleave(group, 1).double()
    bound = step * tops @ weight.abs().T + 1e-5 * x.abs().double() @ weight.abs().T
    # A minimum and the codes that it is taken from round inputs alike, but sums of fp32 do not.
    assert ((found - x.double() @ weight.T).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_NL"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_through(value: float, kind: str, math: Math) -> None:
    panels, x = block_panels(kind, blocks(kind, 20), layout_for(math)), rows_of()[:6]
    want = packed_linear(x, panels, None, math)
    x[2, 140] = value
    found = packed_linear(x, panels, None, math)
    assert not found[2].isfinite().any()
    kept = torch.arange(6) != 2
    assert torch.equal(found[kept], want[kept])


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_NL", "Q6_K"])
def test_a_row_has_the_same_bits_beside_any_others(kind: str, math: Math) -> None:
    panels = block_panels(kind, blocks(kind, 300, 1024), layout_for(math))
    x = torch.randn(80, 1024)
    whole = check_shuffled(lambda rows: packed_linear(rows, panels, None, math), x)
    some = panels.rows(32, 103)
    assert torch.equal(packed_linear(x, some, None, math), whole[:, 32:103])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_bytes_are_those_of_the_blocks_but_for_widened_codes(kind: str) -> None:
    """And whole scales of 4 or 6 bits take 8: 1.03 of Q4_K's bytes, 1.19 of Q2_K's."""
    of = LAYOUTS[kind]
    data, shape = blocks(kind, 48), (48, K)
    for math in MATHS:
        panels = block_panels(kind, data, layout_for(math))
        assert panels.nbytes == block_panel_bytes(kind, shape, layout_for(math))
        more = WIDTHS[of.bits] - of.bits
        scales = panels.nbytes - data.nbytes - data.numel() // of.size * of.numbers * more // 8
        assert 0 <= scales <= {"Q2_K": 0.2, "Q3_K": 0.04}.get(kind, 0.03) * data.nbytes


@pytest.mark.parametrize("outputs", [(16, 32), (16, 21, 5)], ids=str)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q4_1"])
def test_joined_outputs_stay_as_they_are(kind: str, outputs: tuple[int, ...]) -> None:
    parts = [block_panels(kind, blocks(kind, n), "dots") for n in outputs]
    assert torch.equal(decoded(joined(parts)), torch.cat([decoded(part) for part in parts]))


def test_wrong_arguments_are_named() -> None:
    whole = block_panels("Q4_K", blocks("Q4_K", 20), "dots")
    assert whole.minima is not None
    assert whole.outer_scales is not None
    x = torch.zeros(2, K)
    for panels, message in (
        (replace(whole, kind="int"), "codes is int; uint with minima"),
        (replace(whole, plain=torch.bfloat16), "codes is uint; int where there are zeros, or"),
        (replace(whole, minima=whole.minima.float()), "minima is torch.float32"),
        (replace(whole, outer_scales=whole.outer_scales[:, :1].float()), "outer_scales is torch"),
        (replace(whole, outer_minima=whole.scales), "outer_minima is torch.int8"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_linear(x, panels, None, "int8")
    with pytest.raises(ValueError, match="rounding is given; None for codes uint"):
        packed_linear(x, whole, None, "int8", RowRounding("token", 127.5))
