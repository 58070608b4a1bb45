"""An export as a finished result: what its own report does not tell is read from its files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.in_memory import require_files
from compress.errors import CompressError, RequestError
from compress.formats import Weights, open_weights
from compress.inspect.facts import result_of, source_of
from compress.machine.environment import machine
from compress.plan.cache_scales import cache_of
from compress.report.schema import RecipeInfo, Report, StageRecord

EXPORT = "export"


def report_of_export(folder: Path, path: Path) -> Report | None:
    """What a comparison reads of a result, without any quality: an export was measured on nothing.

    folder: of the result; path: its report.json. None for the report of anything else. RequestError
    for an artifact that only its own runtime opens, and where the source is gone.
    """
    try:
        told = json.loads(path.read_bytes())
        if told["command"] != EXPORT:
            return None
        source, target = told["source"], told["result"]
        before, size = str(source["path"]), int(source["bytes"])
        kind = str(target.get("target") or target["format"])
    except (OSError, ValueError, TypeError, LookupError):
        return None  # who reads it as the report of a run says what is wrong with it
    origin = _source(folder, before, size)
    return _report(told, origin, _opened(folder, kind, before))


def _opened(folder: Path, kind: str, source: str) -> Weights:
    try:
        return open_weights(Checkpoint.open(folder))
    except CompressError as error:
        raise RequestError(
            f"{folder} holds an export to {kind}, which is not opened here to be measured"
            f" ({error}); give the checkpoint that it was made of, {source}, or an export that"
            " `eval` opens"
        ) from None


def _source(folder: Path, path: str, size: int) -> Weights:
    require_files(path, f"{folder} holds an export, whose source")
    try:
        found = open_weights(Checkpoint.open(resolve_model(path)).sealed())
    except CompressError as error:
        raise RequestError(
            f"{folder} holds an export, whose source cannot be read to measure it: {error}"
        ) from None
    if found.checkpoint.file_bytes != size:
        raise RequestError(
            f"{folder} holds an export, whose source {path} has changed since; export it anew"
        )
    return found


def _report(told: Mapping[str, Any], source: Weights, result: Weights) -> Report:
    checkpoint = source.checkpoint
    seconds = told.get("seconds", 0.0)
    took = sum(seconds.values()) if isinstance(seconds, Mapping) else seconds
    return Report(
        tool="compress-model",
        versions=dict(told["versions"]),
        recipe=RecipeInfo("", ""),
        seed=0,
        source=source_of(checkpoint, source.spec, checkpoint.sha256(), cache_of(source)),
        result=result_of(result),
        stages=(StageRecord(EXPORT, float(took), int(told["peak_rss_bytes"])),),
        machine=machine("cpu"),
        started="",
        finished="",
        command=EXPORT,
        notes=tuple(told["notes"]),
    )
