"""The target `onnx-genai`: what it says, writes and proves. Its packages are loaded when used."""

from pathlib import Path

from compress_exporters.exporter import Exporter, Options, Progress, Proof, Source, Written, require

NAME, EXTRA = "onnx-genai", "onnx"


def check(source: Source, options: Options) -> tuple[str, ...]:
    require(NAME, EXTRA, "onnx", "onnx_ir", "onnxruntime")
    from compress_exporters.genai.config import genai_config
    from compress_exporters.genai.lowering import build, notes
    from compress_exporters.onnx.graph.codes import require_scales

    graph = build(source, options)
    require_scales(graph, source.spec.all_linears())
    genai_config(graph)  # settings that cannot be read are refused before anything is written
    return notes(graph)


def size(source: Source, options: Options) -> int:
    from compress_exporters.genai.lowering import build
    from compress_exporters.onnx import saving

    return saving.size(build(source, options))


def write(source: Source, folder: Path, options: Options, progress: Progress) -> Written:
    from compress_exporters.genai.config import write_config
    from compress_exporters.genai.lowering import build, notes
    from compress_exporters.genai.proof import FUSED
    from compress_exporters.onnx.saving import save
    from compress_exporters.sidefiles import copy_side_files

    graph = build(source, options)
    files = (*save(graph, folder, progress), write_config(graph, folder))
    beside = copy_side_files(source, folder)
    return Written((*files, *beside), notes(graph), graph.fused(*FUSED), graph.unfused)


def verify(source: Source, folder: Path, options: Options) -> Proof:
    from compress_exporters.genai.lowering import build
    from compress_exporters.genai.proof import prove_folder

    return prove_folder(source, folder, build(source, options))


GENAI = Exporter(
    name=NAME,
    summary="a graph of ONNX Runtime's own operators, as onnxruntime-genai runs it",
    check=check,
    size=size,
    write=write,
    verify=verify,
)
