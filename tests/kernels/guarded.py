"""Run by test_guarded.py: every operand ends where a page begins that may not be touched, so a
number too many that is read or written ends the process."""

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress_kernels.block_panels import block_panels
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.cpu import attention, linear, packed, pairs, states
from compress_kernels.cpu.library import native
from compress_kernels.ops import rows as between
from compress_kernels.ops.packed import layout_for
from compress_kernels.ops.through_codes import through_codes
from compress_kernels.paged import StoredStates, TokenPlaces
from compress_kernels.pairs import PairPanels, lay_out_pairs
from compress_kernels.panels import NUMBERS, PANEL, Math, OwnColumns, Panels, by_panel, lay_out
from compress_kernels.rounding import CodeRounding, FloatRounding, RowRounding
from tests.kernels.products.halves import in_dots

LIBC = ctypes.CDLL(None)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 5, 8, 17)
SHAPES = ((37, 301), (16, 64), (1, 1), (49, 77))
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")
WHOLE = (
    RowRounding("token", 127.5),
    RowRounding("fixed", 127.5, scale=0.031),
    RowRounding("absmax", 127.0),
    RowRounding("outliers", 127.0, threshold=2.0),
)
_kept: list[mmap.mmap] = []


def guarded(x: Tensor) -> Tensor:
    """A copy, without gaps."""
    size = x.numel() * x.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, whole + mmap.PAGESIZE)
    _kept.append(room)
    at = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert LIBC.mprotect(at + whole, mmap.PAGESIZE, 0) == 0
    memory = (ctypes.c_char * size).from_address(at + whole - size)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)


def call(name: str, about: ctypes.Structure) -> None:
    getattr(native().library, name)(ctypes.byref(about))


def panels_of(kind: str, bits: int, shape: tuple[int, int], group: int, math: Math) -> Panels:
    """With zeros where codes are whole, columns permuted where there are no groups."""
    (n, k), groups = shape, -(-shape[1] // group)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, shape).to(torch.int8)
    if kind == "e2m1":
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes.abs().long() & 7].to(E4M3)
    elif kind == "e4m3":
        codes = torch.randn(shape).to(E4M3)
    layout, zero = layout_for(math), torch.randint(-half, half, (n, groups)).to(torch.int8)
    return Panels(
        guarded(lay_out(codes, bits, layout)),
        guarded(by_panel((torch.rand(n, groups) * 0.01).bfloat16())),
        guarded(by_panel(zero)) if kind == "int" else None,
        guarded(torch.randperm(k).int()) if group == k else None,
        shape, bits, group, layout, torch.bfloat16, kind,
    )  # fmt: skip


def packed_products() -> None:
    kinds = {"int": (2, 4, 8), "e2m1": (4,), "e4m3": (8,)}
    for math in MATHS:
        for kind in kinds if math == "exact" else ("int", "e2m1"):
            for bits in kinds[kind]:
                for n, k in SHAPES:
                    for group in (16, 128, k):
                        packed_product(panels_of(kind, bits, (n, k), group, math), math)
                _kept.clear()


