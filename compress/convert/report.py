"""What an export did: report.json, report.md and report.html in report/, and the model card."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint import Checkpoint, disk, write_atomic
from compress.checkpoint.sidefiles import RUN_MAKES
from compress.convert.plan import ExportPlan
from compress.convert.source import ExportLayer
from compress.formats import Verdict
from compress.formats.runtimes.attention_rules import with_attention
from compress.formats.runtimes.judge import runtimes
from compress.formats.runtimes.snippets import all_lines, for_card, why_not_opened
from compress.formats.table import small_files
from compress.machine.environment import peak_rss_bytes, versions
from compress.plan import checks
from compress.plan.layers import ModulePlan
from compress.report.html import export_page
from compress.report.markdown import block, words
from compress.report.markup import Node, el
from compress.report.notebook.show import text_block
from compress.report.parts import Cell, Column, number, section
from compress.report.parts import table as cells
from compress.report.terminal.cells import COLUMNS, wrap
from compress.report.terminal.copied import as_blocks
from compress.report.units import counted, duration, size

FOLDER = "report"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """All of an export's report.json.

    source, result: path, format, bytes of weight files. written: false of a plan, whose seconds and
    memory are those of planning. schemes: how many layers have which. layers: name, scheme, bytes
    before and after of each. copied_tensors: carried over as they are. tensor_parallel: for 2, 4
    and 8 shards the reasons against it. runtimes: who takes the result. open_with: lines to copy;
    open_reason: why there are none, None where there are.
    """

    source: Mapping[str, Any]
    result: Mapping[str, Any]
    schemes: Mapping[str, int]
    layers: Sequence[Mapping[str, Any]]
    copied_tensors: Sequence[str]
    copied_files: Sequence[str]
    skipped_files: Sequence[str]
    tensor_parallel: Mapping[str, Sequence[str]]
    runtimes: Sequence[Verdict]
    notes: Sequence[str]
    open_with: Sequence[str]
    open_reason: str | None
    written: bool
    seconds: float
    peak_rss_bytes: int
    versions: Mapping[str, str]
    tool: str = "compress-model"
    command: str = "export"
    schema: int = 1

    def __repr__(self) -> str:
        done = size(self.result["bytes"]) if self.written else "not written"
        return f"<ExportReport {Path(self.source['path']).name} to {self.result['format']}: {done}>"

    def _repr_html_(self) -> str:
        return text_block(repr(self).strip("<>"), table(self))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "runtimes": [v._asdict() for v in self.runtimes]}


def build(plan: ExportPlan, out: Path | None, *, seconds: float | None = None) -> ExportReport:
    """out: where the result lies or would lie, None where nobody said. seconds: that it took, None
    where there is only a plan."""
    source, layers = plan.source.checkpoint, plan.held.layers.values()
    verdicts = _runtimes(plan)
    copied, left = _side_files(source)
    return ExportReport(
        source={
            "path": source.told,
            "format": plan.source.format.name,
            "bytes": source.file_bytes,
        },
        result={
            "path": None if out is None else str(out),
            "format": plan.target.name,
            "bytes": plan.shards.total_bytes,
            "files": len(plan.shards.files),
        },
        schemes=dict(Counter(layer.scheme.describe() for layer in layers)),
        layers=[_row(layer) for layer in layers],
        copied_tensors=[name for name in plan.original if name not in plan.held.layers],
        copied_files=copied,
        skipped_files=left,
        tensor_parallel=_tensor_parallel(plan),
        runtimes=verdicts,
        notes=plan.notes,
        open_with=all_lines(plan.target.name, verdicts, "FOLDER" if out is None else str(out)),
        open_reason=why_not_opened(plan.target.name, verdicts, "--to dense"),
        written=seconds is not None,
        seconds=seconds or 0.0,
        peak_rss_bytes=peak_rss_bytes(),
        versions=versions(),
    )


def _row(layer: ExportLayer) -> dict[str, Any]:
    return {
        "name": layer.linear.name,
        "scheme": layer.scheme.describe() + (" with g_idx" if layer.reordered else ""),
        "bytes_before": layer.bytes_before,
        "bytes_after": layer.bytes_after,
    }


def _side_files(source: Checkpoint) -> tuple[list[str], list[str]]:
    """Names of small files that go along, and of what does not, with the reason where the name
    does not say it."""
    side, formats = [path.name for path in source.side_files()], small_files()
    left = [
        name.replace(RUN_MAKES, "about how the source was made") for name in source.skipped_files
    ]
    left += [f"{name} (repeats the source's format)" for name in side if name in formats]
    return [name for name in side if name not in formats], left


def _runtimes(plan: ExportPlan) -> list[Verdict]:
    found = runtimes(
        plan.target.name,
        plan.held.schemes,
        plan.source.spec,
        g_idx=bool(plan.held.with_g_idx),
        kv_cache=plan.held.kv_cache,
    )
    return with_attention(found, plan.source.checkpoint.config, plan.source.spec)


def _tensor_parallel(plan: ExportPlan) -> dict[str, tuple[str, ...]]:
    spec: DecoderSpec = plan.source.spec
    modules = [
        ModulePlan(x.linear, None, 0, "export", x.scheme, x.reordered, 0, x.bytes_after)
        for x in plan.held.layers.values()
    ]
    name = plan.target.name
    return {str(n): checks.why_not_parallel(n, spec, modules, name) for n in (2, 4, 8)}


def write(report: ExportReport, folder: Path) -> None:
    """report/report.json, the same in words and as a page."""
    target = folder / FOLDER
    with disk.refusing(f"make {target}"):
        if not target.is_dir():
            disk.mkdir(target)
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
    write_atomic(target / "report.json", text.encode("utf-8", "surrogateescape"))
    write_atomic(target / "report.md", _page(report).encode("utf-8", "surrogateescape"))
    write_atomic(target / "report.html", _html(report))


def table(report: ExportReport) -> str:
    """The export, or its plan, for a person; one fact a line."""
    lines = [f"{report.source['path']}", *(f"  {name:<9}{x}" for name, x in _facts(report))]
    opening = report.open_with or wrap(str(report.open_reason), COLUMNS - 2)
    lines += ["", "Open it", *(f"  {line}".rstrip() for line in opening)]
    if report.written:
        return "\n".join([*lines, "", f"{report.result['path']}"])
    return "\n".join([*lines, "", "nothing was written: this is a dry run"])


def _facts(report: ExportReport) -> list[tuple[str, str]]:
    """Names and values; names of runtimes are as wide as the longest."""
    before, after = report.source, report.result
    schemes = ", ".join(f"{n} x {name}" for name, n in report.schemes.items())
    written = f"{size(after['bytes'])} in {counted(after['files'], 'file')}"
    shards = report.tensor_parallel.items()
    took = f"{duration(report.seconds)}, peak memory {size(report.peak_rss_bytes)}"
    return [
        ("format", f"{before['format']} -> {after['format']}"),
        ("size", f"{size(before['bytes'])} -> {written}"),
        ("layers", schemes),
        *(("note", note) for note in report.notes),
        *(("left", name) for name in report.skipped_files),
        *((f"tensor parallel {n}   ", "; ".join(reasons) or "divides") for n, reasons in shards),
        *(
            (f"{v.runtime:<17}   ", f"{v.verdict}: {v.reason}".rstrip(": "))
            for v in report.runtimes
        ),
        *([("took", took)] if report.written else []),
    ]


def _html(report: ExportReport) -> bytes:
    """The report as a page."""
    before, after = report.source["path"], report.result["path"]
    facts = [(name.strip(), value) for name, value in _facts(report)]
    told: list[tuple[str, Node]] = [("source", el("code", before)), *facts]
    told += [] if report.open_reason is None else [("opened", report.open_reason)]
    told.append(("result", el("code", after)))
    columns = [Column("Layer"), Column("Scheme"), Column("Before", True), Column("After", True)]
    rows = [
        [
            Cell(el("code", layer["name"])),
            Cell(layer["scheme"]),
            *(number(layer[x], size(layer[x])) for x in ("bytes_before", "bytes_after")),
        ]
        for layer in report.layers
    ]
    layers = section("layers", "Layers", cells("Layers", columns, rows, "sortable"))
    tool = f"{report.tool} {report.versions['compress-model']}"
    start = as_blocks(report.open_with)
    return export_page(Path(before).name, tool, told, start, layers)


def card(report: ExportReport) -> bytes:
    """README.md of the result: names and notes in it are words, never markup. Holds nothing that
    differs between two equal exports."""
    rows = "\n".join(f"| {words(scheme)} | {n} |" for scheme, n in report.schemes.items())
    found = "\n".join(
        f"- {words(v.runtime)}: {words(v.verdict)}{f' ({words(v.reason)})' if v.reason else ''}"
        for v in report.runtimes
    )
    notes = "".join(f"- {words(note)}\n" for note in report.notes)
    name, fmt = words(Path(report.source["path"]).name), report.result["format"]
    return f"""---
library_name: transformers
tags: [compress-model, {fmt}]
---
# {name} in the format {fmt}

Converted by compress-model {report.versions["compress-model"]} from {report.source["format"]},
without calibration: {size(report.source["bytes"])} became {size(report.result["bytes"])}.

| scheme | layers |
|---|---|
{rows}

{notes}
## Where it loads
{found}

{for_card(fmt, report.runtimes)}""".encode("utf-8", "surrogateescape")


def _page(report: ExportReport) -> str:
    rows = "\n".join(
        f"| {words(x['name'])} | {words(x['scheme'])} | {x['bytes_before']} | {x['bytes_after']} |"
        for x in report.layers
    )
    return f"""# Export

{block(table(report))}

| layer | scheme | bytes before | bytes after |
|---|---|---|---|
{rows}

Copied as they are: {len(report.copied_tensors)} tensors and
{", ".join(map(words, report.copied_files)) or "no files"}.
"""
