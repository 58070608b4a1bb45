"""Stored keys and values: what they take, what int8 costs, and that bits stay a text's own."""

from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from compress.arch.layer_cache import keys_and_values
from compress.runtime.decoder.kv import KVCache, cache_bytes
from helpers import tiny_models
from helpers.engine.flat_runs import Runs, load

EIGHT = torch.int8
STATM = Path("/proc/self/statm")
STORED = (torch.bfloat16, torch.float16, torch.int8)


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(STATM.read_text().split()[1]) * PAGESIZE


def ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, tiny_models.VOCAB, (count,), generator=generator).tolist()


def runs(folder: Path, dtype: torch.dtype, texts: int = 1, block_size: int = 4) -> Runs:
    found = Runs(load(folder), texts=texts, most=64, block_size=block_size)
    found.cache = KVCache(
        found.decoder.how,
        [group.blocks for group in found.cache.groups],
        block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, *STORED], ids=str)
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    cache = runs(tiny_models.make("mixtral", tmp_path), dtype).cache
    total = sum(
        x.nbytes for parts in (*cache.states, *cache.scales) for x in parts if x is not None
    )
    positions = sum(group.blocks for group in cache.groups) * cache.block_size
    assert cache.bytes_per_token * positions == total


@pytest.mark.parametrize("dtype", [torch.float32, EIGHT], ids=str)
def test_memory_is_taken_as_blocks_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    if not STATM.exists():
        pytest.skip(f"{STATM} says how much memory is in use, and it is not here")
    how = load(tiny_models.make("llama", tmp_path)).how
    before = resident()
    token = cache_bytes((layer.cache() for layer in how.layers), dtype)
    blocks = 1 + (256 << 20) // (16 * token)
    cache = KVCache(how, [blocks], 16, dtype=dtype, device=torch.device("cpu"))
    assert sum(x.nbytes for parts in cache.states for x in parts) > 200 << 20
    assert not cache.states[0][0][:: blocks // 7].any()
    assert resident() - before < 32 << 20
    cache.states[1][1].fill_(1)
    assert resident() - before > 32 << 20


def test_int8_halves_sixteen_bit() -> None:
    wide, narrow = [keys_and_values(8, 128, 128)], [keys_and_values(8, 32, 32)]
    assert cache_bytes(wide, torch.float16) == 4096
    assert cache_bytes(wide, EIGHT) == 2080
    assert cache_bytes(narrow, EIGHT) / cache_bytes(narrow, torch.bfloat16) == 34 / 64


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_chunks_neighbours_and_blocks_leave_no_trace(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    options = {"sliding_window": 5} if family == "gemma2" else {}
    folder = tiny_models.make(family, tmp_path, dtype="fp32", **options)
    text, other = ids(37), ids(20)
    whole = runs(folder, dtype, block_size=64).whole(text)
    exact = runs(folder, torch.float32).whole(text)
    assert not torch.equal(whole, exact)
    assert (whole - exact).norm() < 0.02 * exact.norm()
    beside = runs(folder, dtype, texts=2)
    found = []
    for at in range(0, 37, 5):
        part = text[at : at + 5]
        found.append(beside.step([(1, other, 0, 20), (0, part, at, 37)])[1])
    assert torch.equal(torch.cat(found), whole)


def test_a_copied_block_is_copied_with_its_scales(tmp_path: Path) -> None:
    found = runs(tiny_models.make("llama", tmp_path, dtype="fp32"), EIGHT, texts=2)
    found.whole(ids(4))
    source, target = found.tables[0][0], found.tables[1][0]
    found.cache.copy(source, target, 0)
    for parts in (*found.cache.states, *found.cache.scales):
        for states in parts:
            assert states is not None
            assert torch.equal(states[source], states[target])
            assert states[target].any()
