"""Sums of runs that threads compute apart lie in memory that nobody has written before."""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from compress_kernels.cpu import attention as compiled
from compress_kernels.cpu.library import native
from compress_kernels.paged import StoredStates, TokenPlaces

LIBC = ctypes.CDLL(None)
M_PERTURB = -6  # of glibc's malloc.h
LENGTH, BLOCK, HEADS, KV_HEADS, WIDTH = 1100, 16, 4, 2, 24
# Positions at the edges of runs of 256, and of blocks of 5, 24, 64 and 300.
EDGES = [0, 4, 5, 23, 24, 63, 64, 254, 255, 256, 257, 299, 300, 510, 511, 512, 513, 767, 768, 1099]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What malloc gives out is full of 0x7f, 3.4e38 as fp32, and what it gets back of 0x80."""
    if not hasattr(LIBC, "mallopt"):
        pytest.skip("this C library does not fill what it gives out")
    LIBC.mallopt(M_PERTURB, 0x80)
    try:
        LIBC.malloc.restype = ctypes.c_void_p
        size = 1 << 16
        given = LIBC.malloc(size)
        assert ctypes.string_at(given, size) == b"\x7f" * size
        LIBC.free(ctypes.c_void_p(given))
        yield
    finally:
        LIBC.mallopt(M_PERTURB, 0)


def attend(rows: Tensor, threads: int, window: int | None, block: int = BLOCK) -> Tensor:
    """Of some positions of one text, in blocks of so many."""
    random = torch.Generator().manual_seed(0)
    blocks = -(-LENGTH // block)
    whole = (torch.randn(KV_HEADS, LENGTH, WIDTH, generator=random) for _ in range(2))
    keys, values = (
        pad(x, (0, 0, 0, blocks * block - LENGTH)).unflatten(1, (blocks, block)).transpose(0, 1)
        for x in whole
    )
    q = torch.randn(LENGTH, HEADS, WIDTH, generator=random)[rows]
    table = torch.arange(blocks, dtype=torch.int32)[None]
    places = TokenPlaces(table, torch.zeros(len(rows), dtype=torch.int32), rows)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return compiled.paged_attention(
            q,
            StoredStates(keys.contiguous(), values.contiguous()),
            places,
            scale=0.2,
            window=window,
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "rows",
    [[1099], [255, 256, 257], [3, 511, 1099], [0, 700]],
    ids=["one", "around a run", "far apart", "the first"],
)
def test_nothing_is_read_that_was_not_written(rows: list[int], window: int | None) -> None:
    """Tokens of one tile do not see the same runs; one thread takes all runs in their order."""
    alone = attend(torch.tensor(rows), 1, window)
    assert alone.isfinite().all()
    for threads in (2, 4):
        assert torch.equal(attend(torch.tensor(rows), threads, window), alone)


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("block", [1, 5, 24, 64, 300])
def test_runs_may_begin_inside_of_a_block(block: int, window: int | None) -> None:
    """Runs are of 256 positions, whatever blocks are; a token alone and beside others."""
    edges = torch.tensor(EDGES)
    want = attend(edges, 1, window)
    for threads in (1, 3):
        assert torch.equal(attend(edges, threads, window, block), want)
        for i in range(threads, len(EDGES), 5):
            assert torch.equal(attend(edges[i : i + 1], threads, window, block)[0], want[i])
