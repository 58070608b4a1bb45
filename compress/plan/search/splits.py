"""The splits of an open `mla` into a latent and a rotated key that are measured: those that all
stages behind it take, or why there is none."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Protocol

from compress.checkpoint.outline import Outline, outline_from
from compress.edits import EDITS
from compress.edits.edit import Edited
from compress.edits.latent.source import SourceAttention, attention_of
from compress.edits.mla import (
    MlaConfig,
    budget_of,
    neutral,
    plan,
    plan_among,
    shape_of,
    splits,
)
from compress.errors import CompressError, RecipeError
from compress.plan.search.later import check_rounded
from compress.plan.search.sizes import SizeSpace
from compress.plan.search.space import with_largest
from compress.recipe import EditStage, Recipe
from compress.recipe.placing import placed

STEPS = (2, 4, 8, 16, 32, 64, 128, 256)  # of ranks, that a refusal may propose


class LeavesModel(Protocol):
    """A pass as it is planned: the model that it leaves."""

    @property
    def result(self) -> Outline: ...


# The passes of the edits behind a stage, planned on the model that it leaves.
Behind = Callable[[Outline], Iterator[LeavesModel]]


@dataclass(frozen=True, slots=True)
class OpenSplits:
    """What a budget leaves to measure. taken: the options with rank and rope_dim; none for stages
    that split no budget. notes: on splits that are not among them."""

    taken: tuple[MlaConfig, ...] = ()
    notes: tuple[str, ...] = ()


def open_splits(recipe: Recipe, source: Outline, stage: EditStage, behind: Behind) -> OpenSplits:
    """The splits that a stage leaves open.

    source: the model before the stage. CheckpointError for a model that has no such latent;
    RecipeError for a budget of which what comes behind takes no split. What it refuses whatever the
    split is raised as it is.
    """
    config = stage.config
    if not isinstance(config, MlaConfig) or config.kv_bytes is None:
        return OpenSplits()
    with placed(recipe, stage.label):
        attention = attention_of(source)
        among = splits(attention, config)
        for each in among:  # refused by the stage itself
            plan(source, each)
    asked = _Asked(recipe, source, behind)
    refusals = {each: asked.refusal(each) for each in among}
    refused = {each: error for each, error in refusals.items() if error is not None}
    taken = tuple(each for each in among if each not in refused)
    if not taken:
        raise _none_taken(asked, stage, attention, next(iter(refused.values())))
    return OpenSplits(taken, tuple(_notes(attention, list(refused), list(refused.values()))))


def draft_of(
    source: Outline, stage: EditStage, space: SizeSpace | None, split: OpenSplits
) -> Edited:
    """What a stage leaves; where its sizes are open, the largest of them."""
    if split.taken:
        draft = plan_among(source, stage.config, split.taken)
        return replace(draft, notes=(*draft.notes, *split.notes))
    known = stage if space is None else with_largest(stage, space)
    return EDITS[stage.method].plan(source, known.config)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What comes behind a stage."""

    recipe: Recipe
    source: Outline
    behind: Behind

    def refusal(self, config: MlaConfig) -> CompressError | None:
        """Why it does not take a split; None where it does."""
        draft = plan(self.source, config)
        try:
            result, _ = outline_from(draft.config, draft.entries, self.recipe.output.shard_size)
            for planned in self.behind(result):
                result = planned.result
            check_rounded(self.recipe, result)
        except CompressError as error:
            return error
        return None


def _notes(
    attention: SourceAttention, refused: Sequence[MlaConfig], errors: Sequence[CompressError]
) -> Iterator[str]:
    if refused:
        yield (
            f"stages behind it do not take {_words(attention, refused)}, which are not measured:"
            f" {_reason(errors[0])}; multiple_of splits the budget so that ranks fit"
        )


def _none_taken(
    asked: _Asked, stage: EditStage, attention: SourceAttention, error: CompressError
) -> CompressError:
    """The refusal of all splits, with what to do; `error` where no split would help."""
    config = stage.config
    step = next((x for x in _steps(asked.recipe, config) if _helps(asked, attention, config, x)), 0)
    if not step and asked.refusal(neutral(config)) is not None:
        return error
    remedy = f"give {stage.label} multiple_of: {step}" if step else "raise kv_bytes"
    among = _words(attention, splits(attention, config))
    return RecipeError(
        f"{stage.at('kv_bytes')}: is {config.kv_bytes}, which is {budget_of(attention, config)}"
        f" numbers a token; stages behind it take none of its splits into rank + rope_dim, {among}:"
        f" {_reason(error)}; {remedy}"
    )


def _steps(recipe: Recipe, config: MlaConfig) -> Iterator[int]:
    """What ranks may be made multiples of: the groups of stages first."""
    for stage in recipe.stages:
        schemes = stage.candidates or (() if stage.scheme is None else (stage.scheme,))
        yield from (lcm(config.multiple_of, x.group_size) for x in schemes if x.group_size)
    yield from (lcm(config.multiple_of, x) for x in STEPS)


def _helps(asked: _Asked, attention: SourceAttention, config: MlaConfig, step: int) -> bool:
    """Whether a split is taken where ranks are multiples of this."""
    try:
        among = splits(attention, replace(config, multiple_of=step))
    except RecipeError:  # none is that small
        return False
    return any(asked.refusal(each) is None for each in among)


def _words(attention: SourceAttention, among: Sequence[MlaConfig]) -> str:
    return ", ".join(shape_of(attention, each).split for each in among)


def _reason(error: CompressError) -> str:
    """What a refusal says, without its remedy."""
    return str(error).partition(";")[0]
