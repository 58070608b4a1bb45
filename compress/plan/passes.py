"""The plan of every pass of a run, before any work, on the outline that the one before leaves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from compress.checkpoint import ShardLayout
from compress.checkpoint.outline import Outline, outline_from
from compress.distill.memory import gradient_bytes
from compress.edits import EDITS
from compress.edits.counts import with_counts
from compress.edits.distill import SOURCE, DistillConfig, Student, row_length
from compress.edits.edit import ByTensor, ByTraining, copied_bytes
from compress.edits.learned import BySite
from compress.edits.memory import Between, learned_bytes, looked_by
from compress.edits.mla import MlaConfig
from compress.edits.narrowing import ByBasis, narrowing_bytes
from compress.edits.work import EditSize, Lessons, learned_work, narrowing_work, training_work
from compress.plan.lengths import check_rows
from compress.plan.row_counts import ROWS_AT_ONCE, chain_rows
from compress.plan.search.sizes import SizeSpace
from compress.plan.search.space import open_space
from compress.plan.search.splits import draft_of, open_splits
from compress.plan.search.trials import (
    CHOOSING,
    Choosing,
    choosing_bytes,
    choosing_work,
    sizes_choosing,
    splits_choosing,
)
from compress.plan.training.changed import changed_before
from compress.plan.training.size import training_size
from compress.plan.training.teachers import NO_TEACHERS, Teachers, check_teacher
from compress.recipe import EditStage, Recipe
from compress.recipe.placing import placed
from compress.recipe.reading.stages import is_tuning
from compress_calibration.config import CalibrationConfig

ROUNDING = "quantize"  # name of the pass that rounds


@dataclass(frozen=True, slots=True, eq=False)
class PassPlan:
    """One pass over the whole model. Each edit is a pass; all stages that round are one, with
    nothing behind it but trainings of what it left.

    name: the pass in the journal and its folder in OUT.partial. stage: the edit, or the training;
    None for the pass that rounds. source, result: the model before and after the pass. layout: the
    weight files that the pass writes. notes: those of the edit. kept: for each block of the result
    the index of the block of `source` that it is made of. origin: the same of the model that the
    run was given.
    part: of the stage that the pass is, where that has several passes.
    narrowed: names of the passes before it that narrowed the residual stream, in order.
    space: the sizes that a measurement has yet to choose among; splits: of an `mla` the same, as
    options. result is then the largest of them.
    stream: what the pass multiplies the residual stream by; streamed: what those before it did.
    """

    name: str
    stage: EditStage | None
    source: Outline
    result: Outline
    layout: ShardLayout
    notes: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    origin: tuple[int, ...] = ()
    part: str = ""
    narrowed: tuple[str, ...] = ()
    space: SizeSpace | None = None
    splits: tuple[MlaConfig, ...] = ()
    stream: float = 1.0
    streamed: float = 1.0

    @property
    def needs_data(self) -> bool:
        """Whether the pass is that of an edit which looks at calibration data."""
        return self.stage is not None and EDITS[self.stage.method].needs_data

    @property
    def looks_at_data(self) -> bool:
        """Whether the pass does, or what is measured before it."""
        return self.needs_data or (self.stage is not None and self.stage.is_open)

    @property
    def is_proved(self) -> bool:
        """Whether a fresh process shows that a stock class computes what it leaves."""
        return self.stage is not None and EDITS[self.stage.method].changes_class

    @property
    def narrows(self) -> bool:
        """Whether the pass narrows the residual stream."""
        return self.stage is not None and isinstance(EDITS[self.stage.method].work, ByBasis)

    @property
    def trains(self) -> bool:
        """Whether the pass trains the model."""
        return self.stage is not None and isinstance(EDITS[self.stage.method].work, ByTraining)

    @property
    def teacher(self) -> str:
        """Who a pass trains by, as the recipe says it; the source where it does not train."""
        config = None if self.stage is None else self.stage.config
        return config.teacher if isinstance(config, DistillConfig) else SOURCE

    @property
    def tunes(self) -> bool:
        """Whether the pass trains what the stages that round have left."""
        return self.stage is not None and is_tuning(self.stage)

    @property
    def moves_codes(self) -> bool:
        """Whether the pass trains to which codes weights are rounded."""
        config = None if self.stage is None else self.stage.config
        return isinstance(config, DistillConfig) and config.moves_codes

    @property
    def label(self) -> str:
        """The pass in reports and on the terminal: "cast", "quantize"."""
        if self.stage is None:
            return self.name
        return f"{self.stage.method} {self.part}".rstrip()


def edit_size(
    planned: PassPlan,
    model: "EditedModel",
    data: CalibrationConfig | None,
    dtype: torch.dtype,
) -> EditSize:
    """What the pass of an edit takes, or of a training behind the stages that round.

    model: of the run. data: that the recipe calibrates on; dtype: of blocks.
    """
    given, stage = model.taught_by(planned), planned.stage
    source = model.rounded if planned.tunes else planned.source
    assert stage is not None, "the pass is no edit"
    work = EDITS[stage.method].work
    if isinstance(work, BySite | ByBasis):
        assert data is not None, "the recipe parser asks for calibration where an edit needs it"
        rows = chain_rows(given.spec, data.samples, data.length, data.spill_bytes)
        looked = looked_by(work, stage.config, planned.result, data)
        between = Between(given, source, planned.result, planned.space is not None, looked.bytes)
        of_pass = narrowing_bytes if isinstance(work, ByBasis) else learned_bytes
        most = of_pass(between, dtype, rows * data.length)
        counts = narrowing_work if isinstance(work, ByBasis) else learned_work
        counted = counts(source, data.samples * data.length) + looked.work
        if isinstance(work, BySite) and work.by_gradients(stage.config):
            most = max(most, gradient_bytes(source, data.length))
            lessons = Lessons(data.samples * data.length)
            counted += training_work(source, source, lessons, head=True)
        return EditSize(planned.label, source, most, counted, data.length)
    if isinstance(work, ByTraining):
        student = model.student_of(planned)
        size = training_size(planned.label, stage, student, given, data, dtype)
        # Rows of a stage are drawn once, by the first of its passes.
        return replace(size, written=None) if planned.part == "model" else size
    run = min(max(info.numel for info in source.tensors.values()), ROWS_AT_ONCE)
    most = copied_bytes(source, run)
    if isinstance(work, ByTensor):
        most = work.held(source, stage.config, run)
    return EditSize(planned.label, source, most)


def choosing_of(planned: PassPlan, given: Outline, data: CalibrationConfig) -> Choosing | None:
    """What is measured before a pass to know what it does; None where that is known."""
    stage = planned.stage
    if planned.space is not None:
        return sizes_choosing(planned.space, given, data)
    if stage is None or not stage.is_open:
        return None
    if planned.splits:
        return splits_choosing(planned.source, given, len(planned.splits), data)
    return CHOOSING[stage.method](planned.source, given, stage.config, data)


def choosing_size(
    planned: PassPlan, given: Outline, data: CalibrationConfig | None, dtype: torch.dtype
) -> EditSize | None:
    """What that measurement takes; arguments as of `edit_size`."""
    choosing = None if data is None else choosing_of(planned, given, data)
    if choosing is None:
        return None
    name, bytes_held = f"choosing for {planned.label}", choosing_bytes(choosing, dtype)
    assert data is not None, "it is measured on data"
    return EditSize(name, planned.source, bytes_held, choosing_work(choosing), data.length)


@dataclass(frozen=True, slots=True, eq=False)
class EditedModel:
    """The model that a run is given, and the passes of the recipe's edits on it; often none.

    teachers: the other models that passes train by.
    """

    source: Outline
    edits: tuple[PassPlan, ...] = ()
    teachers: Teachers = field(default_factory=lambda: NO_TEACHERS)

    def sizes(
        self, passes: Sequence[PassPlan], data: CalibrationConfig | None, dtype: torch.dtype
    ) -> Iterator[EditSize]:
        """What each pass but the one that rounds takes, and what is measured before it."""
        for planned in passes:
            if planned.stage is not None:
                choosing = choosing_size(planned, self.source, data, dtype)
                yield from () if choosing is None else (choosing,)
                yield edit_size(planned, self, data, dtype)

    def taught_by(self, planned: PassPlan) -> Outline:
        """The model that a pass trains by; the source for any other pass."""
        other = self.teachers.get(planned.teacher)
        return self.source if other is None else other.outline

    def student_of(self, planned: PassPlan) -> Student:
        """What a pass that trains has in memory."""
        if planned.tunes:
            return Student(self.rounded, planned.source)
        return Student(planned.source, changed=changed_before(self.edits, planned))

    @property
    def rounded(self) -> Outline:
        """The model whose layers the stages round."""
        return self.edits[-1].result if self.edits else self.source


def edited(recipe: Recipe, source: Outline, teachers: Teachers = NO_TEACHERS) -> EditedModel:
    """The model with the recipe's edits planned; raises as `plan_edits` does, and RecipeError for a
    teacher that cannot teach."""
    found = EditedModel(source, tuple(plan_edits(recipe, source)), teachers)
    for planned in found.edits:
        _check_taught(recipe, found, planned)
    return found


def _check_taught(recipe: Recipe, model: EditedModel, planned: PassPlan) -> None:
    """RecipeError for a pass whose teacher cannot teach it."""
    stage = planned.stage
    config = None if stage is None else stage.config
    if stage is None or not isinstance(config, DistillConfig):
        return
    if config.teacher != SOURCE or config.blocks:
        with placed(recipe, stage.label):
            teacher, length = model.taught_by(planned), row_length(config, recipe.calibration)
            narrowed = bool(planned.narrowed) or (planned.streamed != 1 and bool(config.blocks))
            check_teacher(config, teacher, model.source, length, narrowed=narrowed)


def plan_edits(
    recipe: Recipe, source: Outline, *, given: Outline | None = None, since: int = 0
) -> Iterator[PassPlan]:
    """The passes of the recipe's edits, in order.

    given: the recipe's source, where `source` is what the edits before the stage `since` left.
    CheckpointError, with the stage's place in the recipe, for a model that an edit cannot change.
    """
    given, origin = given or source, tuple(range(len(source.spec.blocks)))
    narrowed, streamed = tuple[str, ...](), 1.0
    for whole in (each for each in recipe.edits if each.index >= since):
        for part, stage in whole.parts().items():
            with placed(recipe, stage.label):
                stage = replace(stage, config=with_counts(stage.config, given, source))
                space = open_space(recipe, given, source, stage)
            behind = partial(plan_edits, recipe, given=given, since=stage.index + 1)
            split = open_splits(recipe, source, stage, behind)
            with placed(recipe, stage.label):
                draft = draft_of(source, stage, space, split)
                result, layout = outline_from(draft.config, draft.entries, recipe.output.shard_size)
            check_rows(recipe, source, stage)
            kept = tuple(range(len(origin))) if draft.blocks is None else draft.blocks
            origin = tuple(origin[i] for i in kept)
            name = ".".join(filter(None, ("stage", str(stage.index), part)))
            said, notes = part if stage.method == whole.method else "", draft.notes
            planned = PassPlan(
                name, stage, source, result, layout, notes, kept, origin, said, narrowed, space
            )
            yield replace(planned, splits=split.taken, stream=draft.stream, streamed=streamed)
            streamed *= draft.stream
            narrowed += (name,) if planned.narrows else ()
            source = result


def plan_tuning(recipe: Recipe, model: EditedModel, rounding: PassPlan) -> Iterator[PassPlan]:
    """The passes that train what the pass that rounds has left: the same tensors, in its layout."""
    edits, result = model.edits, rounding.result
    blocks = tuple(range(len(result.spec.blocks)))
    origin = edits[-1].origin if edits else blocks
    narrowed = tuple(each.name for each in edits if each.narrows)
    streamed = edits[-1].stream * edits[-1].streamed if edits else 1.0
    for whole in recipe.tuning:
        for part, stage in whole.parts().items():
            name = ".".join(filter(None, ("stage", str(stage.index), part)))
            planned = PassPlan(
                name, stage, result, result, rounding.layout, (), blocks, origin, part, narrowed
            )
            planned = replace(planned, streamed=streamed)
            _check_taught(recipe, model, planned)
            yield planned
