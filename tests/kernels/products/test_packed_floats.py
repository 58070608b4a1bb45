"""Codes that are floats in panels, and scales of E4M3: products' bits are the definition's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import packed_linear
from compress_kernels.panels import (
    Layout,
    Math,
    Panels,
    by_output,
    by_panel,
    codes_of,
    decoded,
    joined,
    lay_out,
)
from compress_kernels.reference import packed as reference
from tests.kernels.products.halves import check_halves, in_dots
from tests.kernels.products.shuffled import check_shuffled

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
E4M3 = torch.float8_e4m3fn
PLAIN = (torch.bfloat16, torch.float32, torch.float16)
SHAPES = ((37, 112), (50, 544), (33, 301))
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 513)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(shape: tuple[int, int], layout: Layout, plain: torch.dtype, group: int = 16) -> Panels:
    """NVFP4: E2M1 codes of both signs, E4M3 scales, a divisor."""
    (n, k), seed = shape, seeded(group)
    index = torch.randint(0, 16, shape, generator=seed)
    codes = (E2M1[index & 7] * torch.where(index > 7, -1.0, 1.0)).to(E4M3)
    scales = (torch.rand(n, -(-k // group), generator=seed) * 448).to(E4M3)
    return Panels(
        lay_out(codes, 4, layout), by_panel(scales), None, None, shape, 4, group, layout, plain,
        "e2m1", divisor=7654.3212890625,
    )  # fmt: skip


def bytes_(shape: tuple[int, int], group: int, plain: torch.dtype, *, shared: bool) -> Panels:
    """E4M3: every number there is. shared: a scale is that of all outputs of a panel."""
    (n, k), seed = shape, seeded(group)
    codes = torch.randint(0, 254, shape, generator=seed).to(torch.uint8)
    codes = (codes + (codes >= 127)).view(E4M3)
    scales = torch.rand(-(-n // 16), -(-k // group), 1, generator=seed) * 0.01
    if not shared:
        apart = torch.randn(n, -(-k // group), generator=seed) * 0.01
        scales = by_panel(apart.bfloat16())
    laid = lay_out(codes, 8, "rows")
    return Panels(laid, scales, None, None, shape, 8, group, "rows", plain, "e4m3")


def check(panels: Panels, math: Math) -> None:
    n, k = panels.shape
    x, bias = torch.randn(max(ROWS), k, generator=seeded(k)), torch.linspace(-1, 1, n)
    x[5] = 0
    wanted = linear(x, decoded(panels), bias)
    if math != "exact":
        wanted = reference.packed_linear(x, panels, bias, math)
    for m in ROWS:
        assert torch.equal(packed_linear(x[:m], panels, bias, math), wanted[:m]), (math, m)
    if math == "exact":
        check_halves(panels, x, bias, (1, 17))


@needs_native
@pytest.mark.parametrize("plain", PLAIN, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_has_the_bits_of_the_decoded_weight(
    shape: tuple[int, int], plain: torch.dtype
) -> None:
    for group in (16, 32):
        check(small(shape, "rows", plain, group), "exact")
    for size, shared in ((shape[1], False), (128, False), (256, False), (48, False), (128, True)):
        check(bytes_(shape, size, plain, shared=shared), "exact")


@needs_native
def test_a_row_has_the_same_bits_beside_any_others() -> None:
    plain, x = torch.bfloat16, torch.randn(80, 1024, generator=seeded(2))
    cases: tuple[tuple[Panels, Math], ...] = (
        (bytes_((600, 1024), 1024, plain, shared=False), "exact"),
        (bytes_((600, 1024), 128, plain, shared=True), "exact"),
        (small((600, 1024), "rows", plain), "exact"),
        (small((600, 1024), "dots", plain), "int16"),
        (small((600, 1024), "dots", plain), "int8"),
    )
    for panels, math in cases:
        check_shuffled(lambda rows, of=panels, by=math: packed_linear(rows, of, None, by), x)
    in_pairs = in_dots(cases[0][0])
    check_shuffled(lambda rows: packed_linear(rows, in_pairs, None, "exact"), x.bfloat16())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("count", [3, 17])
def test_what_is_not_finite_goes_through(count: int, value: float) -> None:
    x = torch.randn(count, 112, generator=seeded(3))
    cases: list[tuple[Panels, Math]] = [
        (bytes_((37, 112), 112, torch.bfloat16, shared=False), "exact"),
        (bytes_((37, 112), 64, torch.float32, shared=True), "exact"),
        *((small((37, 112), "dots", torch.bfloat16), math) for math in ("int16", "int8")),
        (small((37, 112), "rows", torch.bfloat16), "exact"),
    ]
    for panels, math in cases:
        want, other = packed_linear(x, panels, None, math), x.clone()
        other[1, 70] = value
        found = packed_linear(other, panels, None, math)
        assert not found[1].isfinite().any()
        kept = torch.arange(count) != 1
        assert torch.equal(found[kept], want[kept])


@needs_native
@pytest.mark.parametrize("group", [112, 64])
def test_scales_of_any_size(group: int) -> None:
    """0, denormals, those whose products bf16 has no exponents for, and NaN."""
    panels = bytes_((48, 112), group, torch.bfloat16, shared=False)
    sizes = [0.0, 1e-42, 2e-38, -1e-33, 1e-30, 1e29, 1e30, 1e36, 3e38, torch.nan]
    for size in sizes:
        scales = panels.scales.float()
        scales[1, 0, 3] = size
        odd = replace(panels, scales=scales)
        x = torch.randn(17, 112, generator=seeded(1)) * 1e-3
        wanted = linear(x, decoded(odd), None)
        for m in (1, 2, 4, 8, 17):
            found = packed_linear(x[:m], odd, None, "exact")
            assert torch.equal(found.nan_to_num(7), wanted[:m].nan_to_num(7)), (size, m)
        check_halves(odd, x, torch.zeros(48), (1, 17))


@needs_native
@pytest.mark.parametrize("math", ["int16", "int8"])
@pytest.mark.parametrize("group", [16, 32])
def test_e2m1_is_whole_numbers_and_half_a_scale(group: int, math: Math) -> None:
    for shape in SHAPES:
        check(small(shape, "dots", torch.bfloat16, group), math)


@pytest.mark.parametrize("math", ["exact", "int16", "int8"])
def test_e2m1_is_near_the_product_in_fp64(math: Math) -> None:
    panels = small((50, 544), "rows" if math == "exact" else "dots", torch.float32)
    x, weight = torch.randn(9, 544, generator=seeded(1)), decoded(panels).double()
    found, wanted = packed_linear(x, panels, None, math), x.double() @ weight.T
    most = {"exact": 1e-6, "int16": 2e-5, "int8": 1e-2}[math]
    assert (found - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("layout", ["rows", "dots"])
def test_codes_come_back(layout: Layout) -> None:
    panels = small((37, 112), layout, torch.float32)
    codes = codes_of(panels)
    assert codes.dtype == E4M3
    again = replace(panels, codes=lay_out(codes, 4, layout))
    assert torch.equal(again.codes, panels.codes)
    scales = by_output(panels.scales, 37).float() / torch.tensor(panels.divisor)
    wanted = codes.float() * scales.repeat_interleave(16, 1)
    assert torch.equal(decoded(panels), wanted)


def test_every_e4m3_number_comes_back() -> None:
    panels = bytes_((48, 256), 256, torch.float32, shared=False)
    codes = codes_of(panels)
    assert len(codes.view(torch.uint8).unique()) == 254
    assert torch.equal(lay_out(codes, 8, "rows"), panels.codes)


@pytest.mark.parametrize("outputs", [(16, 32), (16, 21, 5)], ids=str)
def test_joined_outputs_stay_as_they_are(outputs: tuple[int, ...]) -> None:
    for parts in (
        [small((n, 112), "dots", torch.float32) for n in outputs],
        [bytes_((n, 300), 128, torch.float32, shared=True) for n in outputs],
    ):
        wanted: Tensor = torch.cat([decoded(part) for part in parts])
        assert torch.equal(decoded(joined(parts)), wanted)
