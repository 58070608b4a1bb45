"""What makes two runs the same: recipe, source and environment. A resumed run must match."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from compress.errors import OutputError
from compress.recipe import Recipe, dump
from compress.report.codec import read_json


def marks(recipe: Recipe, sha256: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Everything the bytes of a result depend on, by name. sha256: of the source."""
    return {"source.sha256": sha256, **_flat(yaml.safe_load(dump(recipe)), "recipe"), **environment}


def refuse_other(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """OutputError with every difference, when `folder` was begun by a run with other marks."""
    differences = [
        f"{key} was {before.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise OutputError(
            f"{folder} cannot be resumed, it belongs to another run: {'; '.join(differences)};"
            " remove it to start again"
        )


def refuse_other_result(folder: Path, recipe: Recipe, sha256: str) -> None:
    """The same for a complete result whose journal is gone: by its recipe and its report."""
    report = read_json(folder / "report" / "report.json")
    before = _flat(yaml.safe_load((folder / "recipe.yaml").read_text()), "recipe")
    refuse_other(
        folder,
        {"source.sha256": report.source.sha256, **before},
        marks(recipe, sha256, {}),
    )


def _flat(value: Any, path: str) -> dict[str, str]:
    """Key path -> value of every leaf, so that a difference can be shown by its place."""
    if isinstance(value, dict):
        parts = [_flat(v, f"{path}.{k}") for k, v in value.items()]
    elif isinstance(value, list):
        parts = [_flat(v, f"{path}[{i}]") for i, v in enumerate(value)]
    else:
        return {path: str(value)}
    return {key: leaf for part in parts for key, leaf in part.items()}
