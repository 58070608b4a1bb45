"""Default lengths of text, cut to what the model can read."""

from collections.abc import Iterator
from dataclasses import replace

from compress.recipe import Recipe
from compress.recipe.lookup import PACKAGE


def cap_defaults(recipe: Recipe, context: int) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with default lengths cut to the context (0: unknown), and a line about each.

    Defaults are those of the built-in recipes and of keys that were left out; a length that the
    user wrote is kept, for the check that refuses it.
    """
    if not context or not recipe.places.table:
        return recipe, ()
    notes = tuple(_notes(recipe, context))
    calibration, evaluation = recipe.calibration, recipe.evaluation
    if calibration is not None and _is_default(recipe, "calibration.length"):
        calibration = replace(calibration, length=min(calibration.length, context))
    if evaluation is not None:
        texts = tuple(
            replace(text, length=min(text.length, context))
            if _is_default(recipe, f"evaluation.texts[{i}].length")
            else text
            for i, text in enumerate(evaluation.texts)
        )
        evaluation = replace(evaluation, texts=texts)
    return replace(recipe, calibration=calibration, evaluation=evaluation), notes


def _notes(recipe: Recipe, context: int) -> Iterator[str]:
    lengths: list[tuple[str, int]] = []
    if recipe.calibration is not None:
        lengths.append(("calibration.length", recipe.calibration.length))
    if recipe.evaluation is not None:
        lengths += [
            (f"evaluation.texts[{i}].length", text.length)
            for i, text in enumerate(recipe.evaluation.texts)
            if text.kind == "self"
        ]
    for key, length in lengths:
        if length > context and _is_default(recipe, key):
            yield f"{key} is {context}, the model's context, instead of the default {length}"


def _is_default(recipe: Recipe, key: str) -> bool:
    place = recipe.places.table.get(key)
    return place is None or place.startswith(f"{PACKAGE}/")
