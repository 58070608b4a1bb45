"""Layers of different kinds and sizes in one decoder, held to plain torch and to themselves."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.rope import Rope
from compress.arch.layer_cache import HeadShape, LayerCache
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RequestError
from compress.formats import open_weights
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache, cache_bytes
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading import open_engine as open_engine_module
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.products import workload_of
from compress.speed.roofline import operations
from compress.speed.workload import Looks, decode_load
from helpers.engine import hybrids
from helpers.engine.decoder_schedules import LONGEST, play, pool_of
from helpers.engine.flat_runs import Runs, load
from helpers.engine.one_by_one import OneByOne

EACH = pytest.mark.parametrize("what", hybrids.CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def _known():
    with hybrids.known():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {what: hybrids.make(root / str(i), what) for i, what in enumerate(hybrids.CONFIGS)}


def text(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, hybrids.VOCAB, (count,), generator=generator).tolist()


def runs(folder: Path, stored: torch.dtype, block_size: int, texts: int = 1) -> Runs:
    found = Runs(load(folder), texts=texts, most=64, block_size=block_size)
    blocks = [group.blocks for group in found.cache.groups]
    how, device = found.decoder.how, found.decoder.device
    found.cache = KVCache(how, blocks, block_size, dtype=stored, device=device)
    return found


@EACH
def test_logits_are_those_of_plain_torch(what: str, folders: dict[str, Path]) -> None:
    ids = text(40)
    want = hybrids.logits(folders[what], ids)
    got = runs(folders[what], torch.float32, 64).whole(ids)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@EACH
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_chunks_neighbours_and_blocks_leave_no_trace(
    what: str, stored: torch.dtype, folders: dict[str, Path]
) -> None:
    ids, other = text(37), text(20)
    whole = runs(folders[what], stored, 64).whole(ids)
    want = hybrids.logits(folders[what], ids)
    # Of most rows: what is rounded can send a token to another expert.
    assert ((whole - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.02
    beside = runs(folders[what], stored, 4, texts=2)
    found = []
    for at in range(0, 37, 5):
        found.append(beside.step([(1, other, 0, 20), (0, ids[at : at + 5], at, 37)])[1])
    assert torch.equal(torch.cat(found), whole)


@EACH
def test_lives_as_one_request_at_a_time(what: str, folders: dict[str, Path]) -> None:
    """Paged, preempted, forked, with prefixes that are shared."""
    played = OneByOne(load(folders[what]), LONGEST), pool_of(hybrids.VOCAB)
    for seed in range(3):
        play(*played, seed)


@EACH
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.int8], ids=str)
def test_bytes_are_those_of_the_tensors(
    what: str, stored: torch.dtype, folders: dict[str, Path]
) -> None:
    """Of each layer by itself, and of all."""
    cache = runs(folders[what], stored, 4).cache
    spec, total = open_weights(Checkpoint.open(folders[what])).spec, 0
    positions = cache.states[0][0].shape[0] * cache.block_size
    for block, states, scales in zip(spec.blocks, cache.states, cache.scales, strict=True):
        allocated = sum(x.nbytes for x in (*states, *scales) if x is not None)
        kept = block.sizes.cache().nbytes(stored.itemsize, 2 if stored == torch.int8 else 0)
        assert allocated == kept * positions
        assert [x.shape[1::2] for x in states] == [tuple(x) for x in block.sizes.cache().parts]
        total += kept
    assert cache.bytes_per_token == total
    if stored != torch.int8:
        assert spec.kv_bytes_per_token(stored.itemsize) == total


def test_layers_have_the_bytes_of_their_own_heads(folders: dict[str, Path]) -> None:
    spec = open_weights(Checkpoint.open(folders["two kinds"])).spec
    assert spec.kv_bytes_per_token(4) == 4 * 2 * (2 * 4 * 16 + 2 * 2 * 24)
    assert spec.kv_bytes_per_token(4, quantized={1}) == spec.kv_bytes_per_token(4) - 3 * 2 * 2 * 24
    spec = open_weights(Checkpoint.open(folders["narrow values"])).spec
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 2 * (24 + 8)


@EACH
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_an_engine_opens_it(
    what: str, kv_dtype: torch.dtype | None, folders: dict[str, Path]
) -> None:
    """And writes what plain torch chooses, from a cache that holds one text at a time."""
    opening = Opening(cache_tokens=48, block_size=4, kv_dtype=kv_dtype)
    engine, _ = open_engine(open_weights(Checkpoint.open(folders[what])), opening)
    prompts = [tuple(text(count)) for count in (9, 17, 17)]
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    results = engine.generate(requests)
    assert results[1].tokens == results[2].tokens
    if kv_dtype is None:
        for prompt, result in zip(prompts, results, strict=True):
            whole = hybrids.logits(folders[what], [*prompt, *result.tokens])
            assert tuple(whole.argmax(-1)[len(prompt) - 1 : -1].tolist()) == result.tokens


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A kind of layer that keeps one latent of a token, and that nothing computes yet."""

    width: int
    window: int | None = None
    rope: Rope | None = None
    products: int = 0

    def cache(self) -> LayerCache:
        return LayerCache((HeadShape(1, self.width),))


