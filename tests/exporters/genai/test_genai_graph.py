"""Graphs of ONNX Runtime's own operators compute what transformers computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.errors import CheckpointError, RecipeError
from compress_exporters.exporter import Options
from helpers import tiny_models
from helpers.exporters.genai_graphs import GENAI, built, opened, source, written
from helpers.forward_cases import HEADS, LONGROPE, plain_greedy, rope, text, transformers_model

STEP = "4 of 16 numbers of a head, not a multiple of 16"
HALF = "8 of 16 numbers of a head, not a multiple of 16"
ROTATION = "rotation in attention, packed q/k/v"
PACKED = {"packed q/k/v": "queries and keys have norms, which attention computes on GPUs only"}
MIXED = {"mixture of experts": "a plain graph: every expert computes every token"}
# What -> what stays in single steps.
UNFUSED: dict[str, dict[str, str]] = {
    **{name: {} for name in ("llama", "mistral", "qwen2", "phi3", "gpt2", "gemma2", "opt")},
    **dict.fromkeys(("qwen3", "gemma3_text", "olmo2"), PACKED),
    "mixtral": MIXED,
    "qwen3_moe": {**PACKED, **MIXED},
    "gpt_neox": {ROTATION: STEP},
    "gpt_neox all rotated": {},
    "phi3 half rotated": {ROTATION: HALF},
    "llama with biases": {},
    "llama tied": {},
    "gpt2 tied, scaled by layer": {},
    "mistral with a window": {},
    "gemma3 with a window": PACKED,
    "llama llama3": {},
    "llama dynamic": {ROTATION: "frequencies depend on the length of the text"},
    "smollm3 with windows": {},
    "qwen2 with windows behind the first": {},
    "qwen3 with windows by type": PACKED,
    "ministral": {},
}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def wanted(folder: Path, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return transformers_model(folder)(ids).logits.numpy()


@pytest.mark.parametrize("case", UNFUSED)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = HEADS[case]
    folder = tiny_models.make(family, tmp_path / "model", **{"dtype": "fp32", **options})
    graph, ids = built(folder), text()[None]
    assert graph.unfused == UNFUSED[case]
    layers = len(graph.how.layers)
    assert graph.fused("GroupQueryAttention") == {"GroupQueryAttention": layers}
    runner = opened(folder, tmp_path / "out")
    assert np.abs(runner.whole(ids.numpy()) - wanted(folder, ids)).max() < 1e-5


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {"sliding_window": 5}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("phi3", LONGROPE | {"original_max_position_embeddings": 16}),
    ],
    ids=["llama", "window", "learned positions", "rotated before", "longrope"],
)
def test_chunks_and_texts_padded_on_the_right(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    runner, ids = opened(folder, tmp_path / "out"), text(14)[None].numpy()
    want, past, found, at = runner.whole(ids), None, [], 0
    for size in (7, 1, 6):
        at += size
        logits, past = runner.step(ids[:, at - size : at], np.ones((1, at), np.int64), past)
        found.append(logits)
    assert np.abs(np.concatenate(found, axis=1) - want).max() < 1e-5
    short, mask = 9, np.ones((2, 14), np.int64)
    mask[1, short:] = 0
    both, _ = runner.step(np.concatenate([ids, ids * mask[1]]), mask)
    assert np.abs(both[0] - want[0]).max() < 1e-5
    assert np.abs(both[1, :short] - want[0, :short]).max() < 1e-5


def test_longrope_in_the_kernel_takes_the_rows_of_the_texts_length(tmp_path: Path) -> None:
    factors = [[start + step * i for i in range(8)] for start, step in ((1.0, 0.1), (2.0, 0.5))]
    kind = rope(
        rope_type="longrope",
        short_factor=factors[0],
        long_factor=factors[1],
        original_max_position_embeddings=16,
        factor=8.0,
    )
    folder = tiny_models.make("qwen2", tmp_path / "model", dtype="fp32", **kind)
    runner, ids = opened(folder, tmp_path / "out"), text(14)[None]
    assert "position_ids" in [x.name for x in runner.session.get_inputs()]
    assert built(folder).unfused == {}
    model = transformers_model(folder)
    assert runner.greedy(ids.numpy(), 12) == plain_greedy(model, ids[0].tolist(), 12)[14:]
    long = text(40)[None]
    assert np.abs(runner.whole(long.numpy()) - wanted(folder, long)).max() < 1e-5


def test_positions_are_an_input_where_something_asks_for_them(tmp_path: Path) -> None:
    for family, asks in (("llama", False), ("gpt2", True), ("gpt_neox", True)):
        folder = tiny_models.make(family, tmp_path / family, dtype="fp32")
        names = [value.name for value in built(folder).graph.inputs]
        assert ("position_ids" in names) is asks


def test_additions_are_in_the_norms_and_q_k_v_is_one_product(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    assert written(folder, tmp_path / "out").fused == {
        "GroupQueryAttention": 2,
        "SkipSimplifiedLayerNormalization": 4,
        "SimplifiedLayerNormalization": 1,
    }
    kinds = built(folder).fused("MatMul", "Add")
    assert kinds == {"MatMul": 2 * 5 + 1}


def test_fp16_is_as_near_as_fp16_allows(tmp_path: Path) -> None:
    for family in ("llama", "olmo2"):
        folder = tiny_models.make(family, tmp_path / family, dtype="fp32")
        out, ids = tmp_path / f"{family}.onnx", text()[None]
        runner = opened(folder, out, Options("fp16"))
        assert 0 < np.abs(runner.whole(ids.numpy()) - wanted(folder, ids)).max() < 2e-2
    late = built(tmp_path / "olmo2", Options("fp16")).unfused
    assert late[ROTATION] == "in fp32, and the rest is fp16"


def test_a_vocabulary_as_large_as_the_middle_of_an_mlp(tmp_path: Path) -> None:
    folder = tiny_models.make(
        "llama", tmp_path / "model", dtype="fp32", intermediate_size=tiny_models.VOCAB
    )
    ids = text()[None]
    got = opened(folder, tmp_path / "out").whole(ids.numpy())
    assert np.abs(got - wanted(folder, ids)).max() < 1e-5


def test_texts_beyond_the_tables_are_an_error_of_the_runtime(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    runner = opened(folder, tmp_path / "out", Options(max_context=17))
    runner.whole(text(17)[None].numpy())
    with pytest.raises(CheckpointError, match=r"does not run the graph: .*cos_cache"):
        runner.whole(text(18)[None].numpy())


def test_heads_that_attention_does_not_take_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", head_dim=12)
    with pytest.raises(
        RecipeError, match=r"^heads have 12 numbers, and .* multiples of 8; export to onnx$"
    ):
        GENAI.plan(source(folder), Options())


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 64}))
    with pytest.raises(RecipeError, match=r"^kv_lora_rank is 64: latent attention \(MLA\) has no"):
        GENAI.plan(source(folder), Options())


@pytest.mark.parametrize("family", tiny_models.UNLISTED)
def test_families_without_a_forward_are_refused(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"model type '{family}' is in no table of forwards"):
        GENAI.plan(source(folder), Options())
