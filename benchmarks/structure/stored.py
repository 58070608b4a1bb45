"""benchmarks/results/STUDY_GROUP.json: what was found of each point, by name."""

import json
import os
from collections.abc import Mapping
from typing import Any

from benchmarks.processes import RESULTS

Found = dict[str, Any]


def load(file: str) -> Found:
    path = RESULTS / file
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write(file: str, found: Mapping[str, Any]) -> None:
    """Replace the file as a whole."""
    path = RESULTS / file
    fresh = path.with_suffix(".json.new")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(fresh, path)