@pytest.fixture
def mixed(folders: dict[str, Path]) -> ForwardSpec:
    """Its third layer is of a kind that is not built."""
    how = load(folders["two kinds"]).how
    return replace(how, rows=(*how.rows, Unbuilt(40)), kinds=(0, 1, 2, 1))


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_the_cache_holds_what_other_kinds_keep(mixed: ForwardSpec, stored: torch.dtype) -> None:
    cache = KVCache(mixed, [4, 6], 2, dtype=stored, device=torch.device("cpu"))
    (states,), (scales,) = cache.states[2], cache.scales[2]
    assert (states.shape, scales is None) == ((4, 1, 2, 40), stored != torch.int8)
    cache.write(2, [torch.ones(1, 1, 40)], torch.tensor([3]))
    cache.copy(1, 3, 0)
    assert states[3, 0, 1].all()
    assert torch.equal(states[3], states[1])
    layers = list(mixed.layers)
    assert cache.bytes_per_token == sum(cache_bytes([x.cache()], stored) for x in layers)
    assert cache_bytes([layers[2].cache()], stored) == (42 if stored == torch.int8 else 160)


def test_a_kind_that_is_not_built_is_refused_with_its_layer(
    mixed: ForwardSpec, folders: dict[str, Path]
) -> None:
    weights = open_weights(Checkpoint.open(folders["two kinds"]))
    loader = Loader(weights, mixed, Arithmetic.here(torch.float32, "cpu"))
    with pytest.raises(CheckpointError, match=r"^layer 2 is of the kind Unbuilt; layers of the ki"):
        Decoder.of(loader)


def test_memory_is_compared_with_what_each_layer_needs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window keeps less than a text, and a layer what its own heads have."""
    weights = open_weights(Checkpoint.open(folders["two kinds"]))
    limits = Limits(tokens_per_step=16, sequences=1)
    # 63 blocks and the null block; 3 for a window and a step, and the null block.
    needed = 2 * 1024 * 4 * 2 * 4 * 16 + 2 * (16 * 4) * 4 * 2 * 2 * 24
    opening = Opening(cache_tokens=1000, limits=limits)
    free = needed
    monkeypatch.setattr(open_engine_module, "free_bytes", lambda device: free)
    engine, _ = open_engine(weights, opening)
    stored = (x for parts in engine.runner.cache.states for x in parts)
    assert sum(x.nbytes for x in stored) == needed
    free = needed - 1
    with pytest.raises(RequestError, match=r"keys and values of 1000 tokens take 0\.0 GiB of mem"):
        open_engine(weights, opening)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_predictions_count_each_kind_by_itself(
    stored: torch.dtype, folders: dict[str, Path]
) -> None:
    weights = open_weights(Checkpoint.open(folders["two kinds"]))
    work = workload_of(weights, dtype=torch.float32, kv_dtype=stored)
    cache = runs(folders["two kinds"], stored, 4).cache
    assert work.kv_bytes_per_token == cache.bytes_per_token
    full, sliding = work.attention
    assert (full.windows, sliding.windows) == ((None, None), (6, 6))
    assert (full.products, sliding.products) == (8 * 32, 4 * 48)
    assert work.kv_bytes(20) == 2 * 20 * full.state_bytes + 2 * 6 * sliding.state_bytes
    load = decode_load(work, 1, 20)
    assert operations(work, load) - operations(work, replace(load, looks=(Looks(), Looks()))) == (
        2 * (2 * 20 * 8 * 32 + 2 * 6 * 4 * 48)
    )


def test_predictions_count_the_experts_of_each_layer(folders: dict[str, Path]) -> None:
    weights = open_weights(Checkpoint.open(folders["wide values and narrow ones, experts"]))
    work = workload_of(weights, dtype=torch.float32)
    experts = {p.experts: p.count for p in work.products if p.part == "expert" and p.shape[1] == 64}
    assert experts == {4: 4, 8: 8}
