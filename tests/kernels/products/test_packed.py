"""Rows times codes in panels: decoded products' own bits, whole numbers' exact sums, any rows."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.cpu.packed import function_of, packed_struct
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import layout_for, packed_linear, takes_group
from compress_kernels.panels import (
    Layout,
    Math,
    OwnColumns,
    Panels,
    by_output,
    by_panel,
    codes_of,
    decoded,
    joined,
    lay_out,
    panel_bytes,
)
from compress_kernels.reference import packed as reference
from tests.kernels.products.halves import check_halves

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 513)
SHAPES = ((37, 100), (16, 256), (50, 520))
# Dtypes of scales and of decoded numbers.
STORED = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16), (torch.float16,) * 2)


def made(
    layout: Layout,
    shape: tuple[int, int],
    bits: int,
    group: int,
    *,
    zeros: bool = False,
    permuted: bool = False,
    stored: tuple[torch.dtype, torch.dtype] = STORED[0],
) -> Panels:
    """Random codes of `bits`, the same for either layout."""
    seed = torch.Generator().manual_seed(bits * 1000 + group)
    (n, k), half = shape, 1 << (bits - 1)
    codes = torch.randint(-half, half, shape, dtype=torch.int8, generator=seed)
    groups = -(-k // group)
    scales = (torch.rand(n, groups, generator=seed) * 0.01 + 0.001).to(stored[0])
    zero = torch.randint(-half, half, (n, groups), dtype=torch.int8, generator=seed)
    columns = torch.randperm(k, generator=seed).int() if permuted else None
    placed = codes if columns is None else codes[:, columns.long()]
    laid = lay_out(placed, bits, layout)
    panels = Panels(
        laid, by_panel(scales), by_panel(zero) if zeros else None, columns, shape, bits, group,
        layout, stored[1],
    )  # fmt: skip
    assert torch.equal(codes_of(panels), codes)
    return panels


def rows_of(k: int, count: int = 64) -> Tensor:
    """Rows with a few large numbers, and some that are all 0."""
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(k))
    x[::3, k // 2] *= 50
    x[5] = 0
    return x


def check(panels: Panels, math: Math, rows: tuple[int, ...] = ROWS) -> None:
    n, k = panels.shape
    x, bias = rows_of(k, max(rows)), torch.linspace(-1, 1, n)
    # With as many rows at once torch's own product may sum otherwise; whole numbers never do.
    wanted = linear(x, decoded(panels), bias)
    if math != "exact":
        wanted = reference.packed_linear(x, panels, bias, math)
    for m in rows:
        assert torch.equal(packed_linear(x[:m], panels, bias, math), wanted[:m]), (math, m)
    if math == "exact":
        check_halves(panels, x, bias, rows)


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0], ids=lambda g: f"g{g}" if g else "row")
@pytest.mark.parametrize("zeros", [False, True], ids=["sym", "asym"])
def test_bits_are_those_of_the_definition(zeros: bool, bits: int, group: int, math: Math) -> None:
    """Odd outputs, columns and last groups; whole groups of 32, which have a loop of their own."""
    for k in (301, 576) if group == 32 else (301,):
        check(made(layout_for(math), (33, k), bits, group or k, zeros=zeros), math)


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 256, 0], ids=lambda g: f"g{g}" if g else "row")
def test_other_shapes_dtypes_and_permuted_columns(bits: int, group: int, math: Math) -> None:
    for i, (n, k) in enumerate(SHAPES):
        panels = made(
            layout_for(math), (n, k), bits, group or k,
            zeros=i % 2 == bits // 4 % 2, permuted=i == 2, stored=STORED[i],
        )  # fmt: skip
        check(panels, math, (1, 5, 64))


@needs_native
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("bits", "shape"), [(4, (33, 301)), (8, (70, 600))])
def test_columns_of_their_own_stand_in_for_codes(
    bits: int, shape: tuple[int, int], permuted: bool
) -> None:
    """The first, the last, neighbours, and those of another block."""
    (n, k), plain = shape, made("dots", shape, bits, shape[1], permuted=permuted)
    columns = torch.tensor([0, 6, 7, 250, 257, 299, k - 1]).int()
    panels = replace(plain, own=OwnColumns(columns, torch.randn(n, 7).bfloat16()))
    assert torch.equal(decoded(panels)[:, columns], panels.own.numbers.float())
    check_halves(panels, rows_of(k), torch.linspace(-1, 1, n), (1, 5, 64))
    some = panels.rows(16, 33)
    assert torch.equal(decoded(some), decoded(panels)[16:33])
    with pytest.raises(ValueError, match="columns of their own is given; None but for rows in bf1"):
        packed_linear(rows_of(k), replace(panels, layout="rows"), None, "exact")
    fewer = replace(panels, own=replace(panels.own, columns=columns[1:]))
    with pytest.raises(ValueError, match=r"own.numbers is shape \[\d+, 7\]; \[\d+, 6\] is needed"):
        packed_linear(rows_of(k).bfloat16(), fewer, None, "exact")


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_from_0_on_need_no_minima(bits: int, math: Math) -> None:
    """Behind a product that has some."""
    seed = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << min(bits, 5), (33, 301), generator=seed).to(torch.uint8)
    scales = by_panel((torch.rand(33, 10, generator=seed) * 0.01).half())
    minima = by_panel(torch.rand(33, 10, generator=seed).half())
    panels = Panels(
        lay_out(codes, bits, layout_for(math)), scales, None, None, (33, 301), bits, 32,
        layout_for(math), kind="uint", minima=minima,
    )  # fmt: skip
    check(panels, math, (1, 17))
    check(replace(panels, minima=None), math, (1, 17))


@needs_native
@pytest.mark.parametrize("math", MATHS)
def test_many_rows_of_many_columns(math: Math) -> None:
    check(made(layout_for(math), (40, 1000), 4, 128, zeros=True), math, (513,))


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0], ids=lambda g: f"g{g}" if g else "row")
@pytest.mark.parametrize(("shape", "zeros"), [((50, 520), True), ((33, 301), False)], ids=str)
def test_is_near_the_product_in_fp64(
    shape: tuple[int, int], zeros: bool, group: int, bits: int, math: Math
) -> None:
    """Inputs are off by half a step of the run's largest at most."""
    panels, k = made(layout_for(math), shape, bits, group or shape[1], zeros=zeros), shape[1]
    x, weight = rows_of(k), decoded(panels).double()
    if math != "exact":
        weight = decoded(replace(panels, plain=torch.float32)).double()
    found, wanted = packed_linear(x, panels, None, math), x.double() @ weight.T
    step, run = {"exact": 0.0, "int16": 0.5 / 32512, "int8": 0.5 / 127}[math], group or 128
    runs = torch.nn.functional.pad(x, (0, -k % run)).unflatten(1, (-1, run)).abs().amax(2)
    columns = runs.repeat_interleave(run, 1)[:, :k].double()
    bound = step * columns @ weight.abs().T + 1e-5 * x.abs().double() @ weight.abs().T
    assert ((found - wanted).abs() <= bound).all()


