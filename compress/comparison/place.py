"""OUT of a comparison: a folder for each result, compare.json and compare.html.

compare.json says from the start what was asked, so that a comparison that was stopped goes on with
the same, and nothing else takes its folder for its own.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.checkpoint import disk, locked, require_idle, write_atomic
from compress.checkpoint.jsonfile import as_json
from compress.checkpoint.regular import usable
from compress.errors import OutputError
from compress.report.comparison.page import write_page
from compress.report.comparison.records import Comparison

JSON, PAGE = "compare.json", "compare.html"
_BEGUN = "begun"  # the key of what was asked, while there is no result yet
# What could not be asked of earlier versions, as they did it: theirs are gone on with.
_LATER: Mapping[str, Any] = MappingProxyType({"trainings": False})


def check_place(out: str | Path, *, resume: bool) -> Path:
    """OutputError unless the comparison may write there; nothing is changed."""
    folder = usable(out, "out", OutputError).absolute()
    require_idle(folder)
    held = _begun(folder)
    if resume:
        if held is None:
            raise OutputError(f"{folder} holds no comparison that was stopped; leave --resume out")
        return folder
    if held is not None:
        raise OutputError(
            f"{folder} holds a comparison that was stopped; go on with --resume, or remove it"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is not an empty folder; choose another one for the comparison")
    return folder


@contextmanager
def working_in(folder: Path, asked: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder, made where it is not there, while results come into it. asked: what makes
    two comparisons the same. OutputError where another one was begun there."""
    held = _begun(folder)
    if held is not None:
        _refuse_other(folder, held, asked)
    with disk.refusing(f"make {folder}", "choose another folder for the comparison"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if held is None:
            write_atomic(folder / JSON, as_json({_BEGUN: dict(asked)}))
        try:
            yield
        except BaseException:
            if [path.name for path in folder.iterdir()] == [JSON]:  # nothing to go on with
                with suppress(OSError):
                    disk.unlink(folder / JSON)
                    os.rmdir(folder)
            raise


def publish_comparison(found: Comparison, folder: Path) -> Path:
    """Write page and record, which ends the comparison. Returns the page."""
    write_page(found, folder / PAGE, write_atomic)
    write_atomic(folder / JSON, found.to_json().encode())
    return folder / PAGE


def _begun(folder: Path) -> dict[str, Any] | None:
    """What a comparison that was stopped there was asked; None where there is none."""
    try:
        held = json.loads((folder / JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    begun = held.get(_BEGUN) if isinstance(held, dict) else None
    return begun if isinstance(begun, dict) else None


def _refuse_other(folder: Path, held: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before = {**_LATER, **held}
    differences = [
        _difference(key, before.get(key), now.get(key))
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise OutputError(
            f"{folder} cannot be resumed, it belongs to another comparison:"
            f" {'; '.join(differences)}; remove it to start again"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    """Of what has names, as the recipes of a comparison, which take lines each, only the names."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [x for x in {**before, **now} if before.get(x) != now.get(x)]
        return f"{key} differ in {', '.join(names)}"
    return f"{key} was {before}, is {now}"
