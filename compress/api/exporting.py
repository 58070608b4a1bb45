"""An export by one set of options, whichever kind of target it has."""

from pathlib import Path
from typing import Any

from compress.api.options import ExportOptions
from compress.artifacts.export import dry_artifact, export_artifact
from compress.artifacts.plan import ArtifactTarget, is_target
from compress.artifacts.report import ArtifactReport
from compress.convert.convert import Conversion, dry_export, export
from compress.convert.report import ExportReport
from compress.errors import OutputError
from compress.events import Progress
from compress.sharing.share import ready
from compress_exporters.exporter import Options

# Options of every export.
_ALL = frozenset({"overwrite", "dry_run", "push", "track"})
# And of one kind: what a proof and a folder of its own are asked of.
_OF_RUNTIMES = frozenset({"verify"})


def export_model(
    model: str | Path,
    to: str,
    out: str | Path | None,
    options: ExportOptions,
    progress: Progress | None,
) -> ExportReport | ArtifactReport:
    """A CompressError for what cannot be, and for an option that the target does not have."""
    if options.in_place and options.push is not None:
        raise OutputError("push takes a folder of its own, and in_place=True makes none")
    share = ready(options.push, options.track, progress)
    work = _for_runtime if is_target(to) else _in_format
    report = work(model, to, out, options, progress)
    if not options.dry_run:
        share.export(report.to_json(), None if out is None else Path(out))
    return report


def _for_runtime(
    model: str | Path,
    to: str,
    out: str | Path | None,
    options: ExportOptions,
    progress: Progress | None,
) -> ArtifactReport:
    _refuse(options, Options, _OF_RUNTIMES, to)
    target, overwrite = ArtifactTarget(to, Options(**options.given(Options))), options.overwrite
    if options.dry_run:
        return dry_artifact(model, target, out, overwrite=overwrite)
    return export_artifact(
        model, target, out, verify=options.verify, overwrite=overwrite, progress=progress
    )


def _in_format(
    model: str | Path,
    to: str,
    out: str | Path | None,
    options: ExportOptions,
    progress: Progress | None,
) -> ExportReport:
    _refuse(options, Conversion, frozenset(), to)
    how, overwrite = Conversion(**options.given(Conversion)), options.overwrite
    if options.dry_run:
        return dry_export(model, to, out, options=how, overwrite=overwrite)
    if out is None:
        raise OutputError("the result has no folder; give `out`, or dry_run=True in options")
    return export(model, to, out, options=how, overwrite=overwrite, progress=progress)


def _refuse(options: ExportOptions, kind: type[Any], more: frozenset[str], to: str) -> None:
    """OutputError for an option that is set, and that this kind of target has not."""
    known = {*options.given(kind), *_ALL, *more}
    strange = next((name for name in options.set_values() if name not in known), None)
    if strange is not None:
        value = options.set_values()[strange]
        raise OutputError(f"{strange} is {value!r}, and {to} takes none; leave it out")
