"""The target `onnx`: what it plans, writes and proves. Its packages are loaded when used."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.formats.weights import Weights
from compress_exporters import starting
from compress_exporters.exporter import (
    Exporter,
    InPlace,
    Options,
    Progress,
    Proof,
    Written,
    require,
)
from compress_exporters.onnx.names import DATA, MODEL, SECOND, UNPROVED

if TYPE_CHECKING:
    from compress_exporters.onnx.graph.build import Build

NAME, EXTRA = "onnx", "onnx"
# Operators that do several steps at once.
FUSED = (
    *("Attention", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Gelu"),
    *("DequantizeLinear", "QuantizeLinear", "MatMulInteger"),
)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedOnnx:
    """build: the graph, whose weights are read when they are written."""

    build: "Build"
    notes: tuple[str, ...]
    size: int
    linked: int

    def write(self, folder: Path, progress: Progress) -> Written:
        from compress_exporters.onnx.saving import save
        from compress_exporters.sidefiles import copy_side_files

        build = self.build
        files = save(build, folder, progress)
        beside = () if build.options.in_place else copy_side_files(build.weights, folder)
        return Written((*files, *beside), self.notes, build.fused(*FUSED), build.unfused)

    def verify(self, folder: Path) -> Proof:
        from compress_exporters.onnx.proof.checks import Asked, prove, require_form

        model = folder / (UNPROVED if self.build.options.in_place else MODEL)
        require_form(model)
        return prove(self.build.weights, model, Asked.of(self.build))

    def start(self, folder: Path) -> tuple[str, ...]:
        return starting.onnxruntime(folder / MODEL, self.build.session)


def plan(source: Weights, options: Options) -> PlannedOnnx:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.onnx import saving
    from compress_exporters.onnx.graph import linked
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.codes import require_scales
    from compress_exporters.onnx.graph.decoder import build_decoder

    build = build_decoder(source, options, CANONICAL)
    # The embedding is decoded.
    require_scales(build, (x for x in source.spec.all_linears() if x.role != "embedding"))
    # What a session needs.
    needs = (f"the session needs the config entry {k}={v}" for k, v in build.session.items())
    notes = (*build.notes, *linked.notes(build), *needs)
    return PlannedOnnx(build, notes, saving.size(build), linked.size(build))


def reads(model: Path) -> frozenset[str] | None:
    from compress_exporters.onnx.graph.linked import read_by

    return read_by(model)


ONNX = Exporter(
    name=NAME,
    summary="a plain graph of opset 23, for ONNX Runtime, OpenVINO and whatever reads ONNX",
    plan=plan,
    in_place=InPlace(MODEL, UNPROVED, (DATA, SECOND), reads),
)
