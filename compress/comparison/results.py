"""Finished results as contenders, all measured on the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint import Checkpoint, resolve_model
from compress.comparison.exported import EXPORT, report_of_export
from compress.comparison.options import CompareOptions
from compress.comparison.routes import Route, route_of
from compress.errors import CompressError, RequestError
from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
from compress.events import Progress, note
from compress.report.codec import read_json
from compress.report.comparison.records import Contender, LeftOut, Measuring, by_size, front
from compress.report.records.quality import TextQuality
from compress.report.schema import Report
from compress.report.summary import headline
from compress.runs.options import RunOptions

REPORT = Path("report", "report.json")


@dataclass(frozen=True, slots=True)
class Finished:
    """A result with its report. name: in the comparison. command: the line that makes it; empty
    where nobody knows."""

    name: str
    folder: Path
    report: Report
    command: str = ""

    @property
    def text(self) -> TextQuality | None:
        """What it was measured on, where that has a KL and tells its tokens."""
        found = headline(self.report)
        whole = found is not None and None not in (found.kl, found.sha256, found.ppl_source)
        return found if whole else None


def read_finished(folder: str | Path) -> Finished:
    """OutputError for a folder without the report of a run or an export, RequestError for an export
    that cannot be measured."""
    path = Path(folder)
    report = report_of_export(path, path / REPORT) or read_json(path / REPORT)
    return Finished(path.name or path.absolute().name, path.absolute(), report)


def is_finished(folder: str | Path) -> bool:
    return (Path(folder) / REPORT).is_file()


def check_finished(results: Sequence[Finished]) -> None:
    """RequestError for results of different sources, for reports of anything else than runs, and
    for two that go by one name."""
    first = results[0]
    for each in results:
        if each.report.command not in ("run", EXPORT):
            raise RequestError(
                f"{each.folder} holds the report of `{each.report.command}`; give results of `run`"
                " or `export`"
            )
        if each.report.source.sha256 != first.report.source.sha256:
            raise RequestError(
                f"{each.folder} was made of {each.report.source.path}, {first.folder} of"
                f" {first.report.source.path}, which is another model; compare results of one"
            )
    names = [each.name for each in results]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two results are called {name!r}; rename one of their folders")


@dataclass(frozen=True, slots=True)
class Ruler:
    """What results are measured with anew: the text that is asked for, else text of their source's
    own, as built-in recipes have it."""

    asked: CompareOptions
    options: RunOptions
    progress: Progress

    def alike(
        self, results: Sequence[Finished], *, settled: bool
    ) -> list[tuple[Finished, TextQuality]]:
        """Each with its quality on the same tokens. settled: they were run on the text that is
        asked for.

        RequestError for one that was measured on others and whose source is gone or changed.
        """
        tokens = [None if each.text is None else each.text.sha256 for each in results]
        if len(set(tokens)) == 1 and tokens[0] is not None and (settled or not self.asked.text):
            return [(each, _quality(each)) for each in results]
        # What most have may be what the ruler says: then only the others are measured.
        most = max(tokens, key=tokens.count)
        odd = next((i for i, sha256 in enumerate(tokens) if sha256 != most), 0)
        anew = {odd: self._measured(results[odd])}
        for i, each in enumerate(results):
            if i not in anew and tokens[i] != anew[odd].sha256:
                anew[i] = self._measured(each)
        return [(each, anew.get(i) or _quality(each)) for i, each in enumerate(results)]

    def _how(self, text: str, most: int | None) -> EvaluationOptions:
        place, kept = self.options.device, self.options.cache
        return EvaluationOptions((text,), max_tokens=most, device=place, cache=kept)

    def _measured(self, each: Finished) -> TextQuality:
        """Measured anew, against the source that its report names."""
        self.progress(note("compare", f"{each.name} is measured on the tokens of the others"))
        text, most = self.asked.text or "self", self.asked.max_tokens
        report = evaluate_checkpoint(
            each.folder,
            self._how(text, most),
            against=_source(each),
            progress=self.progress,
        )
        found = headline(report)
        assert found is not None, "an evaluation has all texts or fails"
        return found


def _quality(each: Finished) -> TextQuality:
    text = each.text
    assert text is not None, "only results that tell their tokens come here"
    return text


def _source(each: Finished) -> Path:
    """The source of a result. RequestError where it is gone, or another model by now."""
    path, before = each.report.source.path, each.report.source.sha256
    try:
        found = Checkpoint.open(resolve_model(path))
        changed = found.sha256() != before
    except CompressError as error:
        raise RequestError(
            f"{each.folder} was measured on other tokens, and its source cannot be read to measure"
            f" it anew: {error}"
        ) from None
    if changed:
        raise RequestError(
            f"{each.folder} was measured on other tokens, and its source {path} has changed since;"
            " make it anew"
        )
    return found.path


def contender(each: Finished, text: TextQuality, asked: CompareOptions) -> Contender | LeftOut:
    """A result in the comparison; left out where the file of the runtime could not be made."""
    result, notes = each.report.result, each.report.notes
    route = None if asked.runtime is None else route_of(asked.runtime)
    size, file = result.bytes, "checkpoint"
    if route is not None and route.export is not None and result.format != route.format:
        made = next((x for x in each.report.exports if x.target == route.export), None)
        if made is None:
            return LeftOut(each.name, _why_no_file(each, route))
        size, file = made.bytes, made.target
        notes = (*notes, *made.notes)
    assert text.kl is not None
    assert text.top1_agreement is not None
    return Contender(
        name=each.name,
        path=str(each.folder),
        bytes=size,
        file=file,
        bits_per_weight=result.bits_per_weight,
        kl=text.kl,
        perplexity=text.ppl_result,
        top1_agreement=text.top1_agreement,
        kv_bytes_per_token=result.kv_bytes_per_token,
        seconds=each.report.seconds,
        command=each.command,
        notes=tuple(notes),
    )


def _why_no_file(each: Finished, route: Route) -> str:
    said = (x for x in each.report.warnings if x.startswith(f"export to {route.export}"))
    return next(
        said, f"it has no file for {route.name}; `run` makes one with export: [{route.export}]"
    )


def measuring_of(text: TextQuality) -> Measuring:
    assert text.sha256 is not None
    assert text.ppl_source is not None
    return Measuring(
        text.name, text.tokens, text.sha256, text.ppl_source, settings=dict(text.settings)
    )


def with_fronts(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """Sorted by size, each told whether it is on a front."""
    kl = front((x.name, x.bytes, x.kl) for x in contenders)
    perplexity = front((x.name, x.bytes, x.perplexity) for x in contenders)
    return tuple(
        replace(x, on_kl_front=x.name in kl, on_perplexity_front=x.name in perplexity)
        for x in by_size(contenders)
    )
