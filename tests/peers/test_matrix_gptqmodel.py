"""Every kind of result that GPTQ's and AWQ's formats hold, in gptqmodel: cells of the matrix.

One process opens all of them. Its GPTQ kernel computes in fp32 here, AWQ's in fp16.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.matrix.rows import GPTQMODEL, LOADERS, ROWS
from benchmarks.processes import package_versions
from helpers.matrix_cells import NEW, PROMPTS, Made, MakeRow, Outputs, difference, facts, reference

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("matrix_gptqmodel_run.py")
FORMATS = [fmt for fmt, loaders in LOADERS.items() if GPTQMODEL in loaders]
BOUND, HALF_BOUND = 1e-4, 2e-2
IN_TRANSFORMERS = "in transformers with gptqmodel's kernels; gptqmodel by itself says"


def test_cells(
    gptqmodel_python: Path, matrix_row: MakeRow, record_property: Any, tmp_path: Path
) -> None:
    made = {row.name: matrix_row(row) for row in ROWS}
    written = [
        (name, fmt, folder)
        for name, row in made.items()
        for fmt in FORMATS
        if (folder := row.formats[fmt].folder) is not None
    ]
    _run(gptqmodel_python, [folder for _, _, folder in written], tmp_path)
    cells = []
    for name, fmt, folder in written:
        bound = HALF_BOUND if fmt == "awq" else BOUND
        found = _facts(made[name], folder, bound)
        cells.append({"method": name, "format": fmt, "loader": GPTQMODEL, **found})
        record_property("cell", json.dumps(cells[-1]))
    versions = package_versions(str(gptqmodel_python), ("gptqmodel", "transformers", "torch"))
    record_property("versions", json.dumps({GPTQMODEL: versions}))
    assert [cell for cell in cells if cell["outcome"] != "yes"] == []


def _facts(made: Made, folder: Path, bound: float) -> dict[str, Any]:
    error, file = folder.with_suffix(".error"), folder.with_suffix(".outputs")
    said = " ".join(error.read_text().split()) if error.exists() else ""
    if not file.exists():
        return {"outcome": "not loaded", "reason": said}
    found, expected = Outputs(**load_file(file)), reference(made)
    judged = facts(expected, difference(expected, found), found.tokens, bound)
    return {**judged, "notes": [f"{IN_TRANSFORMERS} {said}"] if said else []}


def _run(python: Path, checkpoints: list[Path], folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    save_file({"ids": PROMPTS}, folder / "prompts")
    arguments = [str(python), str(SCRIPT), str(folder / "prompts"), str(NEW)]
    done = subprocess.run(
        [*arguments, *map(str, checkpoints)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
