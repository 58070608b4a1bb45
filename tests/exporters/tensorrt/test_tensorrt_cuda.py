"""An engine of real TensorRT on a CUDA device: what it computes is what the weights say."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS
from compress_exporters.exporter import Options
from compress_exporters.table import EXPORTERS
from compress_exporters.tensorrt.engine import PACKAGES
from helpers import tiny_models
from helpers.exporters.tensorrt_graphs import G64, WIDE, positive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(
        not any(find_spec(name) for name in PACKAGES), reason="no package of TensorRT is here"
    ),
]
TENSORRT = EXPORTERS["tensorrt"]
SCHEMES = {"dense": None, "int4": G64, "int8": PRESETS["W8A16"], "W8A8": PRESETS["W8A8_STATIC"]}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", SCHEMES)
def test_the_engine_agrees(case: str, dtype: Any, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "dense", dtype="fp32", **WIDE)
    scheme = SCHEMES[case]
    if scheme is not None:
        model = positive(model, tmp_path / "model", scheme)
    source, out, options = open_weights(Checkpoint.open(model)), tmp_path / "out", Options(dtype)
    out.mkdir()
    TENSORRT.plan(source, options).write(out, lambda *_: None)
    built, ran = TENSORRT.plan(source, options).verify(out).detail[1:3]
    assert "parses the graph and builds an engine of it" in built
    if ran.startswith("the engine was not run: "):  # by a package that is not for this device
        pytest.skip(ran)
    assert f" on {torch.cuda.get_device_name()}, in one step, in chunks and beside padding" in ran
