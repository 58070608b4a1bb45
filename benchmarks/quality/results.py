"""benchmarks/results/quality_GROUP.json: cells by model, row and tool, filled as they are made."""

import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import RESULTS
from benchmarks.quality.rows import CALIBRATION, DOCUMENTS, LENGTH, SAMPLES, TEXT, Cell
from benchmarks.quality.tools import MEASURES

COSTS = ("wall_s", "cpu_s", "peak_rss_mb", "machine_used_by_others")
Found = dict[str, Any]


def path_of(group: str) -> Path:
    return RESULTS / f"quality_{group}.json"


def load(group: str) -> Found:
    path = path_of(group)
    return dict(json.loads(path.read_text())) if path.is_file() else {"models": {}}


def find(group: str, model: str, row: str, tool: str) -> Found | None:
    """The stored cell, None when it has not been made."""
    found: Found | None = load(group)["models"].get(model, {}).get(row, {}).get(tool)
    return found


def store(cell: Cell, result: Mapping[str, Any]) -> None:
    """Put one cell into its group's file, whatever else runs beside this."""
    with locked(path_of(cell.row.group)):
        whole = load(cell.row.group)
        whole["calibration"] = f"{SAMPLES} rows of {LENGTH} tokens of {CALIBRATION.name}"
        whole["text"] = f"first {DOCUMENTS} documents of {TEXT.name}"
        model = whole["models"].setdefault(cell.model.name, {})
        model.setdefault(cell.row.name, {})[cell.tool] = dict(result)
        path = path_of(cell.row.group)
        fresh = path.with_suffix(".json.new")
        fresh.write_text(json.dumps(whole, indent=1) + "\n")
        os.replace(fresh, path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder of a file, so that two runs do not lose each other's cells."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def summary(
    qualities: Sequence[Mapping[str, float]], costs: Sequence[Mapping[str, float]]
) -> Found:
    """Means over the seeds, their standard errors where there is more than one, and every run."""
    runs = [{**q, **cost_of(c)} for q, c in zip(qualities, costs, strict=True)]
    names = (*MEASURES, *COSTS)
    return {
        "perplexity_source": round(qualities[0]["perplexity_source"], 5),
        "mean": {n: round(statistics.fmean(r[n] for r in runs), 5) for n in names},
        "standard_error": {n: round(standard_error([r[n] for r in runs]), 5) for n in MEASURES},
        "by_seed": [{n: round(r[n], 5) for n in names} for r in runs],
    }


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value, which is what a method gives that sees no data."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def cost_of(cost: Mapping[str, float]) -> dict[str, float]:
    return {
        "wall_s": cost["wall_s"],
        "cpu_s": cost["cpu_s"],
        "peak_rss_mb": cost["peak_rss_bytes"] / 1e6,
        "machine_used_by_others": cost["others"],
    }
