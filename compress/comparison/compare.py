"""`compress-model compare`: which recipe is best for a model, or which of some results.

Recipes run one after the other, each as `run` does by itself, into a folder of OUT; what they share
is made once, as it is kept (compress/usercache).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compress.checkpoint import Checkpoint, disk, resolve_model
from compress.checkpoint.in_memory import was_in_memory
from compress.comparison.entrants import STAGE, Entrant, entrants
from compress.comparison.options import CompareOptions
from compress.comparison.place import check_place, publish_comparison, working_in
from compress.comparison.results import (
    Finished,
    check_finished,
    contender,
    is_finished,
    measuring_of,
    read_finished,
    with_fronts,
)
from compress.comparison.routes import route_of
from compress.comparison.ruler import Ruler
from compress.comparison.speeds import predicted_speeds
from compress.errors import CompressError, RequestError
from compress.events import Progress, note, silent
from compress.machine.device import settle
from compress.machine.environment import machine, versions
from compress.report.comparison.records import Comparison, Contender, LeftOut, chosen
from compress.report.records.quality import TextQuality
from compress.runs.options import RunOptions
from compress.runs.run import run

KEPT = ".kept"  # in OUT: what results share, where the user's cache is not to be used
_SHOWN = 3


def compare(
    what: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    recipes: Sequence[str | Path] = (),
    asked: CompareOptions | None = None,
    options: RunOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Hold recipes against each other on one model, or finished results of one model.

    what: a model, or the folders of two results or more. out: a new folder for all results,
    compare.json and compare.html. recipes: files and names; all built-in ones that load where
    `asked` says, and train nothing unless it says trainings, when left out. options: as of `run`;
    resume and overwrite are not of a comparison.

    Raises a CompressError for what the user can mend, before any work where possible.
    """
    started = datetime.now(UTC)
    asked, options = asked or CompareOptions(), options or RunOptions()
    progress = progress or silent
    options = replace(options, device=settle(options.device, progress).name)
    if asked.runtime is not None:
        route_of(asked.runtime)
    folder = check_place(out, resume=asked.resume)
    named = [what] if isinstance(what, str | Path) else list(what)
    finished = len(named) != 1 or is_finished(named[0])
    if asked.trainings and (recipes or finished):
        what_runs = "nothing is run" if finished else "recipes are named"
        raise RequestError(f"--trainings adds built-in recipes, and {what_runs}; leave it out")
    if options.cache is False:
        options = replace(options, cache=folder / KEPT)
    work = _Work(folder, asked, options, progress, started)
    return work.of_results(named, recipes) if finished else work.of_recipes(named[0], recipes)


