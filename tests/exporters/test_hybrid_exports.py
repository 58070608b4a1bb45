"""Layers with heads of their own: graphs have them, and what has one number for all refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compress.arch.forward.forward import describe_forward
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RecipeError
from compress.formats import open_weights
from compress.formats.gguf.arches import ARCHES
from compress_exporters.genai.attention import require_heads
from compress_exporters.gguf.model import check_model
from compress_exporters.onnx.graph.canonical import CANONICAL
from compress_exporters.onnx.saving import MODEL
from compress_exporters.tensorrt.lowering import TENSORRT
from helpers.engine import hybrids
from helpers.exporters.onnx_graphs import opened

IDS = [(7 * i + 3) % hybrids.VOCAB for i in range(20)]


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with hybrids.known():
        yield


@pytest.mark.parametrize("lowering", [CANONICAL, TENSORRT], ids=["onnx", "tensorrt"])
@pytest.mark.parametrize("what", hybrids.CONFIGS)
def test_graphs_compute_what_plain_torch_does(what: str, lowering: Any, tmp_path: Path) -> None:
    folder = hybrids.make(tmp_path / "model", what)
    runner, ids = opened(folder, tmp_path / "out", lowering=lowering), np.array([IDS])
    onnx.checker.check_model(tmp_path / "out" / MODEL, full_check=True)
    want, past, found, at = hybrids.logits(folder, IDS).numpy(), None, [], 0
    for size in (9, 1, 10):
        mask = np.ones((1, at + size), np.int64)
        logits, past = runner.step(ids[:, at : at + size], mask, past)
        found.append(logits[0])
        at += size
    assert np.abs(np.concatenate(found) - want).max() < 2e-5
    assert past is not None
    spec = open_weights(Checkpoint.open(folder)).spec
    for block in spec.blocks:
        for name, (heads, width) in zip(("key", "value"), block.sizes.cache().parts, strict=True):
            (shape,) = (x.shape for key, x in past.items() if key.endswith(f"{block.index}.{name}"))
            assert shape == (1, heads, 20, width)


def gguf(folder: Path) -> None:
    source = open_weights(Checkpoint.open(folder))
    check_model(source, describe_forward(source.checkpoint.config, source.spec), ARCHES["qwen3"])


def genai(folder: Path) -> None:
    source = open_weights(Checkpoint.open(folder))
    require_heads(describe_forward(source.checkpoint.config, source.spec))


@pytest.mark.parametrize(
    ("export", "target"), [(gguf, "GGUF's qwen3"), (genai, "onnx-genai's configuration")]
)
def test_one_number_for_all_layers_is_not_enough(
    export: Callable[[Path], None], target: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as problem:
        export(hybrids.make(tmp_path, "two kinds"))
    assert str(problem.value) == (
        "layer 1 has 4 heads (2 KV) of 24 and 24 numbers, layer 0 8 heads (4 KV) of 16 and 16"
        f" numbers; {target} has one number for all layers, export to onnx"
    )


def test_fused_attention_takes_values_as_wide_as_keys(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="heads of keys have 24 numbers and those of values 8, "):
        genai(hybrids.make(tmp_path, "narrow values"))
