"""The pass of a stage that trains, in one of its scopes."""

from compress.passes.training.blocks import train_blocks
from compress.passes.training.setting import TrainingPass
from compress.passes.training.whole import train_model
from compress.recipe.placing import placed


def carry_out_training(each: TrainingPass) -> None:
    """Carry out what the journal does not have as finished."""
    stage = each.planned.stage
    assert stage is not None, "the pass does not train"
    with placed(each.work.plan.recipe, stage.label):
        if each.config.scope == ("block",):
            train_blocks(each)
        else:
            train_model(each)
