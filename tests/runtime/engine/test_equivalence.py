"""A real decoder in the engine: results are those of one request at a time, bits and all.

Whatever arrives when, however prompts are cut, blocks sized, prefixes found, sequences preempted,
outputs forked; greedy and sampled, with log-probabilities and without. Mostly in fp32, where
nothing is rounded away, and in 16 bit, where logits are often equal.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from compress.formats.kv_cache import FP8_CACHE
from compress.quant.scheme import PRESETS, QuantScheme
from compress.runtime.decoder.kv import KVCache
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.pairs import PairWeight
from compress.runtime.sequences.blocks import BlockPool
from compress.runtime.sequences.request import Request
from compress_kernels.panels import Math
from helpers import compressed_models, tiny_models
from helpers.engine.decoder_schedules import LONGEST, play, pool_of
from helpers.engine.flat_runs import load
from helpers.engine.one_by_one import OneByOne
from helpers.exporters import gguf_files, gguf_readings

PART = 250
G4 = QuantScheme(bits=4, group_size=32)
G8 = QuantScheme(bits=4, group_size=8)  # in no panels: decoded once
ASYM8 = PRESETS["W8A16_ASYM"]
Played = tuple[OneByOne, list[Request]]


@pytest.fixture(scope="module")
def stories(shared_dir: Path) -> Played:
    decoder = load(shared_dir / "models" / "stories260K")
    return OneByOne(decoder, LONGEST), pool_of(decoder.spec.vocab)


@pytest.fixture(scope="module")
def shallow(stories: Played) -> Played:
    """Two of its five layers: the second sees what the first made of its neighbours, and a step
    costs half."""
    oracle, pool = stories
    decoder = replace(oracle.decoder, layers=oracle.decoder.layers[:2])
    return OneByOne(decoder, LONGEST), pool


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    @cache
    def made(family: str) -> Played:
        windows = {"sliding_window": 12} if family.startswith("gemma") else {}
        folder = tmp_path_factory.mktemp(family)
        decoder = load(tiny_models.make(family, folder, dtype="fp32", **windows))
        return OneByOne(decoder, LONGEST), pool_of(tiny_models.VOCAB)

    return made


def run(played: Played, seeds: range) -> None:
    for seed in seeds:
        try:
            play(*played, seed)
        except Exception as error:  # any failure, with the seed that gives it again
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 20))]
)
def test_five_hundred_lives_as_one_request_at_a_time(shallow: Played, part: int) -> None:
    run(shallow, range(part * PART // 10, (part + 1) * PART // 10))


@pytest.mark.parametrize(
    ("family", "seeds"), [("gemma3_text", 4), ("qwen3_moe", 4), ("gpt2", 4), ("deepseek_v3", 2)]
)
def test_what_layers_differ_in(tiny: Callable[[str], Played], family: str, seeds: int) -> None:
    """Windows, experts, learned positions, latents."""
    run(tiny(family), range(seeds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each token has the logit of three others: the first of them is chosen, and reported first,
    however many the neighbours ask for."""
    decoder = load(tiny_models.make("llama", tmp_path, dtype="fp32"), dtype)
    assert isinstance(decoder.head.weight, FloatWeight | PairWeight)
    alike = decoder.head.weight.rows(torch.arange(tiny_models.VOCAB) // 4 * 4)
    decoder = replace(decoder, head=replace(decoder.head, weight=FloatWeight(alike)))
    oracle, pool = OneByOne(decoder, LONGEST), pool_of(tiny_models.VOCAB)
    run((oracle, pool), range(4))
    outputs = [oracle.generation(request, 0) for request in pool if request.sampling]
    reports = [report for output in outputs for report in output.result.logprobs]
    assert len(reports) > 20
    for report in reports:
        assert report.greedy == (report.token == report.top[0][0])
        assert all(token % 4 == at % 4 for at, (token, _) in enumerate(report.top))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)]
)
def test_in_16_bits(shared_dir: Path, dtype: torch.dtype) -> None:
    decoder = load(shared_dir / "models" / "stories260K", dtype)
    run((OneByOne(decoder, LONGEST), pool_of(decoder.spec.vocab)), range(2))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_codes_and_latents_in_bf16(tmp_path: Path, family: str) -> None:
    """Weights in panels, and ones that are brought into their order for a product."""
    folder = tiny_models.make(family, tmp_path / "source", dtype="bf16")
    if family == "llama":
        compressed_models.write(folder, tmp_path / "out", G4)
        folder = tmp_path / "out"
    decoder = load(folder, torch.bfloat16)
    run((OneByOne(decoder, LONGEST), pool_of(tiny_models.VOCAB)), range(1))


@pytest.mark.parametrize(
    ("scheme", "math"),
    [
        (G4, "exact"),
        (G4, "int16"),
        (G4, "int8"),
        (G8, "exact"),
        (ASYM8, "exact"),
        (ASYM8, "int16"),
        (PRESETS["W8A8"], "int16"),
    ],
    ids=lambda x: x.describe() if isinstance(x, QuantScheme) else x,
)
def test_compressed(tmp_path: Path, scheme: QuantScheme, math: Math) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", scheme)
    decoder = load(tmp_path / "out", math=math)
    run((OneByOne(decoder, LONGEST), pool_of(tiny_models.VOCAB)), range(2))


def test_blocks_of_gguf(tmp_path: Path) -> None:
    """Of two types, with an embedding that stays in blocks."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    source = gguf_files.tiny(tmp_path / "model", **wide)
    found = gguf_readings.opened(source, tmp_path, dtype=None, type="Q4_K_M")
    decoder = load(found.checkpoint.path, math="int16")
    run((OneByOne(decoder, LONGEST), pool_of(tiny_models.VOCAB)), range(2))


def test_keys_and_values_of_8_bits(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", G4, kv_cache=FP8_CACHE)
    run((OneByOne(load(tmp_path / "out"), LONGEST), pool_of(tiny_models.VOCAB)), range(2))


@pytest.mark.long
@pytest.mark.parametrize("part", range(80))
def test_twenty_thousand_lives(stories: Played, part: int) -> None:
    """With all layers."""
    run(stories, range(part * PART, (part + 1) * PART))


@pytest.mark.long
@pytest.mark.parametrize("family", [*tiny_models.TABLED, *tiny_models.LANDINGS])
def test_all_families(tiny: Callable[[str], Played], family: str) -> None:
    run(tiny(family), range(100, 200))


@pytest.mark.long
def test_lives_reach_what_they_are_for(shallow: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes found and evicted, blocks shared and copied, preemption, all policies."""
    copies: list[int] = []
    evicted: list[bool] = []
    copy, forget = KVCache.copy, BlockPool._forget

    def copied(cache: KVCache, source: int, target: int, group: int) -> None:
        copies.append(target)
        copy(cache, source, target, group)

    def forgotten(pool: BlockPool, block: int) -> None:
        evicted.append(pool.cached[block] is not None)
        forget(pool, block)

    monkeypatch.setattr(KVCache, "copy", copied)
    monkeypatch.setattr(BlockPool, "_forget", forgotten)
    engines = [play(*shallow, seed) for seed in range(40)]
    assert sum(engine.stats.hit for engine in engines) > 400
    assert sum(engine.scheduler.preemptions for engine in engines) > 20
    assert len(copies) > 20
    assert sum(evicted) > 100
    assert {engine.limits.policy for engine in engines} == {"mixed", "separate", "static"}
