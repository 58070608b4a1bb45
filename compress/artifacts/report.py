"""What an export for another runtime did: report.json, report.md and report.html in report/, and
README.md."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.artifacts.plan import ArtifactPlan
from compress.checkpoint import disk, write_atomic
from compress.formats import Weights
from compress.machine.environment import peak_rss_bytes, versions
from compress.report.html import export_page
from compress.report.markdown import block, words
from compress.report.markup import Node, el
from compress.report.notebook.show import text_block
from compress.report.proofs import UNPROVED, proved
from compress.report.schema import Export
from compress.report.terminal.copied import indented
from compress.report.units import counted, duration
from compress.report.units import size as shown_size
from compress_exporters.exporter import Proof, Written

FOLDER = "report"
# What writes artifacts, and what they are proved in.
PACKAGES = (
    *("onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai", "openvino"),
    *("tensorrt", "tensorrt-rtx", "gguf", "xllamacpp"),
)


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """The content of report.json.

    source: path, format, bytes of the weight files. result: path, target, files, bytes (in GGUF
    of model.gguf, not of the small files beside it), linked_bytes: those of the source's weights
    that it reads where they are, and imatrix: the path of what was measured for llama-quantize, or
    None. schemes: number of quantized layers of the source by scheme. exports: one row, as in the
    report of a run; none for a plan. detail: what the proof compared, a line each. fused: number of
    operators by name that do several steps at once. unfused: what stayed in single steps, and why.
    written: False for a plan. seconds: of writing and of verifying.
    """

    source: Mapping[str, Any]
    result: Mapping[str, Any]
    schemes: Mapping[str, int]
    exports: Sequence[Export]
    detail: Sequence[str]
    notes: Sequence[str]
    fused: Mapping[str, int]
    unfused: Mapping[str, str]
    written: bool
    seconds: Mapping[str, float]
    peak_rss_bytes: int
    versions: Mapping[str, str]
    tool: str = "compress-model"
    command: str = "export"
    schema: int = 1

    def __repr__(self) -> str:
        done = shown_size(self.result["bytes"]) if self.written else "not written"
        return (
            f"<ArtifactReport {Path(self.source['path']).name} to {self.result['target']}: {done}>"
        )

    def _repr_html_(self) -> str:
        return text_block(repr(self).strip("<>"), table(self))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Made:
    """An artifact that was made.

    size: bytes of its files. proof: None where the user asked for none. seconds: of writing and of
    verifying.
    """

    written: Written
    size: int
    proof: Proof | None
    seconds: Mapping[str, float] = field(default_factory=dict)


def size_of(folder: Path, written: Written) -> int:
    """Bytes of the files that were written into a folder, without what lies beside them."""
    return sum((folder / name).stat().st_size for name in written.files)


def build(plan: ArtifactPlan, out: Path | None, made: Made | None = None) -> ArtifactReport:
    """The report of an export, or of its plan.

    out: the artifact's folder; None for a plan without one. made: None for a plan.
    """
    source, target = plan.source, plan.exporter.name
    path = None if out is None else str(out)
    written = Written(()) if made is None else made.written
    before = plan.planned.notes
    notes = (*before, *(x for x in written.notes if x not in before))
    start = () if out is None else plan.planned.start(out)
    rows = () if made is None else (row(target, str(path), made, notes, start),)
    checkpoint = source.checkpoint
    return ArtifactReport(
        source={
            "path": checkpoint.told,
            "format": source.format.name,
            "bytes": checkpoint.file_bytes,
        },
        result={
            "path": path,
            "target": target,
            "bytes": plan.planned.size if made is None else made.size,
            "linked_bytes": plan.planned.linked,
            "imatrix": None if plan.imatrix is None else str(plan.imatrix.path),
            "files": [*written.files, *written.beside],
        },
        schemes=_schemes(source),
        exports=rows,
        detail=() if made is None or made.proof is None else made.proof.detail,
        notes=notes,
        fused=written.fused,
        unfused=written.unfused,
        written=made is not None,
        seconds={} if made is None else made.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        versions=versions(PACKAGES),
    )


def row(
    target: str, path: str, made: Made, notes: Sequence[str] = (), start: Sequence[str] = ()
) -> Export:
    """The row of an artifact in a report.

    notes: those of the check before the export; those of the writing are added. start: lines for
    its runtime, a block each.
    """
    written, proof = made.written, made.proof
    return Export(
        target,
        path,
        made.size,
        UNPROVED if proof is None else proof.level,
        None if proof is None else proof.max_logit_error,
        (*written.files, *written.beside),
        tuple(dict.fromkeys((*notes, *written.notes))),
        dict(written.fused),
        dict(written.unfused),
        () if proof is None else proof.detail,
        tuple(start),
    )


def _schemes(source: Weights) -> dict[str, int]:
    """Number of quantized layers by the words for their scheme."""
    found = (source.scheme(linear.name) for linear in source.spec.all_linears())
    return dict(Counter(scheme.describe() for scheme in found if scheme is not None))


def as_json(report: ArtifactReport) -> bytes:
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "surrogateescape")


def write(report: ArtifactReport, folder: Path) -> None:
    """Write report/report.json, the same as text and as a page, and README.md into a folder."""
    target = folder / FOLDER
    with disk.refusing(f"make {target}"):
        disk.mkdir(target)
    page = f"# Export\n\n{block(table(report))}\n"
    for path, content in (
        (target / "report.json", as_json(report)),
        (target / "report.md", page.encode("utf-8", "surrogateescape")),
        (target / "report.html", _page(report)),
        (folder / "README.md", _card(report).encode("utf-8", "surrogateescape")),
    ):
        write_atomic(path, content)


def table(report: ArtifactReport) -> str:
    """The report of an export, or of its plan, as text: one fact a line."""
    before, after = report.source, report.result
    lines = [f"{before['path']}", *(f"  {name:<9}{value}" for name, value in _facts(report))]
    if not report.written:
        return "\n".join([*lines, "", "nothing was written: this is a dry run"])
    lines += ["", "Start it", *indented(report.exports[0].open_with)]
    files = counted(len(after["files"]), "file")
    return "\n".join([*lines, "", f"{after['path']} ({files}, and the report)"])


def _facts(report: ArtifactReport) -> list[tuple[str, str]]:
    """Names and values; without a name what goes on with the one before."""
    before, after = report.source, report.result
    schemes = ", ".join(f"{n} x {name}" for name, n in report.schemes.items())
    sizes = f"{shown_size(before['bytes'])} -> {shown_size(after['bytes'])}{_linked(after)}"
    found = [
        ("target", f"{before['format']} -> {after['target']}"),
        ("size", sizes),
        *([("layers", schemes)] if schemes else []),
        *_measured(report),
        *(("note", line) for line in report.notes),
        *(("fused", f"{n} x {name}") for name, n in report.fused.items()),
        *(("unfused", f"{name}: {why}") for name, why in report.unfused.items()),
    ]
    if not report.written:
        return found
    took = ", ".join(f"{duration(x)} to {name}" for name, x in report.seconds.items())
    return [
        *found,
        ("proved", proved(report.exports[0])),
        *(("", line) for line in report.detail),
        ("took", f"{took}, peak memory {shown_size(report.peak_rss_bytes)}"),
    ]


def _page(report: ArtifactReport) -> bytes:
    """The same as a page."""
    before, after = report.source["path"], report.result["path"]
    told: list[tuple[str, Node]] = [("source", el("code", before)), *_facts(report)]
    told.append(("result", el("code", after)))
    tool = f"{report.tool} {report.versions['compress-model']}"
    return export_page(Path(before).name, tool, told, report.exports[0].open_with)


def _linked(result: Mapping[str, Any]) -> str:
    linked = result["linked_bytes"]
    return f"; {shown_size(linked)} of the source stay where they are" if linked else ""


def _measured(report: ArtifactReport) -> list[tuple[str, str]]:
    path = report.result["imatrix"]
    if path is None:
        return []
    return [("imatrix", f"{path}{'' if report.written else ', which would be written'}")]


def _card(report: ArtifactReport) -> str:
    """README.md of the result. It is the same for two equal exports, so it holds no times."""
    name, target = words(Path(report.source["path"]).name), report.result["target"]
    kind = _source_kind(report.source["format"])
    notes = "".join(f"- {words(line)}\n" for line in report.notes)
    return f"""---
tags: [compress-model, {target}]
---
# {name} for {target}

Made by compress-model {report.versions["compress-model"]} from {kind}:
{shown_size(report.source["bytes"])} became {shown_size(report.result["bytes"])}.
Proof: {words(proved(report.exports[0]))}.

{notes}
## How to start it
{_blocks(report)}"""


def _blocks(report: ArtifactReport) -> str:
    """FOLDER is where the artifact lies; what lies elsewhere has its name alone."""
    place, imatrix = str(report.result["path"]), report.result["imatrix"]
    elsewhere = imatrix is not None and not Path(imatrix).is_relative_to(place)
    lines = (
        (line.replace(imatrix, Path(imatrix).name) if elsewhere else line).replace(place, "FOLDER")
        for line in report.exports[0].open_with
    )
    return "".join(f"\n```\n{line}\n```\n" for line in lines)


def _source_kind(format_name: str) -> str:
    if format_name == "dense":
        return "a checkpoint with unquantized weights"
    return f"a quantized checkpoint (format {format_name})"
