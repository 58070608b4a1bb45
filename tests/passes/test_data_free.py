"""Data-free recipes stay light: tensors stream, no module and no transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import REPO
from helpers.short_runs import RTN, recipe_file

CODE = """
import sys, json
from compress.verbs import make_plan, run
make_plan(sys.argv[1], sys.argv[2])
report = run(sys.argv[1], sys.argv[2], sys.argv[3])
heavy = ("transformers", "tokenizers", "datasets", "pyarrow", "jinja2", "compress.blocks.model")
print(json.dumps({
    "loaded": [name for name in heavy if name in sys.modules],
    "layers": len(report.stages[0].layers),
}))
"""


def test_data_free_runs_load_no_transformers_and_build_no_module(tiny, tmp_path: Path) -> None:
    path = recipe_file(tmp_path, RTN)
    roots = [str(REPO / root) for root in ("", "calibration", "exporters", "kernels")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(tiny("mixtral")), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"loaded": [], "layers": 2 * (4 + 1 + 12) + 2}
