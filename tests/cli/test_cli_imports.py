"""Help is instant: no help text imports torch or transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import compress
from compress import verbs
from compress.cli.main import COMMANDS

REPO = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "transformers", "numpy", "datasets", "pyarrow", "jinja2", "tokenizers"]
SCRIPT = f"""
import json, sys
from compress.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]), file=sys.stderr)
"""
ARGUMENTS = [["--help"], ["--version"], ["recipes"], *([name, "--help"] for name in COMMANDS)]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": ""},
        check=True,
    )
    assert json.loads(done.stderr) == [0, []]
    assert done.stdout


def test_module_runs() -> None:
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    done = subprocess.run(
        [sys.executable, "-m", "compress.cli", "--version"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": ""},
        check=True,
    )
    assert done.stdout.startswith("compress-model, version ")


def test_the_package_lists_what_it_loads_late() -> None:
    assert "run" in dir(compress)
    assert {"run", "make_plan"} <= set(dir(verbs))


@pytest.mark.parametrize("line", ["compare small --for ", "export small --type ", "run "])
def test_completing_imports_nothing_heavy(line: str) -> None:
    """A shell waits for it at each press of a key; torch alone takes 1.3 s."""
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    words = f"compress-model {line}"
    place = str(len(words.split(" ")) - 1)
    asked = {"_COMPRESS_MODEL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": "", **asked},
        check=True,
    )
    assert json.loads(done.stderr) == [0, []]
    assert done.stdout.startswith("plain,")