def rounded_products() -> None:
    """Rows that a scheme rounds: to whole numbers, and to E4M3."""
    for n, k in SHAPES:
        for bits, group in ((2, 16), (4, 128), (8, k)):
            panels = panels_of("int", bits, (n, k), group, "int8")
            for of_rows in WHOLE:
                packed_product(panels, "int8", of_rows)
        for group, own in ((16, 128), (128, 16), (128, 0), (k, 0)):
            panels = panels_of("e4m3", 8, (n, k), group, "int8")
            each = guarded(torch.rand(-(-n // PANEL), -(-k // group), 1))
            for scales in (panels.scales, each):
                for to_floats in (FloatRounding(own), FloatRounding(own, scale=0.013)):
                    packed_product(replace(panels, scales=scales), "int16", to_floats)
        _kept.clear()
    for n, k in SHAPES:
        panels = panels_of("e4m3", 8, (n, k), 128, "exact")
        each = guarded(torch.rand(-(-n // PANEL), -(-k // 128), 1))
        packed_product(replace(panels, scales=each), "exact")


def block_products() -> None:
    """Codes from 0 on with minima, places in a table, scales of scales; of any bytes."""
    for kind, of in LAYOUTS.items():
        for n, blocks in ((37, 1), (16, 3), (1, 2)):
            data = torch.randint(0, 256, (n, blocks * of.size)).to(torch.uint8)
            for math in MATHS:
                laid = block_panels(kind, data, layout_for(math))
                fields = {name: getattr(laid, name) for name in ("codes", *NUMBERS)}
                own: Any = {name: guarded(x) for name, x in fields.items() if x is not None}
                packed_product(replace(laid, **own), math)
        _kept.clear()


def packed_product(panels: Panels, math: Math, rounding: packed.Rounding | None = None) -> None:
    n, k = panels.shape
    bias = guarded(torch.randn(n))
    for m in ROWS:
        x, out = guarded(torch.randn(m, k)), guarded(torch.zeros(m, n))
        about = packed.packed_struct(x, panels, bias, out, math, rounding)
        call(packed.function_of(math, rounding), about)
        if math == "exact":
            halves = [guarded(t.bfloat16()) for t in (x, bias, out)]
            laid = in_halves(panels)
            call("packed_pairs", packed.packed_pairs_struct(halves[0], laid, halves[1], halves[2]))


def in_halves(panels: Panels) -> Panels:
    """As rows in bf16 read it, with some columns of their own."""
    (n, k), laid = panels.shape, in_dots(panels)
    columns = torch.arange(0, k, 40).int()
    own = OwnColumns(guarded(columns), guarded(torch.randn(n, len(columns)).bfloat16()))
    return replace(laid, codes=guarded(laid.codes), own=own)


def dense_products() -> None:
    for n, k in (*SHAPES, (5, 1100)):
        for m in ROWS:
            x, bias, out = (guarded(torch.randn(*s)) for s in ((m, k), (n,), (m, n)))
            for dtype in (torch.float32, *HALVES):
                weight = guarded(torch.randn(n, k).to(dtype))
                call("linear_rows", linear.linear_struct(x, weight, bias, out))
            halves = [guarded(t.bfloat16()) for t in (x, bias, out)]
            by_rows = guarded(torch.randn(n, k).bfloat16())
            laid = PairPanels(guarded(lay_out_pairs(by_rows).values), (n, k))
            for values in (by_rows, laid):
                call("pair_rows", pairs.pair_struct(halves[0], values, halves[1], halves[2]))
        _kept.clear()


def attentions() -> None:
    for heads, kv_heads, widths in ((4, 2, (33, 19)), (1, 1, (8, 24)), (8, 1, (72, 40))):
        for dtype in (torch.float32, *HALVES, torch.int8):
            for size, length in ((16, 257), (5, 37), (1, 3)):
                attend(heads, kv_heads, widths, dtype, (size, length))
            _kept.clear()


def attend(
    heads: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype, of: tuple[int, int]
) -> None:
    """of: the size of a block, and the length of the text."""
    (size, length), blocks = of, -(-of[1] // of[0])
    parts = [guarded((torch.randn(blocks, kv_heads, size, w) * 9).to(dtype)) for w in widths]
    scales: list[Tensor | None] = [None, None]
    if dtype == torch.int8:
        scales = [guarded(torch.rand(blocks, kv_heads, size).half()) for _ in widths]
    table = guarded(torch.arange(blocks).int()[None])
    settings = attention.AttentionSettings(0.2, None, None)
    for m in (1, 3, 20):
        q = guarded(torch.randn(m, heads, widths[0]))
        out = guarded(torch.zeros(m, heads, widths[1]))
        positions = guarded((length - 1 - torch.arange(m)).clamp(min=0))
        places = TokenPlaces(table, guarded(torch.zeros(m).int()), positions)
        stored = StoredStates(parts[0], parts[1], scales[0], scales[1])
        call("paged_attention", attention.attention_struct(q, stored, places, settings, out))
    slots = guarded(torch.tensor([blocks * size - 1, 0]))
    for width, target, scale in zip(widths, parts, scales, strict=True):
        source = guarded(torch.randn(2, kv_heads, width))
        call("store_states", states.states_struct(source, target, slots, scale))


def rows_between() -> None:
    for width in (1, 7, 16, 33, 96):
        for dtype in (torch.float32, *HALVES):
            x, y = (guarded(torch.randn(5, width).to(dtype)) for _ in range(2))
            weight = guarded(torch.randn(width).to(dtype))
            between.rms_norm(x, weight, 1e-5, False)
            between.layer_norm(x, weight, weight, 1e-5)
            for function in ("silu", "gelu"):
                between.gate(x, y, function)
            between.highest(x)
            heads = guarded(torch.randn(5, 2, 2 * width).to(dtype))
            between.spread(heads)
            angles = guarded(torch.randn(5, width))
            between.rotate(heads, angles, angles)
            if dtype != torch.float16:
                for codes, largest in (("e4m3", 448.0), ("int", 127.5), ("llm.int8", 127.0)):
                    through_codes(x, CodeRounding(codes, largest, threshold=2.0))
        _kept.clear()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(2)
    products = (packed_products, rounded_products, block_products, dense_products)
    for part in (*products, attentions, rows_between):
        part()
        print(part.__name__, flush=True)
