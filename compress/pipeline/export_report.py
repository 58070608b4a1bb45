"""What an export did: report/report.json, report/report.md and the model card."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint import disk, write_atomic
from compress.formats import Verdict, runtimes
from compress.formats.table import small_files
from compress.pipeline import fit
from compress.pipeline.environment import peak_rss_bytes, versions
from compress.pipeline.export_plan import ExportPlan
from compress.pipeline.modules import ModulePlan
from compress.report.units import duration, size

FOLDER = "report"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """All of an export's report.json.

    source, result: path, format, bytes of weight files. schemes: how many layers have which.
    layers: name, scheme, bytes before and after of each. copied_tensors: carried over as they are.
    tensor_parallel: for 2, 4 and 8 shards the reasons against it. runtimes: who takes the result.
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
    seconds: float
    peak_rss_bytes: int
    versions: Mapping[str, str]
    tool: str = "compress-model"
    command: str = "export"
    schema: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "runtimes": [v._asdict() for v in self.runtimes]}


def build(plan: ExportPlan, out: Path | None, seconds: float) -> ExportReport:
    """out: where the result will lie, None where there is only a plan."""
    source, layers = plan.source.checkpoint, plan.layers.values()
    side = [path.name for path in source.side_files()]
    left = small_files()
    return ExportReport(
        source={
            "path": str(source.path.resolve()),
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
        layers=[
            {
                "name": x.linear.name,
                "scheme": x.scheme.describe() + (" with g_idx" if x.reordered else ""),
                "bytes_before": x.bytes_before,
                "bytes_after": x.bytes_after,
            }
            for x in layers
        ],
        copied_tensors=[name for name in plan.original if name not in plan.layers],
        copied_files=[name for name in side if name not in left],
        skipped_files=[*source.skipped_files, *(name for name in side if name in left)],
        tensor_parallel=_tensor_parallel(plan),
        runtimes=_runtimes(plan),
        notes=plan.notes,
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
        versions=versions(),
    )


def _runtimes(plan: ExportPlan) -> list[Verdict]:
    return runtimes(
        plan.target.name,
        plan.schemes,
        plan.source.spec,
        g_idx=bool(plan.with_g_idx),
        kv_cache=plan.kv_cache,
    )


def _tensor_parallel(plan: ExportPlan) -> dict[str, tuple[str, ...]]:
    spec: DecoderSpec = plan.source.spec
    modules = [
        ModulePlan(x.linear, None, 0, "export", x.scheme, x.reordered, 0, x.bytes_after)
        for x in plan.layers.values()
    ]
    name = plan.target.name
    return {str(n): fit.against_parallel(n, spec, modules, name) for n in (2, 4, 8)}


def write(report: ExportReport, folder: Path) -> None:
    """report/report.json and the same in words."""
    target = folder / FOLDER
    with disk.refusing(f"make {target}"):
        if not target.is_dir():
            disk.mkdir(target)
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
    write_atomic(target / "report.json", text.encode("utf-8", "surrogateescape"))
    write_atomic(target / "report.md", _page(report).encode("utf-8", "surrogateescape"))


def table(report: ExportReport) -> str:
    """The export, or its plan, for a person; one fact a line."""
    before, after = report.source, report.result
    schemes = ", ".join(f"{n} x {name}" for name, n in report.schemes.items())
    written = f"{size(after['bytes'])} in {after['files']} file(s)"
    lines = [
        f"{before['path']}",
        f"  format   {before['format']} -> {after['format']}",
        f"  size     {size(before['bytes'])} -> {written}",
        f"  layers   {schemes}",
        *(f"  note     {note}" for note in report.notes),
        *(f"  left     {name}" for name in report.skipped_files),
    ]
    for n, reasons in report.tensor_parallel.items():
        lines.append(f"  tensor parallel {n}   {'; '.join(reasons) or 'divides'}")
    lines += [f"  {v.runtime:<17}   {v.verdict}: {v.reason}".rstrip(": ") for v in report.runtimes]
    if after["path"] is not None:
        took = f"{duration(report.seconds)}, peak memory {size(report.peak_rss_bytes)}"
        lines += [f"  took     {took}", f"{after['path']}"]
    return "\n".join(lines)


def card(report: ExportReport) -> bytes:
    """README.md of the result. Holds nothing that differs between two equal exports."""
    rows = "\n".join(f"| {scheme} | {n} |" for scheme, n in report.schemes.items())
    found = "\n".join(
        f"- {v.runtime}: {v.verdict}{f' ({v.reason})' if v.reason else ''}" for v in report.runtimes
    )
    name, fmt = Path(report.source["path"]).name, report.result["format"]
    return f"""---
library_name: transformers
tags: [compress-model, {fmt}]
---
# {name} in the format {fmt}

Converted by compress-model {report.versions["compress-model"]} from {report.source["format"]},
without calibration.

| scheme | layers |
|---|---|
{rows}

## Where it loads
{found or "- any loader of the original"}
""".encode("utf-8", "surrogateescape")


def _page(report: ExportReport) -> str:
    rows = "\n".join(
        f"| {x['name']} | {x['scheme']} | {x['bytes_before']} | {x['bytes_after']} |"
        for x in report.layers
    )
    return f"""# Export

```
{table(report)}
```

| layer | scheme | bytes before | bytes after |
|---|---|---|---|
{rows}

Copied as they are: {len(report.copied_tensors)} tensors and
{", ".join(report.copied_files) or "no files"}.
"""
