"""What makes two runs the same: recipe, source and environment. A resumed run must match."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.checkpoint import Checkpoint
from compress.errors import OutputError
from compress.recipe import Recipe, dump
from compress.report.codec import read_json


def marks(
    recipe: Recipe, sha256: str, side_files: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Everything the bytes of a result depend on, by name.

    sha256: of the source's weights and config. side_files: name -> sha256 of what goes along.
    """
    return {
        **_source(sha256, side_files),
        **_flat(yaml.safe_load(dump(recipe)), "recipe"),
        **environment,
    }


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


def refuse_other_result(
    folder: Path, recipe: Recipe, sha256: str, side_files: Mapping[str, str], *, is_open: bool
) -> None:
    """The same for a complete result whose journal is gone: by its recipe, report and files.

    is_open: nobody knows any more what the recipe's targets chose, so its stages are told by its
    words.
    """
    report = read_json(folder / "report" / "report.json")
    try:
        before = _flat(yaml.safe_load((folder / "recipe.yaml").read_text()), "recipe")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OutputError(
            f"cannot read {folder / 'recipe.yaml'}; remove {folder} and start again"
        ) from error
    before |= _source(report.source.sha256, Checkpoint.open(folder).side_hashes())
    now = marks(recipe, sha256, side_files, {})
    if is_open:
        before, now = _but_chosen(before), _but_chosen(now)
        before |= _words(report.recipe.text, report.recipe.overrides)
        now |= _words(recipe.text, recipe.overrides)
    refuse_other(folder, before, now)


def _but_chosen(marks: Mapping[str, str]) -> dict[str, str]:
    """Without what a target fills in."""
    chosen = ("recipe.stages", "recipe.description")
    return {key: value for key, value in marks.items() if not key.startswith(chosen)}


def _words(text: str, overrides: Sequence[str]) -> dict[str, str]:
    return {"recipe": text, "recipe's --set": " ".join(overrides)}


def _source(sha256: str, side_files: Mapping[str, str]) -> dict[str, str]:
    return {"source.sha256": sha256, **{f"source.{k}": v for k, v in side_files.items()}}


def _flat(value: Any, path: str) -> dict[str, str]:
    """Key path -> value of every leaf, so that a difference can be shown by its place."""
    if isinstance(value, dict):
        parts = [_flat(v, f"{path}.{k}") for k, v in value.items()]
    elif isinstance(value, list):
        parts = [_flat(v, f"{path}[{i}]") for i, v in enumerate(value)]
    else:
        return {path: str(value)}
    return {key: leaf for part in parts for key, leaf in part.items()}
