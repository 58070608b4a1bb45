"""Before/after samples equal transformers' greedy generation."""

from pathlib import Path

import pytest
import torch

from compress.checkpoint.reader import Checkpoint
from compress.evaluation.samples import NO_PROMPTS, SamplePair, sample_pairs
from compress.evaluation.workspace import Workspace
from compress.formats import Weights, open_weights
from compress.machine import memory
from compress.recipe.evaluation_config import SampleConfig
from compress.text.tokenizer import load_tokenizer
from helpers.tiny_models import make

HERE = Workspace(Path())
PROMPTS = ("once upon a time", "the old cat", "once upon a dog")


def weights(path: Path) -> Weights:
    return open_weights(Checkpoint.open(path))


def greedy(path: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    start = len(ids)
    for _ in range(tokens):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_id:
            ids.pop()
            break
    return tokenizer.decode(ids[start:], skip_special=True)


def test_pairs_equal_greedy_generation(tmp_path: Path) -> None:
    source, result = make("llama", tmp_path / "a"), make("llama", tmp_path / "b", seed=1)
    config = SampleConfig(PROMPTS, tokens=12)
    pairs, reason = sample_pairs(
        weights(result), weights(source), load_tokenizer(source), config, HERE
    )
    assert reason is None
    assert [pair.prompt for pair in pairs] == list(PROMPTS)
    for pair in pairs:
        assert pair.source == greedy(source, pair.prompt, 12)
        assert pair.result == greedy(result, pair.prompt, 12)


def test_without_source_or_prompts(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "a")
    tokenizer = load_tokenizer(path)
    assert sample_pairs(weights(path), None, tokenizer, SampleConfig(), HERE) == ((), NO_PROMPTS)
    (pair,), reason = sample_pairs(weights(path), None, tokenizer, SampleConfig(("the",), 2), HERE)
    assert isinstance(pair, SamplePair)
    assert (pair.source, reason) == (None, None)


def test_a_prompt_beyond_the_context_is_named(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "a")
    config = SampleConfig(("the " * 200, "the"), 2)
    pairs, reason = sample_pairs(weights(path), None, load_tokenizer(path), config, HERE)
    assert [pair.prompt for pair in pairs] == ["the"]
    assert reason is not None
    assert "tokens, the model's context is 128" in reason


def test_a_model_that_does_not_fit_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("llama", tmp_path / "a")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    config = SampleConfig(("the",))
    pairs, reason = sample_pairs(weights(path), None, load_tokenizer(path), config, HERE)
    assert pairs == ()
    assert reason is not None
    assert reason.startswith("sampling from the model needs ")
    assert "self" not in reason
