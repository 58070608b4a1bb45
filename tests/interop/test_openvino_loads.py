"""Our ONNX graphs in OpenVINO: the logits that ONNX Runtime and our decoder compute."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import compressed_models
import tiny_models
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.checks import EXACT
from compress_exporters.onnx.running import Array, Runner
from compress_exporters.onnx.saving import MODEL
from compress_exporters.table import EXPORTERS
from forward_cases import LONGROPE, rope
from tensorrt_graphs import G64, WIDE, positive

pytestmark = pytest.mark.interop

G32 = QuantScheme(group_size=32)
# What -> (family, options of tiny_models.make, scheme).
CASES: dict[str, tuple[str, dict[str, Any], QuantScheme | None]] = {
    "llama": ("llama", {}, None),
    "mistral with a window": ("mistral", {"sliding_window": 5}, None),
    "gemma2": ("gemma2", {"sliding_window": 5}, None),
    "gemma3": ("gemma3_text", {}, None),
    "gpt2": ("gpt2", {}, None),
    "qwen3_moe": ("qwen3_moe", {}, None),
    "phi3 longrope": ("phi3", LONGROPE | {"original_max_position_embeddings": 16}, None),
    "llama dynamic": (
        "llama",
        rope(rope_type="dynamic", factor=2.0) | {"max_position_embeddings": 16},
        None,
    ),
    "int4": ("llama", {}, G32),
    "int4 asymmetric": ("qwen2", {}, replace(G32, symmetric=False)),
    "int8": ("phi3", {}, PRESETS["W8A16"]),
    "NVFP4": ("llama", {}, PRESETS["NVFP4A16"]),
}
# For TensorRT: some of them, and codes in blocks and rows as it has them.
FOR_TENSORRT = {
    **{x: CASES[x] for x in ("llama", "mistral with a window", "gemma2", "gpt2", "qwen3_moe")},
    "phi3 longrope": CASES["phi3 longrope"],
    "int4": ("llama", dict(WIDE), G64),
    "int8 with inputs as they are": ("phi3", {}, PRESETS["W8A8"]),
}
GRAPHS = {
    **{f"onnx {name}": ("onnx", case) for name, case in CASES.items()},
    **{f"tensorrt {name}": ("tensorrt", case) for name, case in FOR_TENSORRT.items()},
}
# No rounding but that of the graph: by itself OpenVINO rounds inputs, keys and values to 8 bits.
AS_IT_IS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
}


def run(compiled: Any, runner: Runner, ids: Array, mask: Array, past: Any) -> tuple[Array, Any]:
    """One step, as Runner.step has it."""
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    given |= runner.empty(len(ids)) if past is None else past
    found = compiled(given)
    names = [value.get_any_name() for value in compiled.outputs]
    values = {name: found[name] for name in names}
    logits = values.pop("logits")
    return logits, {k.replace("present", "past_key_values"): v for k, v in values.items()}


@pytest.mark.parametrize("graph", GRAPHS)
def test_logits_in_chunks_and_beside_padding(
    graph: str, openvino: ModuleType, tmp_path: Path
) -> None:
    target, (family, options, scheme) = GRAPHS[graph]
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    if scheme is not None:
        write = positive if target == "tensorrt" else compressed_models.write
        write(folder, tmp_path / "coded", scheme)
        folder = tmp_path / "coded"
    out = tmp_path / "out"
    out.mkdir()
    source = open_weights(Checkpoint.open(folder))
    EXPORTERS[target].write(source, out, Options(), lambda *_: None)
    compiled = openvino.Core().compile_model(out / MODEL, "CPU", AS_IT_IS)
    runner = Runner.open(out / MODEL, EXACT)
    ids = np.random.default_rng(0).integers(1, tiny_models.VOCAB, (2, 24))
    mask = np.ones((2, 24), np.int64)
    mask[1, :9] = 0
    past, ours = None, None
    for part in (slice(0, 20), slice(20, 21), slice(21, 24)):
        seen = mask[:, : part.stop]
        got, past = run(compiled, runner, ids[:, part], seen, past)
        want, ours = runner.step(ids[:, part], seen, ours)
        real = mask[:, part] == 1
        assert np.abs(got - want)[real].max() < 1e-4
