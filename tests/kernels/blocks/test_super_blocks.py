"""llama.cpp's blocks: decoded to the bit as its own package does, rounded by the definition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compress_kernels import decode_blocks, round_blocks
from compress_kernels.blocks.bytes import pack, unpack
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.blocks.search import search_of
from compress_kernels.cpu import super_blocks as cpu
from compress_kernels.cpu.library import native
from compress_kernels.reference import super_blocks as reference

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.03


def strange(columns: int) -> Tensor:
    """Rows of zeros, of one number, of one sign, with an outlier, tiny and huge."""
    x = normal(10, columns)
    x[0], x[1], x[2] = 0, -0.5, 0.25
    x[3], x[4] = x[3].abs(), -x[4].abs()
    x[5, : columns // 2] = 0
    x[6, columns // 3] = 40
    x[7] *= 1e-6
    x[8] *= 1e7
    x[9, ::2] = 1e-30
    return x


def cost(x: Tensor, found: Tensor, importance: Tensor) -> Tensor:
    """Weighted squared error of each row, in float64."""
    return ((x.double() - found.double()).square() * importance.double()).sum(1)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_random_bytes_are_decoded_to_the_bit(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    layout = LAYOUTS[kind]
    numbers = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert numbers == (layout.numbers, layout.size)
    data = np.random.default_rng(1).integers(0, 256, (6, 3 * layout.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    for decode in (decode_blocks, lambda _, x: reference.decode_blocks(layout, x)):
        found = decode(kind, torch.from_numpy(data)).numpy()
        same = found.view(np.uint32) == wanted.view(np.uint32)
        assert (same | (np.isnan(found) & np.isnan(wanted))).all()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_bytes_are_taken_apart_and_put_together(kind: str) -> None:
    layout = LAYOUTS[kind]
    seed = torch.Generator().manual_seed(2)
    data = torch.randint(0, 256, (20, layout.size), dtype=torch.uint8, generator=seed)
    fields = unpack(layout, data)
    assert torch.equal(pack(layout, fields), data)
    assert int(fields.codes.max()) < 1 << layout.bits


@needs_native
@pytest.mark.parametrize("kind", LAYOUTS)
def test_compiled_search_gives_the_bytes_of_the_definition(kind: str) -> None:
    layout = LAYOUTS[kind]
    importance = torch.rand(512, generator=torch.Generator().manual_seed(3)) + 0.01
    for x in (normal(19, 512), strange(512)):
        found = cpu.round_blocks(layout, x, importance, search_of(layout))
        wanted = reference.round_blocks(layout, x, importance, search_of(layout))
        assert torch.equal(found, wanted)
        assert decode_blocks(kind, found).isfinite().all()


@needs_native
def test_a_row_s_bytes_are_its_own() -> None:
    """Alone and beside others, on one thread and on several, whatever lies between rows."""
    x, importance = normal(70, 768), torch.rand(512) + 0.01
    threads = torch.get_num_threads()
    for kind in ("Q2_K", "Q6_K", "IQ4_XS"):
        wanted = round_blocks(kind, x[:, :512].contiguous(), importance)
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert torch.equal(round_blocks(kind, x[:, :512], importance), wanted)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(round_blocks(kind, x[33:34, :512], importance), wanted[33:34])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_other_code_is_nearer(kind: str) -> None:
    """For the scales that are stored, moving any one code makes no error smaller."""
    layout, x = LAYOUTS[kind], normal(3, 256, 4)
    data = round_blocks(kind, x, None).view(-1, layout.size)
    fields = unpack(layout, data)
    step, offset = reference.steps(fields)
    levels = reference.level_values(layout, x.device)
    values = step[..., None] * levels
    values = values if offset is None else values - offset[..., None]
    apart = (x.view(-1, layout.subs, layout.sub)[..., None] - values[:, :, None]).abs()
    taken = apart.gather(3, fields.codes.view(-1, layout.subs, layout.sub, 1).long())[..., 0]
    assert (taken <= apart.amin(3) * (1 + 1e-5) + 1e-8).all()


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL", "Q4_1"])
def test_the_search_is_near_what_trying_all_finds(kind: str) -> None:
    """Every d (and for Q4_1 every low end of a fine grid) beside the search."""
    layout, x = LAYOUTS[kind], normal(40, 32, 5)
    importance = torch.rand(32, generator=torch.Generator().manual_seed(6)) + 0.1
    found = cost(x, decode_blocks(kind, round_blocks(kind, x, importance)), importance)
    levels = reference.level_values(layout, x.device)
    least = torch.full((40,), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.5, 1.3, 160):
        for low in torch.linspace(0.6, 1.1, 26) if kind == "Q4_1" else (0.0,):
            if kind == "Q4_1":
                offset = -x.amin(1, keepdim=True) * low
                step = (x.amax(1, keepdim=True) * share + offset) / 15
                steps = [step]
            else:
                offset = torch.zeros(40, 1)
                widest = x.abs().amax(1, keepdim=True) / levels.abs().max()
                steps = [widest * share, -widest * share]
            for step in steps:
                value = reference.nearest_levels(layout, (x + offset) / step) * step - offset
                least = torch.minimum(least, cost(x, value, importance))
    # With two ends to choose a group in 40 has its best grid where no candidate is near.
    mean, most = (1.03, 1.4) if kind == "Q4_1" else (1.01, 1.08)
    assert float((found / least).mean()) < mean
    assert float((found / least).max()) < most


@pytest.mark.parametrize("kind", LAYOUTS)
def test_weighted_columns_lose_less(kind: str) -> None:
    x, importance = normal(30, 512, 7), torch.ones(512)
    importance[::4] = 100
    plain, weighed = (decode_blocks(kind, round_blocks(kind, x, w)) for w in (None, importance))
    assert cost(x, weighed, importance).sum() < 0.98 * cost(x, plain, importance).sum()
    assert cost(x, plain, torch.ones(512)).sum() < cost(x, weighed, torch.ones(512)).sum()


def test_columns_that_are_never_driven_count_a_little() -> None:
    x, importance = normal(4, 256, 8), torch.ones(256)
    importance[:32] = 0
    found = decode_blocks("Q4_K", round_blocks("Q4_K", x, importance))
    assert (found - x)[:, :32].square().mean() < 0.02 * x.square().mean()


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'Q9_K'; one of Q4_0, "):
        round_blocks("Q9_K", torch.zeros(1, 256), None)
    with pytest.raises(ValueError, match=r"weight is .* \[1, 32\]; .* a multiple of 256\]"):
        round_blocks("Q4_K", torch.zeros(1, 32), None)
    with pytest.raises(ValueError, match=r"importance is shape \[255\]; \[256\] is needed"):
        round_blocks("Q4_K", torch.zeros(1, 256), torch.ones(255))
    with pytest.raises(ValueError, match=r"data is .*; torch.uint8 \[N, a multiple of 144\]"):
        decode_blocks("Q4_K", torch.zeros(1, 145, dtype=torch.uint8))
    for rows in (torch.zeros(0, 256), torch.zeros(3, 0)):
        assert decode_blocks("Q4_K", round_blocks("Q4_K", rows, None)).shape == rows.shape
