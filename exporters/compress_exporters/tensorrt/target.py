"""The target `tensorrt`: what it says, writes and proves. The graph's packages are loaded when
used."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from compress.checkpoint import disk
from compress.errors import CheckpointError
from compress_exporters.exporter import (
    AGAIN,
    Exporter,
    Options,
    Progress,
    Proof,
    Source,
    Written,
    require,
)

if TYPE_CHECKING:
    from compress_exporters.onnx.graph.build import Build

NAME, EXTRA = "tensorrt", "onnx"
# Operators that do several steps at once.
FUSED = (
    *("Attention", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Gelu"),
    *("DequantizeLinear", "QuantizeLinear"),
)
NO_ENGINE = "no engine is in the folder; TENSORRT.md says how one is built"


def check(source: Source, options: Options) -> tuple[str, ...]:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.tensorrt.linears import notes, require_numbers

    build = _build(source, options)
    require_numbers(build)
    return notes(build)


def size(source: Source, options: Options) -> int:
    from compress_exporters.onnx import saving

    return saving.size(_build(source, options))


def write(source: Source, folder: Path, options: Options, progress: Progress) -> Written:
    from compress_exporters.onnx.saving import MODEL, save
    from compress_exporters.sidefiles import copy_side_files
    from compress_exporters.tensorrt.build_notes import write_notes
    from compress_exporters.tensorrt.linears import notes
    from compress_exporters.tensorrt.lint.lint import require_clean

    build = _build(source, options)
    files = save(build, folder, progress)
    require_clean(folder / MODEL)
    files = (*files, *write_notes(build, folder))
    beside = copy_side_files(source, folder)
    told = (*notes(build), NO_ENGINE)
    return Written((*files, *beside), told, build.fused(*FUSED), build.unfused)


def verify(source: Source, folder: Path, options: Options) -> Proof:
    from compress_exporters.onnx.proof.checks import Asked, prove, require_form
    from compress_exporters.onnx.saving import MODEL
    from compress_exporters.tensorrt import engine_proof
    from compress_exporters.tensorrt.folding import folded, has_fp4
    from compress_exporters.tensorrt.lint.lint import RULES, require_clean

    model = folder / MODEL
    require_form(model)
    require_clean(model)
    # How ONNX Runtime would round inputs of its own accord says nothing of TensorRT.
    asked = replace(Asked.of(_build(source, options)), usual=False)
    told = [f"TensorRT's parser takes it, as far as {len(RULES)} rules of the lint tell"]
    if not has_fp4(model):
        proof = prove(source, model, asked)
    else:
        # Inside, where whoever clears a stopped export's folder takes it away as well.
        with TemporaryDirectory(dir=folder, prefix=".decoded-") as place:
            with disk.refusing(f"decode {model} for its proof", AGAIN):
                decoded = folded(model, Path(place))
            proof = prove(source, decoded, asked)
        told.append(
            "weights of 4-bit floats were decoded by ONNX's reference, as ONNX Runtime has none"
        )
    told += engine_proof.proved(source, folder, asked)
    return replace(proof, detail=(*told, *proof.detail))


def _build(source: Source, options: Options) -> "Build":
    """CheckpointError for a decoder that TensorRT has no types for."""
    from compress_exporters.onnx.graph.decoder import build_decoder
    from compress_exporters.tensorrt.lowering import TENSORRT

    build = build_decoder(source, options, TENSORRT)
    if any(layer.rope is not None and layer.rope.kind == "dynamic" for layer in build.how.layers):
        raise CheckpointError(
            f"{source.checkpoint.path}: rope_type 'dynamic' computes its frequencies in 64 bits,"
            " which TensorRT has not; export --to onnx, or give the config a fixed rope_type"
        )
    return build


TENSORRT_READY = Exporter(
    name=NAME,
    summary="a graph that TensorRT's parser takes, and the command that builds an engine",
    check=check,
    size=size,
    write=write,
    verify=verify,
    positive_scales=True,
)
