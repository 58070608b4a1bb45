"""Text that a recipe both learns from and is evaluated on."""

import os
from collections.abc import Sequence

from compress.errors import DataError
from compress.recipe.schema import Recipe
from compress_calibration.config import SourceConfig


def evaluated_too(recipe: Recipe, sources: Sequence[SourceConfig]) -> str | None:
    """What of these sources is evaluated on too; None for nothing. A link is what it leads to, a
    pattern what it matches."""
    texts = () if recipe.evaluation is None else recipe.evaluation.texts
    evaluated = {x for text in texts if text.kind != "self" for x in _named(text.source())}
    found = [x for s in sources if s.kind != "self" for x in _named(s) if x in evaluated]
    seed = recipe.seed if recipe.calibration is None else recipe.calibration.seed
    if any(s.kind == "self" for s in sources):
        same = (x for x in texts if x.kind == "self" and x.seed == seed)
        found += [f"text of its own by seed {x.seed}" for x in same]
    return next(iter(found), None)


def calibrated_too(recipe: Recipe) -> tuple[str, ...]:
    """A line for the plan where the evaluation reads what the calibration did, else nothing."""
    sources = () if recipe.calibration is None else recipe.calibration.sources
    both = evaluated_too(recipe, sources)
    if both is None:
        return ()
    why = "what is measured there says little of other text; evaluate on another"
    return (f"{both} is calibrated on and evaluated on: {why}",)


def _named(source: SourceConfig) -> list[str]:
    """Its files, or the part of a data set of the hub."""
    # Late: `compress-model --help` reads recipes, and no data.
    from compress_calibration.readers import source_files

    if source.kind == "hub":
        return [" ".join(x for x in (source.id, source.subset, source.split) if x)]
    try:
        files = [str(path) for path in source_files(source)]
    except DataError:  # of a path that is not there, which is told where it is read
        files = list(source.paths)
    return [os.path.realpath(path) for path in files]
