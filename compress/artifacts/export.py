"""From a checkpoint, dense or quantized, to an artifact of another runtime, proved before it is
there."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from compress.artifacts import in_place
from compress.artifacts.imatrix_place import delivered, imatrix_place, require_free
from compress.artifacts.plan import ArtifactPlan, ArtifactTarget, check_asked, plan_artifact
from compress.artifacts.report import ArtifactReport, Made, as_json, build, size_of, write
from compress.checkpoint.output.publishing import prepare, published
from compress.checkpoint.regular import usable
from compress.errors import OutputError
from compress.events import Progress, by_tenths, note, silent
from compress_exporters.exporter import InPlace, Written
from compress_exporters.gguf.imatrix_write import write_imatrix

STAGE = "export"


def dry_artifact(
    model: str | Path,
    target: ArtifactTarget,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
) -> ArtifactReport:
    """The report of an export that is not done; refuses all that an export into `out` would."""
    plan = _planned(model, target, out, overwrite=overwrite)
    where = None if out is None else usable(out, "out", OutputError).absolute()
    if plan.beside is not None:
        where = _place(plan, plan.beside, overwrite=overwrite).folder
    elif out is not None:
        prepare(out, plan.source.checkpoint.path, _needed(plan), overwrite=overwrite)
    return build(plan, where)


def export_artifact(
    model: str | Path,
    target: ArtifactTarget,
    out: str | Path | None = None,
    *,
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ArtifactReport:
    """Write the checkpoint `model` for another runtime into `out`.

    out: None where the target's options say that it goes beside the weights. verify: prove it
    before it appears. Raises a CompressError for whatever the user can mend.
    """
    plan = _planned(model, target, out, overwrite=overwrite)
    work = partial(_work, plan, verify=verify, progress=progress or silent)
    if plan.beside is not None:
        return _added(_place(plan, plan.beside, overwrite=overwrite), work)
    if out is None:
        raise OutputError("the artifact has no folder; give `out`, or Options(in_place=True)")
    output = prepare(out, plan.source.checkpoint.path, _needed(plan), overwrite=overwrite)

    def whole() -> ArtifactReport:
        report = work(output.partial, output.out, lambda _: output.partial)
        write(report, output.partial)
        if plan.imatrix is not None:
            require_free(plan.imatrix)  # again: minutes have passed
        return report

    with delivered(plan.imatrix):
        return published(output, whole)


def _planned(
    model: str | Path, target: ArtifactTarget, out: str | Path | None, *, overwrite: bool
) -> ArtifactPlan:
    """With the place of what is measured, which is looked at before the model is, and behind what
    is asked for."""
    check_asked(target, out)
    asked = target.options.imatrix_out
    place = None if asked is None else imatrix_place(asked, out, overwrite=overwrite)
    return replace(plan_artifact(model, target, out), imatrix=place)


def _needed(plan: ArtifactPlan) -> int:
    """Bytes of the disk: of the artifact, and of what lies beside it while it is made."""
    if plan.options.text is None:
        return plan.planned.size
    from compress.artifacts.rounding.of_export import beside_bytes

    return plan.planned.size + beside_bytes(plan)


@contextmanager
def _rounded(
    plan: ArtifactPlan, folder: Path, progress: Progress
) -> Iterator[tuple[ArtifactPlan, tuple[str, ...], Callable[[], Sequence[str]]]]:
    """The plan with weights rounded by its text, with what there is to tell of them, and with what
    writes what the text makes columns multiply, where it is asked for, and gives the names of what
    that left in the folder."""
    if plan.options.text is None:
        yield plan, (), tuple
        return
    # Late: blocks of transformers' own run for it.
    from compress.artifacts.rounding.of_export import Purpose, files_of, rounded, tokens_of_text

    tokens, purpose = tokens_of_text(plan), Purpose.of(plan)
    with rounded(plan.source, plan.planned, tokens, folder, progress, purpose) as found:

        def measured() -> Sequence[str]:
            if plan.imatrix is None:
                return ()
            path, older = plan.imatrix.written_at(folder), plan.imatrix.older
            texts = files_of(plan)
            write_imatrix(path, found.importance, found.chunk, texts, older=older)
            return (path.name,) if plan.imatrix.inside else ()

        yield replace(plan, planned=found.planned), found.told, measured


def _place(plan: ArtifactPlan, how: InPlace, *, overwrite: bool) -> in_place.InPlaceFolder:
    return in_place.prepare(how, plan.source.checkpoint, plan.planned.size, overwrite=overwrite)


def _added(place: in_place.InPlaceFolder, work: Callable[..., ArtifactReport]) -> ArtifactReport:
    def moved(written: Written) -> Path:
        in_place.move_into_place(place, written.files)
        return place.folder

    def whole() -> tuple[ArtifactReport, bytes]:
        report = work(place.work, place.folder, moved)
        return report, as_json(report)

    return in_place.added(place, whole)


def _work(
    plan: ArtifactPlan,
    folder: Path,
    out: Path,
    move: Callable[[Written], Path],
    *,
    verify: bool,
    progress: Progress,
) -> ArtifactReport:
    """Fills a folder; `move` tells where what was written is proved. out: where it will be."""
    began = time.perf_counter()
    with _rounded(plan, folder, progress) as (plan, told, measured):
        count = by_tenths(progress, STAGE, "tenth of the weights")
        written = plan.planned.write(folder, lambda name, done, total: count(done, total))
        # Behind the source's small files: an importance.dat may be one of them.
        beside = dict.fromkeys((*written.beside, *measured()))
        written = replace(written, notes=(*written.notes, *told), beside=tuple(beside))
    size = size_of(folder, written)
    proved_in = move(written)
    seconds, proof = {"write": time.perf_counter() - began}, None
    if verify:
        progress(note(STAGE, f"proving {plan.exporter.name} against the weights"))
        began = time.perf_counter()
        proof = plan.planned.verify(proved_in)
        seconds["verify"] = time.perf_counter() - began
    return build(plan, out, Made(written, size, proof, seconds))
