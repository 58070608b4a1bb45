"""The plain ONNX graph computes what transformers computes, whatever the family."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from compress.errors import CheckpointError
from compress_exporters.exporter import Options
from compress_exporters.onnx.saving import DATA, MODEL
from helpers import tiny_models
from helpers.exporters.onnx_graphs import built, opened
from helpers.forward_cases import HEADS, LONGROPE, plain_greedy, rope, text, transformers_model


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def wanted(model: Any, ids: torch.Tensor, **more: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(ids, **more).logits.numpy()


@pytest.mark.parametrize("case", HEADS)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = HEADS[case]
    folder = tiny_models.make(family, tmp_path / "model", **{"dtype": "fp32", **options})
    runner, ids = opened(folder, tmp_path / "out"), text()[None]
    onnx.checker.check_model(tmp_path / "out" / MODEL, full_check=True)
    want = wanted(transformers_model(folder), ids)
    assert np.abs(runner.whole(ids.numpy()) - want).max() < 1e-5
    assert runner.session.get_outputs()[0].shape[-1] == tiny_models.VOCAB


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_chunks_and_single_tokens_equal_one_forward(family: str, tmp_path: Path) -> None:
    options = {"sliding_window": 5} if family == "gemma2" else {}
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    runner, ids = opened(folder, tmp_path / "out"), text(30)[None].numpy()
    want, past, found, at = runner.whole(ids), None, [], 0
    for size in (7, 1, 12, 1, 1, 8):
        part = ids[:, at : at + size]
        logits, past = runner.step(part, np.ones((1, at + size), np.int64), past)
        found.append(logits)
        at += size
    assert np.abs(np.concatenate(found, axis=1) - want).max() < 1e-5
    assert past is not None
    assert all(x.shape[2] == 30 for x in past.values())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("opt", {}),
        ("phi3", LONGROPE | {"original_max_position_embeddings": 16}),
    ],
    ids=["llama", "window", "learned positions", "longrope"],
)
def test_padding_on_either_side_changes_nothing(
    family: str, options: dict[str, Any], side: str, tmp_path: Path
) -> None:
    """Texts of 20 and of 11 tokens in one batch, then four tokens more of each."""
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    runner = opened(folder, tmp_path / "out")
    texts = [text(24).numpy(), text(40).numpy()[25:]]
    ids, mask = np.zeros((2, 20), np.int64), np.zeros((2, 20), np.int64)
    for row, (whole, count) in enumerate(zip(texts, (20, 11), strict=True)):
        place = slice(20 - count, 20) if side == "left" else slice(0, count)
        ids[row, place], mask[row, place] = whole[:count], 1
    logits, past = runner.step(ids, mask)
    found = [[logits[row][mask[row] == 1]] for row in range(2)]
    for i in range(4):
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
        new = np.array([[texts[0][20 + i]], [texts[1][11 + i]]])
        logits, past = runner.step(new, mask, past)
        for row in range(2):
            found[row].append(logits[row])
    for row, count in enumerate((20, 11)):
        alone, past = runner.step(texts[row][None, :count], np.ones((1, count), np.int64))
        want = [alone[0]]
        for i in range(4):
            mask = np.ones((1, count + i + 1), np.int64)
            logits, past = runner.step(texts[row][None, count + i : count + i + 1], mask, past)
            want.append(logits[0])
        assert np.abs(np.concatenate(found[row]) - np.concatenate(want)).max() < 1e-5


@pytest.mark.parametrize(
    ("family", "kind", "context"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 3.0}, 16),
        (
            "qwen2",
            {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 16,
                "factor": 8.0,
            },
            128,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_tokens_beyond_the_length_that_changes_the_frequencies(
    family: str, kind: dict[str, Any], context: int, tmp_path: Path
) -> None:
    options = {**rope(**kind), "max_position_embeddings": context}
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    runner, ids = opened(folder, tmp_path / "out"), text(14)[None]
    model = transformers_model(folder)
    assert runner.greedy(ids.numpy(), 20) == plain_greedy(model, ids[0].tolist(), 20)[14:]
    long = text(40)[None]
    assert np.abs(runner.whole(long.numpy()) - wanted(model, long)).max() < 1e-5


def test_fp16_is_as_near_as_fp16_allows(tmp_path: Path) -> None:
    for family in ("llama", "gemma2", "olmo2", "qwen3_moe"):
        folder = tiny_models.make(family, tmp_path / family, dtype="fp32")
        out = tmp_path / f"{family}.onnx"
        runner, ids = opened(folder, out, Options(dtype="fp16")), text()[None]
        onnx.checker.check_model(out / MODEL, full_check=True)
        error = np.abs(runner.whole(ids.numpy()) - wanted(transformers_model(folder), ids)).max()
        assert 0 < error < 2e-2
        names = {x.name: x.type for x in runner.session.get_inputs()}
        assert names["past_key_values.0.key"] == "tensor(float16)"


def test_numbers_that_fp16_lacks_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight' has a number of size 1e\+06, and"):
        opened(folder, tmp_path / "out", Options(dtype="fp16"))


def test_a_tied_head_shares_the_one_initializer(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32", tied=True)
    build = built(folder)
    shapes = [tuple(x.shape or ()) for x in build.graph.initializers.values()]
    assert shapes.count((tiny_models.VOCAB, 64)) == 1
    assert (64, tiny_models.VOCAB) not in shapes
    opened(folder, tmp_path / "out")
    parameters = sum(x.numel() for x in transformers_model(folder).parameters())
    tables = 2 * 128 * 8  # cosine and sine of every position
    assert (tmp_path / "out" / DATA).stat().st_size <= 4 * (parameters + tables)


def test_a_vocabulary_as_large_as_the_middle_of_an_mlp(tmp_path: Path) -> None:
    folder = tiny_models.make(
        "llama", tmp_path / "model", dtype="fp32", intermediate_size=tiny_models.VOCAB
    )
    ids = text()[None]
    got = opened(folder, tmp_path / "out").whole(ids.numpy())
    assert np.abs(got - wanted(transformers_model(folder), ids)).max() < 1e-5


def test_tables_of_positions_are_as_long_as_asked(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    build = built(folder, Options(max_context=17))
    assert tuple(build.graph.initializers["rotary.0.cos"].shape or ()) == (17, 8)


def test_a_context_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no max_position_embeddings.*give --max-context$"):
        built(folder)


@pytest.mark.parametrize("family", tiny_models.UNLISTED)
def test_families_without_a_forward_are_refused(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"model type '{family}' is in no table of forwards"):
        built(folder)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight' in .* has 1 NaN"):
        opened(folder, tmp_path / "out")
