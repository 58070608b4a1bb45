"""Stacked products are the same numbers, and there are as many as said."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.export.gate_up import GATE_UP, MODEL, Q_K_V, merged
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof.running import Runner
from helpers import compressed_models, tiny_models
from helpers.exporters.genai_graphs import written

SCHEME = QuantScheme(group_size=32, symmetric=False)


@pytest.mark.parametrize(("number", "products"), [(GATE_UP, 12), (Q_K_V, 10)])
def test_one_product_computes_what_several_do(number: int, products: int, tmp_path: Path) -> None:
    made = tiny_models.make("qwen3", tmp_path / "source", bias=True)
    compressed_models.write(made, tmp_path / "model", SCHEME)
    written(tmp_path / "model", tmp_path / "several", Options(accuracy_level=0))
    assert merged(tmp_path / "several", tmp_path / "one", number) == 2
    ids = np.array([[5, 9, 2, 77, 31]])
    several, one = (Runner.open(tmp_path / x / MODEL) for x in ("several", "one"))
    assert np.abs(one.whole(ids) - several.whole(ids)).max() < 1e-5
    nodes = onnx.load(tmp_path / "one" / MODEL, load_external_data=False).graph.node
    assert sum(node.op_type == "MatMulNBits" for node in nodes) == products
