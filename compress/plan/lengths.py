"""Lengths of text: defaults, cut to what the model can read, what windows are chosen on, and tokens
of evaluation."""

from collections.abc import Iterator
from dataclasses import replace

from compress.checkpoint.outline import Outline
from compress.edits.hybrid import WINDOWS, HybridConfig, width_of
from compress.errors import DataError, RecipeError
from compress.recipe import EditStage, Recipe
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.recipe.lookup import PACKAGE
from compress_calibration.config import SourceConfig
from compress_calibration.readers import source_files

# Bytes of a file for a token of evaluation text, fewer than most tokenizers take: the 4,096 tokens
# of tale-6m take 2.6 of Wikipedia and 3.9 of TinyStories.
BYTES_A_TOKEN = 2.5


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


def check_rows(recipe: Recipe, model: Outline, stage: EditStage) -> None:
    """RecipeError for calibration rows on which windows are hardly seen, where these are to choose
    which layers get one. model: that the stage changes."""
    config, data = stage.config, cap_defaults(recipe, model.spec.context)[0].calibration
    if not isinstance(config, HybridConfig) or not config.is_open or data is None:
        return
    width, context = width_of(model, config), model.spec.context
    need = WINDOWS * width
    if context and need > context:
        raise RecipeError(
            f"{stage.at('window')}: is {width} tokens; by: {config.by} takes rows of {WINDOWS}"
            f" windows, {need} tokens, and the model reads {context}; give {context // WINDOWS} or"
            " less, or keep"
        )
    if data.length < need:
        raise RecipeError(
            f"{recipe.at('calibration.length')}: is {data.length}; by: {config.by} takes rows of"
            f" {WINDOWS} windows of {width}, {need} tokens, so give that, or keep"
        )
    if data.packing == "pad":
        raise RecipeError(
            f"{recipe.at('calibration.packing')}: is pad, and a padded text may be shorter than the"
            f" {WINDOWS} windows that by: {config.by} takes; give pack, or keep"
        )


def _is_default(recipe: Recipe, key: str) -> bool:
    place = recipe.places.table.get(key)
    return place is None or place.startswith(f"{PACKAGE}/")


def evaluated_tokens(config: EvaluationConfig) -> int:
    """Tokens that go through the blocks for all texts, about; of files by their bytes."""
    return sum(_tokens_of(text, config) for text in config.texts)


def _tokens_of(text: TextConfig, config: EvaluationConfig) -> int:
    if text.kind == "self":
        found = text.samples * text.length
    else:
        found = int(_file_bytes(text.source()) / BYTES_A_TOKEN)
    if text.max_tokens is not None:
        found = min(found, text.max_tokens)
    # A window after the first sees as many tokens again as it scores.
    overlap = 1 if text.kind == "self" or text.cut else 2
    return found * overlap


def _file_bytes(source: SourceConfig) -> int:
    """0 for what is not there, or is no file: a check of the inputs says so."""
    if source.kind not in ("text", "jsonl", "parquet"):
        return 0
    try:
        return sum(path.stat().st_size for path in source_files(source))
    except (DataError, OSError):
        return 0
