"""The target `onnx`: what it says, writes and proves. The graph's packages are loaded when used."""

from pathlib import Path
from typing import TYPE_CHECKING

from compress_exporters.exporter import (
    Exporter,
    InPlace,
    Options,
    Progress,
    Proof,
    Source,
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


def check(source: Source, options: Options) -> tuple[str, ...]:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.codes import require_scales
    from compress_exporters.onnx.graph.decoder import build_decoder

    build = build_decoder(source, options, CANONICAL)
    # The embedding is decoded.
    require_scales(build, (x for x in source.spec.all_linears() if x.role != "embedding"))
    return notes_of(build)


def notes_of(build: "Build") -> tuple[str, ...]:
    """What was converted, and what a session needs."""
    needs = (f"the session needs the config entry {k}={v}" for k, v in build.session.items())
    from compress_exporters.onnx.graph.linked import notes

    return (*build.notes, *notes(build), *needs)


def size(source: Source, options: Options) -> int:
    from compress_exporters.onnx import saving
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.decoder import build_decoder

    return saving.size(build_decoder(source, options, CANONICAL))


def write(source: Source, folder: Path, options: Options, progress: Progress) -> Written:
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.decoder import build_decoder
    from compress_exporters.onnx.saving import save
    from compress_exporters.sidefiles import copy_side_files

    build = build_decoder(source, options, CANONICAL)
    files = save(build, folder, progress)
    beside = () if options.in_place else copy_side_files(source, folder)
    return Written((*files, *beside), notes_of(build), build.fused(*FUSED), build.unfused)


def verify(source: Source, folder: Path, options: Options) -> Proof:
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.decoder import build_decoder
    from compress_exporters.onnx.proof.checks import Asked, prove, require_form

    model = folder / (UNPROVED if options.in_place else MODEL)
    require_form(model)
    return prove(source, model, Asked.of(build_decoder(source, options, CANONICAL)))


def reads(model: Path) -> frozenset[str] | None:
    from compress_exporters.onnx.graph.linked import read_by

    return read_by(model)


def stays(source: Source, options: Options) -> int:
    from compress_exporters.onnx.graph import linked
    from compress_exporters.onnx.graph.canonical import CANONICAL
    from compress_exporters.onnx.graph.decoder import build_decoder

    return linked.size(build_decoder(source, options, CANONICAL))


ONNX = Exporter(
    name=NAME,
    summary="a plain graph of opset 23, for ONNX Runtime, OpenVINO and whatever reads ONNX",
    check=check,
    size=size,
    write=write,
    verify=verify,
    in_place=InPlace(MODEL, UNPROVED, (DATA, SECOND), reads, stays),
)
