"""Which recipes are run: each is planned, and what the plan refuses is left out with its reason."""

import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compress.comparison.options import CompareOptions
from compress.comparison.routes import Route, route_of, why_not_for
from compress.errors import CompressError, RecipeError
from compress.events import Event, Progress, note
from compress.plan.plan import Plan
from compress.recipe import load
from compress.recipe.lookup import builtin_names
from compress.report.comparison.records import LeftOut
from compress.report.units import duration, size
from compress.runs.options import RunOptions
from compress.runs.planning import make_plan

STAGE = "compare"


@dataclass(frozen=True, slots=True)
class Entrant:
    """A recipe that is run. name: of its result's folder. seconds: as planned."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seconds: float

    def command(self, model: str | Path, options: RunOptions) -> str:
        """The line that makes its result by itself."""
        words = ["run", self.recipe, "--model", str(model), "--out", self.name]
        words += [word for setting in self.overrides for word in ("--set", setting)]
        words += ["--device", options.device] if options.device != "cpu" else []
        words += ["--dtype", options.dtype] if options.dtype else []
        return shlex.join(["compress-model", *words])


@dataclass(frozen=True, slots=True)
class Jury:
    """What a recipe is judged by. named: whether the user has named the recipes."""

    model: str | Path
    asked: CompareOptions
    options: RunOptions
    named: bool

    @property
    def route(self) -> Route | None:
        return None if self.asked.runtime is None else route_of(self.asked.runtime)

    def judged(self, name: str, recipe: str | Path) -> Entrant | LeftOut:
        """What is run, or why it is not."""
        overrides: tuple[str, ...] = ()
        try:
            overrides = tuple(self._settings(recipe))
            plan = make_plan(recipe, self.model, overrides=overrides, options=self.options)
        except CompressError as error:
            if self.named:
                raise
            return LeftOut(name, _reason(str(error), overrides))
        reason = next(self._against(plan), None)
        if reason is not None:
            return LeftOut(name, _reason(reason, overrides))
        return Entrant(name, str(recipe), overrides, plan.estimate.seconds)

    def _settings(self, recipe: str | Path) -> Iterator[str]:
        """What it is run with beside what it says: the text, and the file of the runtime."""
        read, asked = load(recipe), self.asked
        if asked.text is not None:
            text = {"path": asked.text, "max_tokens": asked.max_tokens}
            given = {key: value for key, value in text.items() if value is not None}
            yield f"evaluation.texts=[{json.dumps(given)}]"
        route = self.route
        if route is None or route.export is None or read.output.format == route.format:
            return
        if route.export not in [each.to for each in read.export]:
            held = [{k: v for k, v in asdict(x).items() if v is not None} for x in read.export]
            yield f"export={json.dumps([*held, {'to': route.export}])}"

    def _against(self, plan: Plan) -> Iterator[str]:
        """What stands in the way, the most important first."""
        if self.route is not None:
            why = why_not_for(self.route, plan)
            if why is not None:
                yield why
        yield from plan.problems
        if not (self.named or self.asked.trainings) and any(x.trains for x in plan.passes):
            took = duration(plan.estimate.seconds)
            yield f"it trains the model, about {took}; add --trainings, or name it with --recipe"
        route, within, planned = self.route, self.asked.within, plan.shards.total_bytes
        another = route is not None and route.export is not None and route.format != plan.format
        if within is not None and not another and plan.bytes_range is None and planned > within:
            yield f"it takes {size(planned)}, more than {size(within)}"


def _reason(said: str, overrides: Sequence[str]) -> str:
    """A refusal without the place of a setting that nobody has typed."""
    for setting in overrides:
        said = said.removeprefix(f"--set {setting}: ")
    return re.sub(r"^export\[\d+\]: ", "", said)


def entrants(
    recipes: Sequence[str | Path],
    model: str | Path,
    asked: CompareOptions,
    options: RunOptions,
    progress: Progress,
) -> tuple[list[Entrant], list[LeftOut]]:
    """All that can be run, in the order given, and what is left out. RecipeError for recipes that
    nobody knows, and for two results of one name; CheckpointError for a model that cannot be."""
    jury = Jury(model, asked, options, named=bool(recipes))
    named = {_name(recipe): recipe for recipe in recipes}
    if len(named) < len(recipes):
        names = [_name(recipe) for recipe in recipes]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecipeError(f"two recipes are called {twice!r}; give one of their files another name")
    found: list[Entrant] = []
    left: list[LeftOut] = []
    asking = (named or {x: x for x in builtin_names()}).items()
    for number, (name, recipe) in enumerate(asking, start=1):
        began = time.perf_counter()
        judged = jury.judged(name, recipe)
        spent = time.perf_counter() - began
        progress(Event("plan", f"recipe {name}", number, len(asking), spent))
        if isinstance(judged, LeftOut):
            left.append(judged)
        else:
            found.append(judged)
    if found:
        total = duration(sum(each.seconds for each in found))
        said = f"{len(found)} recipes, about {total} and their evaluations; {len(left)} left out"
        progress(note(STAGE, said))
    return found, left


def _name(recipe: str | Path) -> str:
    """That of a built-in one, or a file's stem."""
    return Path(recipe).stem if str(recipe).endswith((".yaml", ".yml")) else Path(recipe).name
