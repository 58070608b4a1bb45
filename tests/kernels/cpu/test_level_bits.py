"""Products on every instruction set that this machine has: one result, which is the definition's;
of fp32 sums the bits of the decoded weight there. Compiling takes a minute on two cores, so this
runs with `make test-interop`."""

import ctypes
import platform
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress_kernels.block_panels import block_panels
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.cpu import build, levels, linear, packed, pairs
from compress_kernels.cpu.bundle import BundledLibrary, bundle
from compress_kernels.cpu.library import native
from compress_kernels.ops.packed import layout_for
from compress_kernels.pairs import lay_out_pairs
from compress_kernels.panels import Math, Panels, by_panel, decoded, lay_out
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import FloatRounding, RowRounding
from tests.kernels.products.halves import in_dots

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86"),
    pytest.mark.skipif(native().library is None, reason=native().reason),
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++"),
]
HERE = [level for level in levels.levels() if level.needs <= levels.features()]
FUSED = [level for level in HERE if levels.AVX2.needs <= level.needs]
# Without attention and GPTQ, which take a third of the time.
PRODUCTS = {"packed_dots", "float_dots", "packed_rows", "linear", "pair_rows", "packed_pairs"}
ROWS = (1, 3, 5, 17, 40)
E4M3 = torch.float8_e4m3fn
WHOLE = (
    None,
    RowRounding("token", 127.5),
    RowRounding("fixed", 127.5, scale=0.031),
    RowRounding("absmax", 127.0),
    RowRounding("outliers", 127.0, threshold=2.5),
)

Call = Callable[[str, ctypes.Structure], None]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("levels") / "products.so"
    base, rest = build.sources()
    some = [source for source in rest if source.stem in PRODUCTS]
    others = [level for level in HERE if level is not levels.chosen()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("compress_kernels.cpu.bundle.sources", lambda: (base, some))
        patched.setattr("compress_kernels.cpu.bundle.levels", lambda: others)
        bundle(path)
    return path


def each(path: Path, of: list[levels.Level]) -> Iterator[tuple[str, Call]]:
    """The name of each level, and a call of its functions; the one that runs here is compiled
    already."""
    here, library = levels.chosen(), native().library
    assert library is not None
    for level in of:
        if level is here:
            yield level.name, partial(call_of, library)
            continue
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(levels.VARIABLE, level.name)
            yield level.name, partial(call_of, BundledLibrary(str(path)))


def call_of(library: ctypes.CDLL, name: str, about: ctypes.Structure) -> None:
    getattr(library, name)(ctypes.byref(about))


def whole(shape: tuple[int, int], bits: int, group: int, math: Math, *, zeros: bool) -> Panels:
    half, numbers = 1 << (bits - 1), (shape[0], -(-shape[1] // group))
    codes = torch.randint(-half, half, shape).to(torch.int8)
    zero = by_panel(torch.randint(-half, half, numbers).to(torch.int8)) if zeros else None
    scales, layout = by_panel((torch.rand(numbers) * 0.01).bfloat16()), layout_for(math)
    return Panels(
        lay_out(codes, bits, layout), scales, zero, None, shape, bits, group, layout, torch.bfloat16
    )


def floats(shape: tuple[int, int], bits: int, group: int, math: Math) -> Panels:
    """E4M3 codes, or E2M1 ones of 4 bits."""
    (n, k), layout = shape, layout_for(math)
    codes = torch.randint(0, 127, shape).to(torch.uint8).view(E4M3)
    if bits == 4:
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, -6])[torch.randint(0, 8, shape)].to(E4M3)
    return Panels(
        lay_out(codes, bits, layout), by_panel(torch.rand(n, -(-k // group)) * 0.01), None, None,
        shape, bits, group, layout, torch.bfloat16, "e2m1" if bits == 4 else "e4m3",
    )  # fmt: skip


def some(math: Math) -> Iterator[Panels]:
    """Odd shapes, groups of all kinds, zeros, blocks with minima."""
    for bits in (2, 4, 8):
        for shape, group, zeros in (((37, 301), 32, True), ((50, 520), 128, False)):
            yield whole(shape, bits, group, math, zeros=zeros)
    yield whole((16, 256), 8, 256, math, zeros=False)
    yield floats((37, 304), 4, 16, math)
    for kind in ("Q4_K", "Q6_K", "IQ4_NL"):
        blocks = 512 // LAYOUTS[kind].numbers * LAYOUTS[kind].size
        # Bytes below 60 are numbers of fp16, too.
        yield block_panels(
            kind, torch.randint(0, 60, (37, blocks)).to(torch.uint8), layout_for(math)
        )


def rows_of(k: int) -> Tensor:
    x = torch.randn(max(ROWS), k)
    x[3], x[4, : k // 2] = 0, 0
    return x


def test_whole_sums_are_one_result(bundled: Path) -> None:
    """And so are those of E4M3 numbers, in one order."""
    cases = [(panels, math, None) for math in ("int16", "int8") for panels in some(math)]
    cases += [(whole((37, 301), 8, 301, "int8", zeros=False), "int8", how) for how in WHOLE[1:]]
    for shape, group in (((37, 301), 301), ((37, 256), 128)):
        panels = floats(shape, 8, group, "int16")
        cases += [(panels, "int16", how) for how in (FloatRounding(), FloatRounding(scale=0.013))]
    for panels, math, how in cases:
        n, k = panels.shape
        x, bias = rows_of(k), torch.randn(n)
        wanted = reference.packed_linear(x, panels, bias, math, how)
        for level, call in each(bundled, HERE):
            for m in ROWS:
                out = torch.empty(m, n)
                about = packed.packed_struct(x[:m], panels, bias, out, math, how)
                call(packed.function_of(math, how), about)
                assert torch.equal(out, wanted[:m]), (level, m, panels.kind, panels.bits, how)


def test_exact_products_have_the_bits_of_the_decoded_weight(bundled: Path) -> None:
    for panels in (*some("exact"), floats((37, 256), 8, 128, "exact")):
        n, k = panels.shape
        x, bias, weight = rows_of(k), torch.randn(n), decoded(panels)
        for level, call in each(bundled, HERE):
            for m in ROWS:
                out, wanted = torch.empty(m, n), torch.empty(m, n)
                call("packed_rows", packed.packed_struct(x[:m], panels, bias, out, "exact"))
                call("linear_rows", linear.linear_struct(x[:m], weight, bias, wanted))
                assert torch.equal(out, wanted), (level, m, panels.kind, panels.bits)


def test_products_in_bf16_are_one_result(bundled: Path) -> None:
    """Where there is a fused multiply-add; with codes, too."""
    for panels in (*some("exact"), floats((37, 256), 8, 128, "exact")):
        n, k = panels.shape
        x, bias, laid = rows_of(k).bfloat16(), torch.randn(n).bfloat16(), in_dots(panels)
        weight, found = lay_out_pairs(decoded(panels).bfloat16()), []
        for level, call in each(bundled, FUSED):
            for m in sorted(ROWS, reverse=True):
                out, coded = torch.empty(m, n).bfloat16(), torch.empty(m, n).bfloat16()
                call("pair_rows", pairs.pair_struct(x[:m], weight, bias, out))
                call("packed_pairs", packed.packed_pairs_struct(x[:m], laid, bias, coded))
                found.append(out)
                case = (level, m, panels.kind, panels.bits)
                assert torch.equal(out, found[0][:m]), case
                assert torch.equal(coded, found[0][:m]), case
