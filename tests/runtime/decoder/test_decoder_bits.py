"""What a token gets is the same bits whatever else is in its step, and however its text is cut."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.mlp import Mixture
from compress.runtime.forms.dense import FloatWeight
from helpers import tiny_models
from helpers.engine.flat_runs import Runs, load

WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
}
FAMILIES = (*tiny_models.TABLED, "deepseek_v3")
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: tiny_models.make(
            family, tmp_path_factory.mktemp(family), dtype="fp32", **WINDOWED.get(family, {})
        )
        for family in FAMILIES
    }


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, tiny_models.VOCAB, (count,), generator=generator).tolist()


def in_chunks(runs: Runs, number: int, ids: list[int], sizes: Iterator[int]) -> Tensor:
    """Logits of a text whose tokens come in chunks, now and then beside chunks of another."""
    random, found, at = Random(number), [], 0
    while at < len(ids):
        size = next(sizes)
        other = text(random.randint(1, 20), seed=at)
        chunks = [(number, ids[at : at + size], at, len(ids))]
        if random.random() < 0.7:
            chunks.append((runs.texts - 1, other, 0, len(other)))
        random.shuffle(chunks)
        logits = runs.step(chunks)
        found.append(logits[[chunk[0] for chunk in chunks].index(number)])
        at += size
    return torch.cat(found)


def sizes(seed: int) -> Iterator[int]:
    random = Random(seed)
    while True:
        yield random.choice([1, 1, 2, 3, 7, 16, 19])


def check(decoder: Decoder, ids: list[int]) -> None:
    whole = Runs(decoder, texts=1, most=64, block_size=64).whole(ids)
    for seed, block_size in ((1, 1), (2, 3), (3, 16)):
        runs = Runs(decoder, texts=3, most=64, block_size=block_size)
        assert torch.equal(in_chunks(runs, seed % 2, ids, sizes(seed)), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_neighbours_and_block_sizes(folders: dict[str, Path], family: str) -> None:
    check(load(folders[family]), text(37))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_in_16_bit_too(folders: dict[str, Path], family: str) -> None:
    check(load(folders[family], torch.bfloat16), text(30))


def test_frequencies_go_by_the_text_not_by_the_chunk(tmp_path: Path) -> None:
    decoder = load(tiny_models.make("llama", tmp_path, dtype="fp32", **DYNAMIC))
    check(decoder, text(37))
    short, long = text(12), text(37)
    assert [decoder.how.variant(n) for n in (1, 16, 17, 37)] == [0, 0, 17, 37]
    alone = Runs(decoder, texts=1, most=64).whole(short)
    beside = Runs(decoder, texts=2, most=64)
    assert torch.equal(beside.step([(1, long, 0, 37), (0, short, 0, 12)])[1], alone)
    (stretched,) = beside.step([(0, long, 0, 37)])
    (plain,) = beside.step([(0, long[:12], 0, 12)])
    assert not torch.equal(stretched[:12], plain)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows_without_leaving_a_trace(tmp_path: Path, threads: int) -> None:
    """More numbers than a thread takes for itself, in widths that no share of them divides."""
    sizes = {"hidden_size": 192, "intermediate_size": 1000, "num_attention_heads": 6}
    options = {"num_hidden_layers": 1, "hidden_act": "gelu_pytorch_tanh", **sizes}
    folder = tiny_models.make("llama", tmp_path, dtype="fp32", **options)
    decoder, ids = load(folder), text(100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = Runs(decoder, texts=1, most=128).whole(ids)
        runs = Runs(decoder, texts=1, most=128)
        parts = [runs.step([(0, ids[at : at + 9], at, 100)])[0] for at in range(0, 100, 9)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)


def test_only_the_rows_that_are_asked_go_to_the_head(folders: dict[str, Path]) -> None:
    decoder = load(folders["llama"])
    runs = Runs(decoder, texts=1, most=64)
    whole = runs.whole(text(20))
    batch = runs.batch([(0, text(20), 0, 20)], rows=[19, 3])
    hidden = decoder.forward(batch, runs.cache)
    assert hidden.shape == (max(2, decoder.multiple), 64)
    assert torch.equal(decoder.logits(hidden)[:2], whole[[19, 3]])


def test_of_equal_experts_the_first_are_chosen(tmp_path: Path) -> None:
    """A router that makes no difference leaves the first two of 24, as if there were no others."""
    folder = tiny_models.make("qwen3_moe", tmp_path, dtype="fp32", num_experts=24)
    decoder = load(folder)
    runs, mixture = Runs(decoder, texts=1, most=16), decoder.layers[0].mlp
    assert isinstance(mixture, Mixture)
    weight = torch.zeros(24, decoder.spec.hidden)
    many = replace(mixture, router=replace(mixture.router, weight=FloatWeight(weight)))
    router = replace(many.router, weight=FloatWeight(weight[:2]))
    few = replace(many, router=router, experts=many.experts[:2])
    batch = runs.batch([(0, text(16), 0, 16)])
    x = torch.randn(len(batch.ids), decoder.spec.hidden, generator=torch.Generator().manual_seed(1))
    assert torch.equal(many(x, batch), few(x, batch))
