"""The plan of every pass of a run, made before any work.

Each pass is planned on the outline that the pass before it will leave.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from compress.checkpoint import ShardLayout
from compress.checkpoint.outline import Outline, outline_from
from compress.edits import EDITS
from compress.plan.row_counts import ROWS_AT_ONCE
from compress.recipe import EditStage, Recipe
from compress.recipe.placing import placed

ROUNDING = "quantize"  # name of the pass that rounds


@dataclass(frozen=True, slots=True, eq=False)
class PassPlan:
    """One pass over the whole model. Each edit is a pass; all stages that round are one, the last.

    name: the pass in the journal and its folder in OUT.partial. stage: the edit; None for the pass
    that rounds. source, result: the model before and after the pass. layout: the weight files that
    the pass writes. notes: those of the edit.
    """

    name: str
    stage: EditStage | None
    source: Outline
    result: Outline
    layout: ShardLayout
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The pass in reports and on the terminal: "cast", "quantize"."""
        return self.name if self.stage is None else self.stage.method


def edit_bytes(planned: PassPlan) -> int:
    """Most bytes of memory that the edit of a pass holds at a time."""
    assert planned.stage is not None, "the pass is no edit"
    largest = max(info.numel for info in planned.source.tensors.values())
    edit = EDITS[planned.stage.method]
    return edit.held(planned.source, planned.stage.config, min(largest, ROWS_AT_ONCE))


@dataclass(frozen=True, slots=True, eq=False)
class EditedModel:
    """The model that a run is given, and the passes of the recipe's edits on it; often none."""

    source: Outline
    edits: tuple[PassPlan, ...] = ()

    @property
    def rounded(self) -> Outline:
        """The model whose layers the stages round."""
        return self.edits[-1].result if self.edits else self.source


def edited(recipe: Recipe, source: Outline) -> EditedModel:
    """The model with the recipe's edits planned; raises as `plan_edits` does."""
    return EditedModel(source, tuple(plan_edits(recipe, source)))


def plan_edits(recipe: Recipe, source: Outline) -> Iterator[PassPlan]:
    """The passes of the recipe's edits, in order.

    CheckpointError, with the stage's place in the recipe, for a model that an edit cannot change.
    """
    for stage in recipe.edits:
        with placed(recipe, stage.label):
            draft = EDITS[stage.method].plan(source, stage.config)
            result, layout = outline_from(draft.config, draft.entries, recipe.output.shard_size)
        yield PassPlan(f"stage.{stage.index}", stage, source, result, layout, draft.notes)
        source = result
