"""Latent attention in the engine: what its cache holds, and what texts get of it."""

from math import prod
from pathlib import Path

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.inspect.inspect import inspect_checkpoint
from compress.quant.scheme import QuantScheme
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import facts_of
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.table import chosen_form
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.request import Request, Sampling
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs, load

RANK, ROTATED, LAYERS = 32, 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("deepseek_v3", tmp_path_factory.mktemp("latent"), dtype="fp32")


def text(count: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, tiny_models.VOCAB, (count,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_one_tensor_a_layer_whose_first_numbers_are_the_values(
    folder: Path, dtype: torch.dtype
) -> None:
    cache = KVCache(load(folder).how, [5], 4, dtype=dtype, device=torch.device("cpu"))
    for layer, parts in enumerate(cache.states):
        (states,) = parts
        assert states.shape == (5, 1, 4, RANK + ROTATED)
        stored = cache.keys_and_values(layer)
        assert stored.keys is states
        assert stored.values.shape[3] == RANK
        assert stored.shared
        assert stored.value_scales is stored.key_scales
    scale = 2 if dtype == torch.int8 else 0
    assert cache.bytes_per_token == LAYERS * ((RANK + ROTATED) * dtype.itemsize + scale)
    held = [x for parts in (*cache.states, *cache.scales) for x in parts if x is not None]
    assert sum(x.nbytes for x in held) == cache.bytes_per_token * 5 * 4


def test_what_is_told_of_a_token_is_what_the_allocator_takes(folder: Path) -> None:
    weights = open_weights(Checkpoint.open(folder))
    assert inspect_checkpoint(folder)["kv_bytes_per_token"] == LAYERS * (RANK + ROTATED) * 4
    engine, _ = open_engine(weights, Opening(dtype=torch.bfloat16, cache_tokens=64))
    assert engine.runner.cache.bytes_per_token == LAYERS * (RANK + ROTATED) * 2


@pytest.mark.parametrize(
    "kv_dtype", [pytest.param(None, marks=pytest.mark.long), torch.int8], ids=str
)
def test_texts_that_begin_alike_and_texts_that_wait(
    folder: Path, kv_dtype: torch.dtype | None
) -> None:
    """Prefixes are found, blocks run out: what is written stays what each text gets alone."""
    weights = open_weights(Checkpoint.open(folder))
    shared = text(17)
    prompts = [(*shared, *text(n, seed=n)) for n in (3, 5, 9)] + [tuple(shared)]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    small, _ = open_engine(weights, Opening(cache_tokens=60, block_size=4, kv_dtype=kv_dtype))
    small.generate(requests[:1])
    together = small.generate(requests)
    assert small.stats.hit > 0
    assert small.scheduler.preemptions > 0
    one, _ = open_engine(weights, Opening(cache_tokens=80, reuse=False, kv_dtype=kv_dtype))
    for request, found in zip(requests, together, strict=True):
        (alone,) = one.generate([request])
        assert found.tokens == alone.tokens


def test_eight_bits_are_near_and_no_number_stands_out(folder: Path) -> None:
    """A latent's numbers are turned apart from those of the rotated key, as values are latents."""
    ids, found = text(40), {}
    for dtype in (torch.float32, torch.int8):
        runs = Runs(load(folder), texts=1, most=64)
        runs.cache = KVCache(runs.decoder.how, [17], 4, dtype=dtype, device=torch.device("cpu"))
        found[dtype] = runs.whole(ids)
    error = (found[torch.int8] - found[torch.float32]).norm() / found[torch.float32].norm()
    assert 0 < error < 0.02


def test_codes_that_are_cut_by_heads_are_decoded_and_named(folder: Path, tmp_path: Path) -> None:
    scheme = QuantScheme(bits=4, group_size=32)
    compressed_models.write(folder, tmp_path, scheme)
    weights = open_weights(Checkpoint.open(tmp_path))
    notices = open_engine(weights, Opening(cache_tokens=64))[1]
    line = f"2 linears ({scheme.describe()}): dense weights; not packed codes (it is cut by heads)"
    assert [x for x in notices if "linears" in x] == [line]
    how = Arithmetic.here(torch.float32, "cpu")
    facts = facts_of(weights, next(x for x in weights.spec.linears() if x.role == "kv_b"))
    assert chosen_form(facts, how).form.nbytes(facts, how) == prod(facts.shape) * 4