def test_whole_numbers_round_to_the_largest() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-40, 0.0, 0.0]])
    whole, worth = reference.rounded_run(x, 127.0)
    assert whole.tolist() == [[64, -127, 32], [0, 0, 0], [0, 0, 0]]
    assert worth.tolist() == [pytest.approx(2 / 127), 0, 0]


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_through(value: float, bits: int, math: Math) -> None:
    panels = made(layout_for(math), (20, 300), bits, 64)
    whole = rows_of(300)
    for count in (3, 6, 17):  # of few rows, and of many
        x = whole[:count].clone()
        want = packed_linear(x, panels, None, math)
        x[2, 140] = value
        found = packed_linear(x, panels, None, math)
        assert not found[2].isfinite().any()
        kept = torch.arange(count) != 2
        assert torch.equal(found[kept], want[kept])


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_row_has_the_same_bits_beside_any_others(bits: int, math: Math) -> None:
    panels = made(layout_for(math), (600, 1000), bits, 128, zeros=bits == 2)
    x, bias = torch.randn(80, 1000), torch.randn(600)
    wide = torch.randn(80, 1500)
    wide[:, 100:1100] = x
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = packed_linear(x, panels, bias, math)
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            for count in (1, 3, 16, 77, 80):
                rows = torch.randperm(80)[:count]
                assert torch.equal(packed_linear(x[rows], panels, bias, math), whole[rows])
            apart = wide[:, 100:1100]
            assert torch.equal(packed_linear(apart, panels, bias, math), whole)
    finally:
        torch.set_num_threads(before)
    some = panels.rows(32, 103)
    assert torch.equal(packed_linear(x, some, bias[32:103], math), whole[:, 32:103])


