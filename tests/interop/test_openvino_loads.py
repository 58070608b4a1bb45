"""Our ONNX graphs in OpenVINO: what the proof finds there."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.verbs import ArtifactTarget, export_artifact
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof.openvino import saturates
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.exporters.tensorrt_graphs import G64, WIDE, positive
from helpers.forward_cases import LONGROPE, rope

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
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": 24, "bias": True}, None),
    "llama dynamic": (
        "llama",
        rope(rope_type="dynamic", factor=2.0) | {"max_position_embeddings": 16},
        None,
    ),
    "int4": ("llama", {}, G32),
    "int4, latents": ("deepseek_v3", {}, G32),
    "int4 asymmetric": ("qwen2", {}, replace(G32, symmetric=False)),
    "int4 in groups of 48": ("llama", {"hidden_size": 96}, QuantScheme(group_size=48)),
    "int8 in groups of 24": ("llama", {}, QuantScheme(bits=8, group_size=24)),
    "int8": ("phi3", {}, PRESETS["W8A16"]),
    "NVFP4": ("llama", {}, PRESETS["NVFP4A16"]),
    "FP8 with inputs as they are": ("llama", {}, PRESETS["FP8_DYNAMIC"]),
    "W8A8": ("llama", {}, PRESETS["W8A8"]),
    "W8A8 static": ("llama", {}, PRESETS["W8A8_STATIC"]),
    "FP8": ("llama", {}, PRESETS["FP8"]),
    "int4 in groups that do not divide": ("llama", {}, QuantScheme(group_size=40)),
    "odd groups that do not divide": ("llama", {}, QuantScheme(group_size=25)),
}
# For TensorRT: some of them, and codes in blocks and rows as it has them.
FOR_TENSORRT = {
    **{
        x: CASES[x]
        for x in ("llama", "mistral with a window", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3")
    },
    "phi3 longrope": CASES["phi3 longrope"],
    "int4": ("llama", dict(WIDE), G64),
    "int8 with inputs as they are": ("phi3", {}, PRESETS["W8A8"]),
    "NVFP4": ("llama", dict(WIDE), PRESETS["NVFP4A16"]),
}
GRAPHS = {
    **{f"onnx {name}": ("onnx", case) for name, case in CASES.items()},
    **{f"tensorrt {name}": ("tensorrt", case) for name, case in FOR_TENSORRT.items()},
}
# Where codes are a hair off, and what OpenVINO does in its own way, or not at all.
ROUNDED = ("onnx W8A8",)
OTHERWISE = {
    "onnx FP8": "as it rounds inputs with fixed E4M3 scales in its own way",
    "onnx odd groups that do not divide": "does not open the graph: ",
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_proof_agrees(graph: str, openvino: ModuleType, tmp_path: Path) -> None:
    target, (family, options, scheme) = GRAPHS[graph]
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    if scheme is not None:
        write = positive if target == "tensorrt" else compressed_models.write
        write(folder, tmp_path / "coded", scheme)
        folder = tmp_path / "coded"
    out = tmp_path / "out"
    out.mkdir()
    source = open_weights(Checkpoint.open(folder))
    EXPORTERS[target].plan(source, Options()).write(out, lambda *_: None)
    proof = EXPORTERS[target].plan(source, Options()).verify(out)
    told = proof.detail[-1]
    assert told.startswith(f"OpenVINO {openvino.__version__.partition('-')[0]}")
    if graph in OTHERWISE:
        assert OTHERWISE[graph] in told
        return
    if graph == "onnx W8A8 static" and saturates():
        assert "cut at 16 bits on a processor without VNNI" in told
        return
    assert "in one step, in chunks and beside padding: logits within" in told
    largest = float(re.search(r"within ([^,\s]+)", told)[1])  # type: ignore[index]
    assert (largest < 1e-4) == (graph not in ROUNDED)


def test_codes_of_7_bits_do_not_saturate(openvino: ModuleType, tmp_path: Path) -> None:
    """So what a processor without VNNI makes of 8 bits is not the graph's."""
    source = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    scheme = replace(PRESETS["W8A8_STATIC"], bits=7)
    coded = open_weights(
        Checkpoint.open(compressed_models.write(source, tmp_path / "c", scheme).folder)
    )
    out = tmp_path / "out"
    out.mkdir()
    EXPORTERS["onnx"].plan(coded, Options()).write(out, lambda *_: None)
    told = EXPORTERS["onnx"].plan(coded, Options()).verify(out).detail[-1]
    assert "in one step, in chunks and beside padding: logits within" in told


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_beside_the_graph(dtype: Any, openvino: ModuleType, tmp_path: Path) -> None:
    """It reads them where they lie, whatever numbers they are."""
    folder = tiny_models.make("llama", tmp_path / "model", dtype=dtype)
    report = export_artifact(folder, ArtifactTarget("onnx", Options(in_place=True)))
    assert report.result["linked_bytes"] > 0
    assert "in one step, in chunks and beside padding: logits within" in report.detail[-1]
    assert report.detail[-1].startswith(f"OpenVINO {openvino.__version__.partition('-')[0]}")
