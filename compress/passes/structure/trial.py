"""What a model loses under sizes that may be chosen: it is cut and repaired on few rows, in memory.

The cut is that of the pass itself, so what is measured is what would be written, but for the rows
that it is fitted on. The loss is the divergence from the recipe's source on rows that no fit saw.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, Passage, TokenBatch, run_through, token_batches
from compress.edits import EDITS
from compress.edits.learned import BySite
from compress.evaluation.chains import divergences
from compress.formats import Weights
from compress.passes.structure.chains import DEFAULT_SPILL, embed, open_chains
from compress.passes.structure.gradients import Changes
from compress.passes.structure.rebuild import rebuilt
from compress.passes.structure.tokens import Looking, skeleton_of, tokens_of
from compress.plan.passes import PassPlan, plan_edits
from compress.plan.row_counts import EDIT_ROWS_PER_HELD, rows_at_once
from compress.plan.search.trials import MEASURED, ROWS, STORE
from compress.recipe import Recipe
from compress.recipe.schema import EditStage


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A pass that is tried. planned: with the sizes that are tried."""

    work: Looking
    planned: PassPlan
    changes: Changes = field(default_factory=dict)

    @property
    def learned(self) -> BySite:
        assert self.planned.stage is not None, "the pass is no edit"
        found = EDITS[self.planned.stage.method].work
        assert isinstance(found, BySite), "the edit looks at no data"
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """What all trials share.

    fit: ids and mask of the rows to fit on. teacher: the recipe's source, behind its last block on
    the rows to measure on. folder: of scratch files.
    """

    work: Looking
    source: Weights
    fit: tuple[torch.Tensor, torch.Tensor | None]
    teacher: Chain
    folder: Path

    def store(self, name: str) -> HiddenStates:
        """Scratch for the states of the rows to measure on."""
        return _store(self.work, self.work.weights, self.teacher.batches, self.folder / name)


@dataclass(frozen=True, slots=True, eq=False)
class TrialRows:
    """Ids [rows, length] and mask of the rows to fit on, and of those to measure on."""

    fit: tuple[torch.Tensor, torch.Tensor | None]
    held: tuple[torch.Tensor, torch.Tensor | None]


def trial_rows(look: Looking, source: Weights, folder: Path) -> TrialRows:
    """The few of the run's rows that a trial takes. folder: OUT.partial."""
    ids, mask = tokens_of(look, source, folder)
    rest = len(ids) - max(1, len(ids) // EDIT_ROWS_PER_HELD)

    def those(few: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ids[few], None if mask is None else mask[few]

    # Where one row is left to fit on, the row that is held out of it is also measured on.
    fit = min(ROWS, rest) if rest > 1 else len(ids)
    return TrialRows(those(slice(fit)), those(slice(rest, rest + MEASURED)))


@contextmanager
def open_bench(look: Looking, source: Weights, folder: Path, working: Path) -> Iterator[Bench]:
    """Draw the rows, and run the source on those to measure on. folder: OUT.partial."""
    rows = trial_rows(look, source, folder)
    ids, mask = rows.held
    at_once = rows_at_once((*ids.shape, 2 * source.spec.hidden), torch.float32, DEFAULT_SPILL)
    held = token_batches(ids, mask, at_once)
    with _store(look, source, held, working / "trial.source") as states:
        teacher = Chain(skeleton_of(look, source), source, held, (states,))
        run_through(teacher)
        yield Bench(look, source, rows.fit, teacher, working)


def recipe_with(look: Looking, stage: EditStage, config: Any) -> Recipe:
    """The run's recipe with other options of a stage."""
    known, recipe = replace(stage, config=config), look.plan.recipe
    edits = tuple(known if x.index == stage.index else x for x in recipe.edits)
    return replace(recipe, edits=edits)


def planned_with(look: Looking, stage: EditStage, config: Any) -> PassPlan:
    """The pass of the stage with these options; later edits are not planned."""
    passes = plan_edits(recipe_with(look, stage, config), look.plan.source)
    return next(x for x in passes if x.stage is not None and x.stage.index == stage.index)


def _store(
    look: Looking, weights: Weights, batches: Sequence[TokenBatch], path: Path
) -> HiddenStates:
    shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches]
    return HiddenStates(path, shapes, look.dtype, budget=STORE)


def loss_of(bench: Bench, planned: PassPlan) -> float:
    """Mean KL(source || tried) of the next token in nats, on the rows to measure on."""
    work = bench.work
    trial = Trial(work, planned)
    chains = open_chains(work, planned, bench.source, bench.fit, bench.folder, scratch=STORE)
    with ExitStack() as stack:
        for chain in {id(x): x for x in (chains.source, chains.edited)}.values():
            for states in chain.states:
                stack.enter_context(states)
        own = stack.enter_context(bench.store("trial.model"))
        tried = Chain(chains.edited.skeleton, work.weights, bench.teacher.batches, (own,))
        embed(chains, kept=False)
        tried.embed()
        for block in planned.result.spec.blocks:
            after = rebuilt(trial, chains, block.index).block
            after.run_on()
            after.on(Passage(tried.batches, own, own)).run_on()
        (loss,) = divergences(bench.teacher, [tried])
    return loss