@dataclass(frozen=True, slots=True)
class _Work:
    """A comparison in progress. folder: OUT."""

    folder: Path
    asked: CompareOptions
    options: RunOptions
    progress: Progress
    started: datetime

    def of_recipes(self, model: str | Path, recipes: Sequence[str | Path]) -> Comparison:
        """Run those that load, and compare what came of them."""
        source = resolve_model(model)
        runs, left = entrants(recipes, model, self.asked, self.options, self.progress)
        if not runs:
            raise RequestError(f"no recipe is left to run on {model}: {_reasons(left)}")
        with working_in(self.folder, self._marks(source, runs)):
            results: list[Finished] = []
            for number, entrant in enumerate(runs, start=1):
                said = f"{entrant.name}, recipe {number} of {len(runs)}"
                self.progress(note(STAGE, said))
                made = self._made(entrant, model)
                if isinstance(made, LeftOut):
                    left.append(made)
                else:
                    results.append(made)
            return self._published(results, left, settled=True)

    def of_results(
        self, folders: Sequence[str | Path], recipes: Sequence[str | Path]
    ) -> Comparison:
        """Compare what is there."""
        if recipes:
            raise RequestError(
                f"{folders[0]} is a finished result, and recipes run on a model; give one of them"
            )
        if len(folders) < 2:
            raise RequestError(f"{folders[0]} is one finished result; give two or more, or a model")
        results = [read_finished(folder) for folder in folders]
        check_finished(results)
        asked = {"results": [str(x.folder) for x in results], **self._asked()}
        with working_in(self.folder, asked):
            return self._published(results, [], settled=False)

    def _made(self, entrant: Entrant, model: str | Path) -> Finished | LeftOut:
        """The result of a recipe, run here or by the process that was stopped."""
        folder = self.folder / entrant.name
        command = entrant.command(model, self.options)
        if is_finished(folder):
            return replace(read_finished(folder), command=command)
        begun = any(Path(f"{folder}.{x}").exists() for x in ("partial", "publishing"))
        options = replace(self.options, resume=begun, overwrite=False)
        try:
            run(
                entrant.recipe,
                model,
                folder,
                overrides=entrant.overrides,
                options=options,
                progress=self.progress,
            )
        except CompressError as error:
            if begun:
                raise
            return LeftOut(entrant.name, str(error))
        return replace(read_finished(folder), command=command)

    def _published(
        self, results: Sequence[Finished], left: list[LeftOut], *, settled: bool
    ) -> Comparison:
        """Measure what is not measured alike, predict, choose, and write that down."""
        if not results:
            raise RequestError(f"nothing is left to compare: {_reasons(left)}")
        with TemporaryDirectory(prefix="compress-model-") as scratch:
            ruler = Ruler(self.asked, self.options, self.progress, Path(scratch))
            measured = ruler.alike(results, settled=settled)
            judged = [(each, contender(each, text, self.asked)) for each, text in measured]
            left += [x for _, x in judged if isinstance(x, LeftOut)]
            found = [(each, x) for each, x in judged if isinstance(x, Contender)]
            comparison = self._with_speeds(found, measured[0], left)
        if (self.folder / KEPT).is_dir():
            disk.remove_tree(self.folder / KEPT)
        publish_comparison(comparison, self.folder)
        return comparison

    def _with_speeds(
        self,
        judged: Sequence[tuple[Finished, Contender]],
        first: tuple[Finished, TextQuality],
        left: Sequence[LeftOut],
    ) -> Comparison:
        each, text = first
        path = each.report.source.path
        own_place = [Path(path)] if not was_in_memory(path) and Path(path).is_dir() else []
        folders = [*(one.opens or one.folder for one, _ in judged), *own_place]
        speeds, reason = predicted_speeds(folders, self.options, self.progress)
        found = [
            replace(x, tokens_per_second=speed)
            for (_, x), speed in zip(judged, speeds[: len(judged)], strict=True)
        ]
        contenders = with_fronts(found)
        own = speeds[len(found)] if own_place else None
        winner = chosen(contenders, self.asked.wanted)
        return Comparison(
            tool="compress-model",
            versions=versions(),
            source=each.report.source,
            measured=replace(measuring_of(text), tokens_per_second=own),
            wanted=self.asked.wanted,
            contenders=contenders,
            left_out=tuple(left),
            machine=machine(self.options.device),
            started=self.started.isoformat(timespec="seconds"),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            winner=None if winner is None else winner.name,
            speed_reason=reason,
        )

    def _marks(self, source: Path, runs: Sequence[Entrant]) -> dict[str, Any]:
        """What makes two comparisons the same; each run has its own marks beside."""
        recipes = {x.name: [x.recipe, *x.overrides] for x in runs}
        sha256 = Checkpoint.open(source).sha256()
        return {"source": sha256, "recipes": recipes, **self._asked()}

    def _asked(self) -> dict[str, Any]:
        given = asdict(self.asked)
        del given["resume"]
        return {**given, "device": self.options.device, "dtype": self.options.dtype}


def _reasons(left: Sequence[LeftOut]) -> str:
    """Of the first few."""
    more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    return "; ".join(f"{x.name}: {x.reason}" for x in left[:_SHOWN]) + more
