"""Sampling depends on seed, sequence and position, and on nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from compress.blocks import sample
from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.errors import DataError
from compress.formats import Weights, open_weights
from compress.machine import memory
from helpers import tiny_models, unlisted_models

Opened = tuple[Weights, Skeleton]


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3_moe", "mamba"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    folder = tmp_path_factory.mktemp("model")
    if request.param in unlisted_models.SETTINGS:  # whose cache goes by another name
        unlisted_models.make(request.param, folder, max_position_embeddings=128)
    else:
        tiny_models.make(request.param, folder, dtype="fp32", tied=request.param == "gpt2")
    checkpoint = Checkpoint.open(folder)
    weights = open_weights(checkpoint)
    return weights, Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)


def test_whole_model_gives_the_logits_of_transformers(opened: Opened) -> None:
    from transformers import AutoModelForCausalLM

    weights, skeleton = opened
    ids = torch.arange(20).reshape(2, 10) + 1
    theirs = AutoModelForCausalLM.from_pretrained(weights.checkpoint.path, dtype=torch.float32)
    with torch.no_grad():
        got = sample.whole_model(weights, skeleton)(input_ids=ids).logits
        want = theirs.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_batch_size_and_count_change_nothing(opened: Opened) -> None:
    weights, skeleton = opened
    one = sample.generate(weights, skeleton, sample.OwnText(count=5, length=12, seed=3), batch=5)
    two = sample.generate(weights, skeleton, sample.OwnText(count=3, length=12, seed=3), batch=2)
    other = sample.generate(weights, skeleton, sample.OwnText(count=5, length=12, seed=4))
    assert one.shape == (5, 12)
    assert one.dtype == torch.int64
    assert torch.equal(one[:3], two)
    assert not torch.equal(one, other)
    assert len({tuple(row) for row in one.tolist()}) == 5


def test_greedy_with_cache_equals_greedy_without(opened: Opened) -> None:
    weights, skeleton = opened
    prompt = torch.tensor([5, 6, 7])
    got = sample.generate(
        weights,
        skeleton,
        sample.OwnText(count=1, length=10, seed=0, temperature=0, prompt_ids=prompt),
    )
    model = sample.whole_model(weights, skeleton)
    ids = prompt[None]
    with torch.no_grad():
        while ids.shape[1] < 10:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, ids)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -float("inf")]).expand(20000, -1)
    noise = torch.from_numpy(sample.uniforms(1, np.arange(20000), 7))
    tokens = sample.draw(logits, noise, 1.0)
    share = torch.bincount(tokens, minlength=4) / 20000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.015, rtol=0)
    assert set(sample.draw(logits, noise, 0.0).tolist()) == {2}


def test_uniforms_are_uniform_and_keyed() -> None:
    columns = np.stack([sample.uniforms(0, np.arange(500), t) for t in range(40)])
    assert columns.min() >= 0
    assert columns.max() < 1
    assert abs(columns.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(columns[0], columns[1])[0, 1]) < 0.15
    assert np.array_equal(columns[3][10:20], sample.uniforms(0, np.arange(10, 20), 3))


def test_too_little_memory_and_too_long_texts_are_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, skeleton = opened
    with pytest.raises(DataError, match=r"length 4096 is longer than the model's context of 128"):
        sample.generate(weights, skeleton, sample.OwnText(count=1, length=4096, seed=0))
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(DataError, match=r"needs .* of memory, .* are free; use a text"):
        sample.generate(weights, skeleton, sample.OwnText(count=1, length=8, seed=0))


def test_free_memory_is_read_from_the_system() -> None:
    held, room = sample._held_and_room("cpu")
    assert room - held > 1 << 20
    assert Path("/proc/meminfo").exists()
