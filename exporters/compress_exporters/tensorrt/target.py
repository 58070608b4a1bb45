"""The target `tensorrt`: what it plans, writes and proves. The graph's packages are loaded when
used."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from compress.checkpoint import disk
from compress.errors import CheckpointError
from compress.formats.weights import Weights
from compress_exporters import starting
from compress_exporters.exporter import AGAIN, Exporter, Options, Progress, Proof, Written, require

if TYPE_CHECKING:
    from compress_exporters.onnx.graph.build import Build
    from compress_exporters.onnx.proof.checks import Asked

NAME, EXTRA = "tensorrt", "onnx"
# Operators that do several steps at once.
FUSED = (
    *("Attention", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Gelu"),
    *("DequantizeLinear", "QuantizeLinear"),
)
NO_ENGINE = "no engine is in the folder; TENSORRT.md says how one is built"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensorrt:
    """build: the graph, whose weights are read when they are written."""

    build: "Build"
    notes: tuple[str, ...]
    size: int
    linked: int = 0

    def write(self, folder: Path, progress: Progress) -> Written:
        from compress_exporters.onnx.saving import MODEL, save
        from compress_exporters.sidefiles import copy_side_files
        from compress_exporters.tensorrt.build_notes import write_notes
        from compress_exporters.tensorrt.lint.lint import require_clean

        build = self.build
        files = save(build, folder, progress)
        require_clean(folder / MODEL)
        files = (*files, *write_notes(build, folder))
        beside = copy_side_files(build.weights, folder)
        told = (*self.notes, NO_ENGINE)
        return Written((*files, *beside), told, build.fused(*FUSED), build.unfused)

    def verify(self, folder: Path) -> Proof:
        from compress_exporters.onnx.proof.checks import Asked, require_form
        from compress_exporters.onnx.saving import MODEL
        from compress_exporters.tensorrt import engine_proof
        from compress_exporters.tensorrt.lint.lint import RULES, require_clean

        model, source = folder / MODEL, self.build.weights
        require_form(model)
        require_clean(model)
        # How ONNX Runtime would round inputs of its own accord says nothing of TensorRT.
        asked = replace(Asked.of(self.build), usual=False)
        told = (f"TensorRT's parser takes it, as far as {len(RULES)} rules of the lint tell",)
        proof, how = _proved(source, model, asked)
        built = engine_proof.proved(source, folder, asked)
        return replace(proof, detail=(*told, *how, *built, *proof.detail))

    def start(self, folder: Path) -> tuple[str, ...]:
        from compress_exporters.tensorrt.build_notes import described

        return starting.trtexec(described(self.build)["trtexec"], folder)


def plan(source: Weights, options: Options) -> PlannedTensorrt:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.onnx import saving
    from compress_exporters.tensorrt.linears import notes, require_numbers

    build = _build(source, options)
    require_numbers(build)
    return PlannedTensorrt(build, notes(build), saving.size(build))


def _proved(source: Weights, model: Path, asked: "Asked") -> tuple[Proof, tuple[str, ...]]:
    """In ONNX Runtime, and what was done to the graph for it."""
    from compress_exporters.onnx.proof.checks import prove
    from compress_exporters.tensorrt.folding import folded, has_fp4

    if not has_fp4(model):
        return prove(source, model, asked), ()
    # Inside, where whoever clears a stopped export's folder takes it away as well.
    with TemporaryDirectory(dir=model.parent, prefix=".decoded-") as place:
        with disk.refusing(f"decode {model} for its proof", AGAIN):
            decoded = folded(model, Path(place))
        proof = prove(source, decoded, asked)
    return proof, (
        "weights of 4-bit floats were decoded by ONNX's reference, as ONNX Runtime has none",
    )


def _build(source: Weights, options: Options) -> "Build":
    """CheckpointError for a decoder that TensorRT has no types for."""
    from compress_exporters.onnx.graph.decoder import build_decoder
    from compress_exporters.tensorrt.lowering import TENSORRT

    build = build_decoder(source, options, TENSORRT)
    if any(rope.kind == "dynamic" for rope in build.how.ropes):
        raise CheckpointError(
            f"{source.checkpoint.path}: rope_type 'dynamic' computes its frequencies in 64 bits,"
            " which TensorRT has not; export --to onnx, or give the config a fixed rope_type"
        )
    return build


TENSORRT_READY = Exporter(
    name=NAME,
    summary="a graph that TensorRT's parser takes, and the command that builds an engine",
    plan=plan,
    positive_scales=True,
)
