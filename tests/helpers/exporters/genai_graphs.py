"""Tiny models as graphs for onnxruntime-genai, in ONNX Runtime."""

from pathlib import Path

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress_exporters.exporter import Options, Written
from compress_exporters.genai.lowering import build
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import MODEL
from compress_exporters.table import EXPORTERS

GENAI = EXPORTERS["onnx-genai"]
EXACT = Options(accuracy_level=0)  # inputs of products stay as they are


def source(model: Path) -> Weights:
    return open_weights(Checkpoint.open(model))


def built(model: Path, options: Options = EXACT) -> Build:
    return build(source(model), options)


def written(model: Path, out: Path, options: Options = EXACT) -> Written:
    out.mkdir(parents=True)
    return GENAI.plan(source(model), options).write(out, lambda *_: None)


def opened(model: Path, out: Path, options: Options = EXACT) -> Runner:
    """The graph of a model, written into `out`, in a session."""
    written(model, out, options)
    return Runner.open(out / MODEL)
