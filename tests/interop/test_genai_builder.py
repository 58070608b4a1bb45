"""Our 4-bit graphs beside those of onnxruntime-genai's own builder, as ONNX Runtime runs them."""

import subprocess
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from benchmarks.export.genai_speed import building
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.saving import MODEL
from helpers import compressed_models, tiny_models
from helpers.exporters.genai_graphs import written

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("onnxruntime_genai")]

G32 = QuantScheme(group_size=32)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
TIED = {**SIZES, "tied": True}
# Family -> (options, nodes that we have beyond the builder's, a block).
FAMILIES: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "llama": (TIED, {}),
    "qwen2": (SIZES, {}),
    "gemma2": ({**TIED, "head_dim": 32}, {}),
    "phi3": ({**SIZES, "original_max_position_embeddings": 128}, {}),
    # It joins q, k and v to one product, and splits what comes out in front of the norms.
    "qwen3": ({**TIED, "head_dim": 32}, {"MatMulNBits": 2, "Split": -1}),
}


def builders(model: Path, out: Path, cache: Path) -> Path:
    """The builder's folder, as its command makes it for the CPU."""
    done = subprocess.run(building(model, out, cache), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def optimized(folder: Path, out: Path) -> Counter[str]:
    """How many nodes of each kind ONNX Runtime makes of a graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(out)
    ort.InferenceSession(folder / MODEL, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(out, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize("family", FAMILIES)
def test_we_have_the_builders_nodes(family: str, tmp_path: Path) -> None:
    sizes, more = FAMILIES[family]
    model = tiny_models.make(family, tmp_path / "model", **sizes)
    tied = "tied" in sizes
    ends = {"embedding": G32} if tied else {"head": G32}
    compressed_models.write(model, tmp_path / "coded", G32, **ends)
    written(tmp_path / "coded", tmp_path / "ours", Options())
    builders(model, tmp_path / "theirs", tmp_path / "cache")
    mine, other = (
        optimized(tmp_path / name, tmp_path / f"{name}.onnx") for name in ("ours", "theirs")
    )
    blocks = 2
    kinds = {kind for kind in mine | other if mine[kind] != other[kind]}
    assert {kind: (mine[kind] - other[kind]) / blocks for kind in kinds} == more
