"""Figures that tests record: `record_property(name, json)`, read back from pytest's report."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.processes import REPO


def measure(
    tests: Iterable[str], names: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, list[Any]]:
    """What these tests recorded under each name, in their order; SystemExit where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        _run(tests, report, environment or {})
        return {name: list(_recorded(report, name)) for name in names}


def _run(tests: Iterable[str], report: Path, environment: Mapping[str, str]) -> None:
    options = ["-q", "-m", "interop or peers", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    everything = {**os.environ, **environment}
    if subprocess.run(command, cwd=REPO, env=everything, check=False).returncode:
        sys.exit("a test failed, so nothing is stored")


def _recorded(report: Path, name: str) -> Iterator[Any]:
    for found in ElementTree.parse(report).iter("property"):
        if found.get("name") == name:
            yield json.loads(found.get("value", ""))
