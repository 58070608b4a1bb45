"""The notebook of examples/ runs from its first cell to its last, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
NOTEBOOK = REPO / "examples" / "compress.ipynb"
# What a notebook does: it shows what the last line of a cell gives.
SHOWN = """
import ast, sys
names = {"__name__": "__main__"}
for cell in CELLS:
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        found = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        html = getattr(found, "_repr_html_", None)
        if found is not None:
            print(repr(found), "table" if html is not None and "</table>" in html() else "")
"""


def test_the_notebook_runs(demo_model: Path, tmp_path: Path) -> None:
    content = json.loads(NOTEBOOK.read_text())
    cells = ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    assert not any(c.get("outputs") for c in content["cells"])
    (tmp_path / "examples").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "examples" / "tale-6m").symlink_to(demo_model)
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", f"CELLS = {cells!r}\n{SHOWN}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "<Plan int4-rtn: llama, 6 blocks, 12.3 MB -> 4.8" in done.stdout
    assert "<Report tale-6m int4-rtn: 12.3 MB -> 4.8" in done.stdout
    assert done.stdout.count("> table\n") >= 4
    assert "quantize: 100%" in done.stderr
    assert done.stdout.rstrip().endswith("or give overwrite=True in options")
