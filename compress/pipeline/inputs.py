"""What a run will need beside the weights, looked for before work starts: hours later is too late.

Texts that are there, a tokenizer that loads, lengths that fit the model, and a transformers class
that runs its blocks.
"""

import torch

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.evaluation.config import DEFAULT_WINDOW_CAP
from compress.pipeline.plan import Plan
from compress_calibration.sources import check_source
from compress_calibration.tokenizer import load_tokenizer


def check_inputs(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises DataError, RecipeError or CheckpointError for what would stop the run later."""
    recipe, evaluation = plan.recipe, plan.recipe.evaluation
    calibration = recipe.calibration if plan.needs_calibration else None
    context = plan.spec.context
    sources = [] if calibration is None else list(calibration.sources)
    if calibration is not None:
        _check_length(recipe.at("calibration.length"), calibration.length, context)
    if evaluation is not None:
        evaluation.resolve(context or DEFAULT_WINDOW_CAP)
        sources += [text.source() for text in evaluation.texts]
        for i, text in enumerate(evaluation.texts):
            if text.kind == "self":
                place = recipe.at(f"evaluation.texts[{i}].length")
                _check_length(place, text.length, context)
    for source in sources:
        check_source(source)
    if evaluation is not None or any(source.kind != "self" for source in sources):
        load_tokenizer(checkpoint.path)
    if evaluation is not None or calibration is not None:
        # Late: a data-free run never loads transformers.
        from compress.blocks.skeleton import Skeleton

        Skeleton(checkpoint.config, plan.spec, dtype=torch.bfloat16)


def _check_length(place: str, length: int, context: int) -> None:
    if context and length > context:
        raise RecipeError(
            f"{place}: is {length}, the model's context is {context} tokens; give {context} or less"
        )
