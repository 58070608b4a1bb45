"""Engines of the graphs that the matrix of exports has for TensorRT.

    python -m benchmarks.export.engines_cells FOLDER [TEXT ...]

Those of rows whose names have one of the texts, or of all. Works in FOLDER, with tests/ on the path
of Python, and prints the builder's name and the cells as JSON. Nothing is proved here but that the
builder takes a graph.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.export.matrix_row import made
from benchmarks.export.matrix_rows import ROWS, VARIANTS
from compress import verbs
from compress.errors import CompressError
from compress_exporters.exporter import Options
from compress_exporters.onnx.saving import MODEL
from compress_exporters.tensorrt.build_notes import JSON
from compress_exporters.tensorrt.engine import Tools

Cell = dict[str, Any]


def cell(tools: Tools, source: Path, dtype: Any, out: Path) -> Cell:
    """outcome: "refused" by the export, "built", or "not built". cpu_s: of parsing and building."""
    try:
        verbs.export_artifact(
            source,
            verbs.ArtifactTarget("tensorrt", Options(dtype)),
            out,
            verify=False,
            overwrite=True,
        )
    except CompressError as refusal:
        return {"outcome": "refused", "reason": _short(refusal, source)}
    facts, began = json.loads((out / JSON).read_text()), time.process_time()
    try:
        engine = tools.engine(out / MODEL, facts["profiles"])
    except CompressError as refusal:
        return {"outcome": "not built", "reason": _short(refusal, out)}
    return {
        "outcome": "built",
        "cpu_s": round(time.process_time() - began, 2),
        "graph_bytes": sum(path.stat().st_size for path in out.glob(f"{MODEL}*")),
        "engine_bytes": engine.size,
        "compute_capability": facts["compute_capability"],
    }


def _short(error: CompressError, place: Path) -> str:
    """Without folders of this machine."""
    return str(error).replace(f"{place}: ", "").replace(f"{place}/", "")


def main(place: str, *only: str) -> None:
    tools, cells = Tools.find(), []
    for row in (x for x in ROWS if not only or any(part in x.name for part in only)):
        print(f"{row.block}: {row.name}", file=sys.stderr)
        folder = Path(place) / "row"
        folder.mkdir()
        sources = made(row, folder)
        for variant, (what, dtype) in VARIANTS[row.block].items():
            at = {"block": row.block, "row": row.name, "variant": variant}
            cells.append({**at, **cell(tools, sources[what], dtype, folder / "out")})
        shutil.rmtree(folder)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(json.dumps({"builder": tools.name, "device": device, "cells": cells}))


if __name__ == "__main__":
    main(*sys.argv[1:])
