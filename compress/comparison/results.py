"""Finished results as contenders, all measured on the same tokens."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint.in_memory import was_in_memory
from compress.comparison.exported import EXPORT, report_of_export
from compress.comparison.options import CompareOptions
from compress.comparison.routes import Route, route_of
from compress.errors import RequestError
from compress.report.codec import read_json
from compress.report.comparison.records import Contender, LeftOut, Measuring, by_size, front
from compress.report.records.quality import TextQuality
from compress.report.schema import Export, Report
from compress.report.summary import headline
from compress.report.terminal.copied import as_blocks

REPORT = Path("report", "report.json")


@dataclass(frozen=True, slots=True)
class Finished:
    """A result with its report. name: in the comparison. command: the line that makes it again;
    empty where nobody knows.

    opens: as what it is measured, where that is a file made of it. bits: of a weight there.
    of_file: what was measured of that, in place of what the report says of the checkpoint.
    """

    name: str
    folder: Path
    report: Report
    command: str = ""
    opens: Path | None = None
    bits: float | None = None
    of_file: TextQuality | None = None

    @property
    def text(self) -> TextQuality | None:
        """What it was measured on, where that has a KL and tells its tokens."""
        found = headline(self.report) if self.opens is None else self.of_file
        whole = found is not None and None not in (found.kl, found.sha256, found.ppl_source)
        return found if whole else None


def read_finished(folder: str | Path) -> Finished:
    """OutputError for a folder without the report of a run or an export, RequestError for an export
    that cannot be measured."""
    path = Path(folder).absolute()
    report = report_of_export(path, path / REPORT) or read_json(path / REPORT)
    return Finished(path.name, path, report, _command(path, report))


def _command(folder: Path, report: Report) -> str:
    """The line that makes a result again, by the recipe that lies in it: as it was read, with what
    the command line changed, and what a target chose. Empty where its source is gone."""
    recipe, source = folder / "recipe.yaml", report.source.path
    if not recipe.is_file() or was_in_memory(source) or not Path(source).exists():
        return ""
    line = ["run", str(recipe), "--model", source, "--out", folder.name]
    return shlex.join(["compress-model", *line])


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


def loaded_file(each: Finished, asked: CompareOptions) -> Export | LeftOut | None:
    """The artifact that the runtime loads, left out where it could not be made; None where it loads
    the result itself."""
    route = None if asked.runtime is None else route_of(asked.runtime)
    if route is None or route.export is None or each.report.result.format == route.format:
        return None
    made = next((x for x in each.report.exports if x.target == route.export), None)
    if made is None:
        return LeftOut(each.name, _why_no_file(each, route))
    places = (each.folder / made.path / name for name in made.files)
    gone = next((place for place in places if not place.is_file()), None)
    return made if gone is None else LeftOut(each.name, f"{gone} is no more")


def contender(each: Finished, text: TextQuality, asked: CompareOptions) -> Contender | LeftOut:
    """A result in the comparison; left out where the file of the runtime could not be made."""
    result, notes = each.report.result, each.report.notes
    made = loaded_file(each, asked)
    if isinstance(made, LeftOut):
        return made
    size, file = result.bytes, "gguf" if result.format == "gguf" else "checkpoint"
    if made is not None:
        size, file = made.bytes, made.target
        notes = (*notes, *made.notes)
    assert text.kl is not None
    assert text.top1_agreement is not None
    return Contender(
        name=each.name,
        path=str(each.folder),
        bytes=size,
        file=file,
        bits_per_weight=result.bits_per_weight if each.bits is None else each.bits,
        kl=text.kl,
        perplexity=text.ppl_result,
        top1_agreement=text.top1_agreement,
        kv_bytes_per_token=result.kv_bytes_per_token,
        seconds=each.report.seconds,
        command=each.command,
        notes=tuple(notes),
        open_with=_starting(each, made, asked),
    )


def _starting(each: Finished, made: Export | None, asked: CompareOptions) -> tuple[str, ...]:
    """Lines that start what was asked for, a block to copy each; all that open it where nobody has
    one for that."""
    blocks = as_blocks(each.report.open_with) if made is None else list(made.open_with)
    begin = "" if asked.runtime is None else route_of(asked.runtime).starts
    return tuple([x for x in blocks if x.startswith(begin)] or blocks)


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
