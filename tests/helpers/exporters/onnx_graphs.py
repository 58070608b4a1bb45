"""Tiny models as ONNX graphs in ONNX Runtime."""

from pathlib import Path

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.build import Build, Lowering
from compress_exporters.onnx.graph.canonical import CANONICAL
from compress_exporters.onnx.graph.decoder import build_decoder
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import MODEL, save


def built(model: Path, options: Options | None = None, lowering: Lowering = CANONICAL) -> Build:
    source = open_weights(Checkpoint.open(model))
    return build_decoder(source, options or Options(), lowering)


def opened(
    model: Path, out: Path, options: Options | None = None, lowering: Lowering = CANONICAL
) -> Runner:
    """The graph of a model, written into `out`, in a session."""
    out.mkdir()
    save(built(model, options, lowering), out, lambda *_: None)
    return Runner.open(out / MODEL)
