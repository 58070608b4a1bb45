"""Keys and values in blocks: written where the slots say, as 8-bit codes with the best scales."""

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu import states as compiled
from compress_kernels.cpu.library import native
from compress_kernels.ops.states import store_states
from compress_kernels.reference import states as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HEADS, SIZE = 3, 4
needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def empty(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor | None]:
    scales = torch.zeros(5, HEADS, SIZE, dtype=torch.float16)
    target = torch.zeros(5, HEADS, SIZE, dim, dtype=dtype)
    return target, scales if dtype == torch.int8 else None


def numbers(rows: int, dim: int) -> Tensor:
    """Of all sizes, with zeros, ties and what fp16 cannot hold."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(rows, HEADS, dim, generator=generator)
    x *= 10 ** torch.randint(-9, 9, (rows, HEADS, 1), generator=generator).float()
    x[0], x[1, 0], x[2, 1, 0] = 0, 6e-8, 65519.0
    x[3, 2] = torch.arange(dim) * 0.5
    return x


@needs_native
@pytest.mark.parametrize("dim", [5, 16, 40, 64])
@pytest.mark.parametrize("target", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_the_compiled_store_is_torchs_to_the_bit(
    source: torch.dtype, target: torch.dtype, dim: int
) -> None:
    x = numbers(9, dim).to(source)
    slots = torch.tensor([4, 7, 19, 5, 6, 12, 13, 0, 9])
    # As keys lie in a joint product with queries and values.
    apart = torch.cat((x, x), dim=1)[:, :HEADS]
    found, wanted = empty(target, dim), empty(target, dim)
    compiled.store_states(apart, found[0], slots, found[1])
    reference.store_states(x, wanted[0], slots, wanted[1])
    assert torch.equal(found[0], wanted[0])
    if found[1] is not None and wanted[1] is not None:
        assert torch.equal(found[1].nan_to_num(-1), wanted[1].nan_to_num(-1))


@pytest.mark.parametrize("compile_it", [True, False])
def test_what_int8_loses(compile_it: bool) -> None:
    if compile_it and native().library is None:
        pytest.skip(native().reason)
    x = torch.randn(8, HEADS, 64)
    target, scales = empty(torch.int8, 64)
    assert scales is not None
    store = compiled.store_states if compile_it else reference.store_states
    store(x, target, torch.arange(8) + 4, scales)
    rows = torch.arange(8) + 4
    codes, steps = (s[rows // SIZE, :, rows % SIZE].float() for s in (target, scales))
    # Half a step, and a hair where the rounded scale is too small for the largest.
    assert ((codes * steps[..., None] - x).abs() <= steps[..., None] * 0.57).all()
    assert (codes.abs().amax(-1) >= 126).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x = torch.ones(1, HEADS, 20)
    x[0, 1, 17] = value
    target, scales = empty(torch.int8, 20)
    assert scales is not None
    store_states(x, target, torch.tensor([6]), scales)
    read = target[1, :, 2].float() * scales[1, :, 2, None].float()
    assert torch.isclose(read[[0, 2]], torch.ones(2, 20), rtol=1e-3).all()
    assert read[1, 17].isnan() or read[1, 17].abs() > 6e4


def test_wrong_arguments_are_named() -> None:
    x, slots = torch.zeros(2, HEADS, 8), torch.zeros(2, dtype=torch.int64)
    (floats, _), (codes, scales) = empty(torch.float32, 8), empty(torch.int8, 8)
    assert scales is not None
    for call, message in (
        ((x[:, :1], floats, slots), r"source is torch.float32 \[2, 1, 8\]; floats \[T, 3, 8\]"),
        ((x.int(), floats, slots), r"source is torch.int32"),
        ((x, floats, slots[:1]), r"slots is torch.int64 \[1\]; int64 \[2\]"),
        ((x, codes, slots), r"scales are missing; int8 needs fp16 \[5, 3, 4\]"),
        ((x, codes, slots, scales.float()), r"scales is torch.float32"),
        ((x, floats, slots, scales), "torch.float32 goes without scales"),
        ((x, floats.double(), slots), "torch.float64 goes without scales"),
        ((x, floats.mT.contiguous().mT, slots), "target has strides .*; a contiguous tensor"),
        ((x, codes, slots, scales.mT.contiguous().mT), "scales has strides"),
    ):
        with pytest.raises(ValueError, match=message):
            store_states(*call)  # type: ignore[arg-type]
