"""Families in no table: transformers' forward in the engine, held to transformers itself."""

import json
import re
from math import prod
from pathlib import Path

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RequestError
from compress.formats import open_weights
from compress.quant.scheme import QuantScheme
from compress.runtime.engine.engine import Engine
from compress.runtime.loading import room
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from helpers import compressed_models, tiny_models, unlisted_models

G4 = QuantScheme(bits=4, group_size=32)


STATEFUL = ("jamba", "mamba2")  # their states stand for all tokens before


@pytest.fixture(scope="module", params=(*tiny_models.UNLISTED, *STATEFUL))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in STATEFUL:
        return unlisted_models.make(request.param, tmp_path_factory.mktemp("model"))
    return tiny_models.make(request.param, tmp_path_factory.mktemp("model"), dtype="fp32")


def opened(folder: Path, limits: Limits | None = None) -> tuple[Engine, tuple[str, ...]]:  # type: ignore[type-arg]
    how = Opening(limits=limits or Limits(tokens_per_step=7, sequences=4), block_size=4)
    return open_engine(open_weights(Checkpoint.open(folder)), how)


def whole_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def test_said_and_served(folder: Path) -> None:
    engine, notices = opened(folder)
    assert notices[0].startswith("transformers computes here, one text at a time: ")
    assert "is in no table of forwards" in notices[0]
    prompts = [tuple(range(3, 3 + n)) for n in (1, 9, 12)]
    requests = [
        *(
            Request(str(i), p, Sampling(max_tokens=8, ignore_eos=True))
            for i, p in enumerate(prompts)
        ),
        Request("score", prompts[1], score_from=9, continuations=((5, 6, 7), (8,))),
        Request("n", prompts[2], Sampling(max_tokens=5, n=3, temperature=1.0, seed=4)),
    ]
    results = engine.generate(requests)
    assert [result.error for result in results] == [None] * len(results)
    for result, prompt in zip(results, prompts, strict=False):
        logits = whole_logits(folder, [*prompt, *result.tokens])[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(8), list(result.tokens)]
        assert torch.allclose(chosen, logits.max(dim=-1).values, atol=1e-4)
    for result, tail in zip(results[3:5], requests[3].continuations, strict=True):
        rows = whole_logits(folder, [*prompts[1], *tail])[8:-1].log_softmax(-1)
        expected = float(rows[torch.arange(len(tail)), list(tail)].sum())
        assert result.score == pytest.approx(expected, abs=1e-4)
    assert len({result.tokens for result in results[5:]}) > 1
    alone, _ = opened(folder, Limits())
    assert [r.tokens for r in alone.generate(requests[4:])] == [r.tokens for r in results[5:]]


def test_preempted_texts_begin_anew(folder: Path) -> None:
    engine, _ = opened(folder)
    request = Request("a", tuple(range(3, 12)), Sampling(max_tokens=8, ignore_eos=True))
    (expected,) = engine.generate([request])
    engine.add(request)
    results = []
    while not engine.idle:
        results += [update.result for update in engine.step() if update.result is not None]
        if engine.stats.steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
    assert results[0].tokens == expected.tokens


def test_compressed_too(folder: Path, tmp_path: Path) -> None:
    compressed_models.write(folder, tmp_path / "out", G4)
    engine, _ = opened(tmp_path / "out")
    request = Request("a", tuple(range(3, 20)), score_from=1)
    (dense,) = opened(folder)[0].generate([request])
    (coded,) = engine.generate([request])
    assert coded.score != dense.score
    assert coded.score == pytest.approx(dense.score, rel=0.2)


def test_codes_are_dense_there_and_count_as_such(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed_models.write(folder, tmp_path / "out", G4)
    spec = open_weights(Checkpoint.open(folder)).spec
    weights = {linear.tensor: prod(linear.shape) for linear in spec.all_linears()}
    needed = 4 * (sum(weights.values()) + prod(spec.embedding_shape))
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with pytest.raises(RequestError, match=r"of memory as torch\.float32"):
        opened(tmp_path / "out")
    monkeypatch.setattr(room, "available_bytes", lambda: needed)
    opened(tmp_path / "out")


def test_how_keys_and_values_are_stored_is_transformers_own(folder: Path) -> None:
    how = Opening(kv_dtype=torch.int8)
    _, notices = open_engine(open_weights(Checkpoint.open(folder)), how)
    assert notices[1] == (
        "keys and values are transformers' own, in torch.float32, whatever was asked"
    )


def test_a_family_that_nobody_knows(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, dtype="fp32")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "nonesuch"}
    (folder / "config.json").write_text(json.dumps(config))
    words = (
        "cannot be run: model type 'nonesuch' is in no table of forwards, and transformers does not"
        " do it either (model_type 'nonesuch' is unknown to this transformers); a newer"
    )
    with pytest.raises(CheckpointError, match=re.escape(words)):
        opened(folder)


def test_a_setting_that_no_table_knows_falls_back(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, dtype="fp32", hidden_act="mish")
    engine, notices = opened(folder)
    assert "hidden_act" in notices[0]
    assert engine.generate([Request("a", (3, 4), Sampling(max_tokens=2))])[0].error is None