@needs_native
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_beside_the_output_is_written(bits: int, math: Math) -> None:
    """And nothing beside the rows is seen."""
    for n, k, rows in ((17, 33, 1), (37, 301, 5), (9, 160, 20)):
        panels, bias = made(layout_for(math), (n, k), bits, 32), torch.randn(n)
        wide, apart = torch.full((rows, k + 2), torch.nan), torch.full((rows + 2, n + 2), 7.0)
        x, out = wide[:, 1:-1], apart[1:-1, 1:-1]
        x.copy_(rows_of(k)[:rows])
        about = packed_struct(x, panels, bias, out, math)
        getattr(native().library, function_of(math))(ctypes.byref(about))
        assert torch.equal(out, packed_linear(x, panels, bias, math))
        assert out.isfinite().all()
        out.fill_(7.0)
        assert (apart == 7.0).all()


@needs_native
@pytest.mark.parametrize("rows", ROWS[:-1])
def test_codes_of_8_bits_do_not_saturate(rows: int) -> None:
    """All at their largest, of both signs, and off zeros of the other sign."""
    for sign, zero in ((127, 0), (-128, 0), (127, -128), (-128, 127)):
        codes = torch.full((16, 256), sign, dtype=torch.int8)
        zeros = by_panel(torch.full((16, 2), zero, dtype=torch.int8)) if zero else None
        panels = Panels(
            lay_out(codes, 8, "dots"), by_panel(torch.ones(16, 2)), zeros, None, (16, 256), 8, 128,
            "dots",
        )  # fmt: skip
        for math, largest in (("int8", 127), ("int16", 32512)):
            for x in (float(largest), -float(largest)):
                found = packed_linear(torch.full((rows, 256), x), panels, None, math)
                # Each of the two runs and their sum are numbers of fp32.
                wanted = torch.tensor((sign - zero) * x * 128) * 2
                assert (found == wanted).all()


@pytest.mark.parametrize("layout", ["dots", "rows"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_laying_out_is_a_permutation(bits: int, layout: Layout) -> None:
    panels = made(layout, (37, 512), bits, 128, zeros=True)
    assert panels.codes.numel() == 3 * panel_bytes(512, bits, layout) == 48 * 512 * bits // 8
    scales = torch.randn(37, 5)
    assert torch.equal(by_output(by_panel(scales), 37), scales)
    widened = made(layout, (37, 512), bits, 128)
    more = replace(widened, codes=lay_out(codes_of(widened), 8, layout), bits=8)
    assert torch.equal(codes_of(more), codes_of(widened))
    assert torch.equal(decoded(more), decoded(widened))


@pytest.mark.parametrize("layout", ["dots", "rows"])
@pytest.mark.parametrize("outputs", [(16, 21, 5), (16, 21), (32, 5, 5)], ids=str)
def test_joined_outputs_stay_as_they_are(layout: Layout, outputs: tuple[int, ...]) -> None:
    parts = [made(layout, (n, 200), 4, 32, zeros=True, permuted=True) for n in outputs]
    parts = [replace(part, columns=parts[0].columns) for part in parts]
    whole = joined(parts)
    assert whole.shape == (sum(outputs), 200)
    assert whole.codes.shape[0] == -(-sum(outputs) // 16)
    assert torch.equal(decoded(whole), torch.cat([decoded(part) for part in parts]))


def test_nothing_to_multiply() -> None:
    panels = made("dots", (20, 64), 4, 32)
    assert packed_linear(torch.ones(0, 64), panels, None, "int8").shape == (0, 20)


def test_groups_that_runs_can_have() -> None:
    for group, right in ((16, True), (48, True), (128, True), (384, True), (192, False), (8, False),
                         (20, False), (1000, True)):  # fmt: skip
        assert takes_group(group, 1000) == right


def test_wrong_arguments_are_named() -> None:
    panels = made("dots", (20, 64), 4, 32)
    x = torch.zeros(2, 64)
    for call, message in (
        (
            (x[:, :3], panels, None, "int8"),
            r"x is torch.float32 \[2, 3\]; torch.float32 \[rows, 64",
        ),
        ((x.half(), panels, None, "int8"), "x is torch.float16"),
        ((x, panels, x[0], "int8"), r"bias is torch.float32 \[64\]; torch.float32 \[20\]"),
        ((x, panels, None, "exact"), "panels are laid out as 'dots'; exact reads 'rows'"),
        ((x, replace(panels, codes=panels.codes[:1]), None, "int8"), "codes is torch.uint8"),
        ((x, replace(panels, scales=panels.scales[:, :1]), None, "int8"), "scales is"),
        ((x, replace(panels, columns=x[0]), None, "int8"), "columns is"),
        (
            (x.double(), made("rows", (20, 64), 4, 32), None, "exact"),
            r"torch.float32, torch.bfloat16 or torch.float16 \[rows, 64",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            packed_linear(*call)  # type: ignore[arg-type]
