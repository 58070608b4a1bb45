"""What a result of ours holds, so that --overwrite never deletes anything else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.checkpoint import disk
from compress.checkpoint.sidefiles import FOLDER_OF_OUTLIERS

REPORT = "report"
_PAGE = f"{REPORT}/report.json"
_ONE_OF = ("recipe.yaml", f"{REPORT}/report.md")  # of a run, of an export
_FILES = frozenset(
    {
        *("config.json", "recipe.yaml", "README.md", "model.safetensors.index.json"),
        *("quantize_config.json", "hf_quant_config.json"),
    }
)
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_INSIDE = {
    REPORT: re.compile(r"report\.(json|html|md)"),
    FOLDER_OF_OUTLIERS: re.compile(r"outliers\.safetensors"),
}
_SHOWN = 3


def is_result(folder: Path) -> bool:
    """Whether a folder is a result of a run or an export, whole and with nothing added to it."""
    made = _made(folder)
    marked = (folder / _PAGE).is_file() and (bool(made) or (folder / "config.json").is_file())
    whole = all((folder / name).is_file() for name in made)
    any_of = any((folder / name).is_file() for name in _ONE_OF)
    return marked and whole and any_of and not foreign(folder)


def foreign(folder: Path) -> list[str]:
    """What lies in a folder and in no result, sorted; folders end in a slash."""
    known = _FILES | _copied(folder) | _made(folder)
    inside: dict[str, Callable[[str], object]] = {k: v.fullmatch for k, v in _INSIDE.items()}
    inside |= {name: files.__contains__ for name, files in _artifacts(folder).items()}
    found: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name in inside and path.is_dir() and not path.is_symlink():
            holds = inside[path.name]
            others = [p for p in sorted(path.iterdir()) if p.is_dir() or not holds(p.name)]
            found += [f"{path.name}/{_shown(p)}" for p in others]
        elif path.is_dir() or not (path.name in known or _WEIGHTS.fullmatch(path.name)):
            found.append(_shown(path))
    return found


def contents(folder: Path) -> str:
    """The first entries of a folder for a message, those first that no result has."""
    others = foreign(folder)
    names = others or [_shown(path) for path in sorted(folder.iterdir())]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def remove_result(folder: Path) -> None:
    """Remove a result; its report goes last, for it says which files are its own."""
    for path in sorted(folder.iterdir(), key=lambda p: (p.name == REPORT, p.name)):
        disk.remove_tree(path)
    disk.rmdir(folder)


def _copied(folder: Path) -> frozenset[str]:
    """Files that a result has from its source, by its own report."""
    try:
        return frozenset(map(str, _report(folder)["copied_files"]))
    except (OSError, ValueError, TypeError, LookupError):
        return frozenset()


def _made(folder: Path) -> frozenset[str]:
    """Files of an artifact for another runtime, by its own report; none for other results."""
    try:
        files = _report(folder)["result"]["files"]
        return frozenset(map(str, files)) if isinstance(files, list) else frozenset()
    except (OSError, ValueError, TypeError, LookupError):
        return frozenset()


def _artifacts(folder: Path) -> dict[str, frozenset[str]]:
    """Folders of artifacts inside of a run's result, and their files, by its own report."""
    try:
        rows = _report(folder)["exports"]
        return {str(row["path"]): frozenset(map(str, row["files"])) for row in rows}
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _report(folder: Path) -> Any:
    return json.loads((folder / _PAGE).read_bytes())


def _shown(path: Path) -> str:
    return f"{path.name}/" if path.is_dir() else path.name
