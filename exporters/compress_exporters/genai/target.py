"""The target `onnx-genai`: what it plans, writes and proves. Its packages are loaded when used."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.formats.weights import Weights
from compress_exporters import starting
from compress_exporters.exporter import Exporter, Options, Progress, Proof, Written, require

if TYPE_CHECKING:
    from compress_exporters.onnx.graph.build import Build

NAME, EXTRA = "onnx-genai", "onnx"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGenai:
    """build: the graph, whose weights are read when they are written."""

    build: "Build"
    notes: tuple[str, ...]
    size: int
    linked: int = 0

    def write(self, folder: Path, progress: Progress) -> Written:
        from compress_exporters.genai.config import write_config
        from compress_exporters.genai.proof import FUSED
        from compress_exporters.onnx.saving import save
        from compress_exporters.sidefiles import copy_side_files

        build = self.build
        files = (*save(build, folder, progress), write_config(build, folder))
        beside = copy_side_files(build.weights, folder)
        return Written((*files, *beside), self.notes, build.fused(*FUSED), build.unfused)

    def verify(self, folder: Path) -> Proof:
        from compress_exporters.genai.proof import prove_folder

        return prove_folder(self.build.weights, folder, self.build)

    def start(self, folder: Path) -> tuple[str, ...]:
        return starting.genai(folder)


def plan(source: Weights, options: Options) -> PlannedGenai:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.genai.config import genai_config
    from compress_exporters.genai.lowering import build, notes
    from compress_exporters.onnx import saving
    from compress_exporters.onnx.graph.codes import require_scales

    graph = build(source, options)
    require_scales(graph, source.spec.all_linears())
    genai_config(graph)  # settings that cannot be read are refused before anything is written
    return PlannedGenai(graph, notes(graph), saving.size(graph))


GENAI = Exporter(
    name=NAME,
    summary="a graph of ONNX Runtime's own operators, as onnxruntime-genai runs it",
    plan=plan,
)
