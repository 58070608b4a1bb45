"""benchmarks/results/structure_GROUP.json: what was found of each point, by name."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.processes import RESULTS

Found = dict[str, Any]


def path_of(group: str) -> Path:
    return RESULTS / f"structure_{group}.json"


def load(group: str) -> Found:
    path = path_of(group)
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write(group: str, found: Mapping[str, Any]) -> None:
    """Replace the file as a whole."""
    path = path_of(group)
    fresh = path.with_suffix(".json.new")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(fresh, path)
