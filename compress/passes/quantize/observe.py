"""What the linears of a block are seen to read while the calibration set runs through it."""

from dataclasses import dataclass, field, replace

from torch import nn

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import regroup
from compress.blocks.experts import expert_views
from compress.blocks.walk import LoadedBlock
from compress.methods import METHODS
from compress.methods.observed import Needs, fixes_inputs
from compress.passes.context import PassContext
from compress.passes.ranks import ONE_RANK, Ranks, largest, summed_count
from compress.plan.layers import ModulePlan
from compress_calibration.block_inputs import HESSIAN_BYTES, block_grams
from compress_calibration.hessian import GramAccumulator, InputStats, Magnitudes

EXPERTS_IN = "experts.in"  # every expert's input when all tokens go to all experts


@dataclass(frozen=True, slots=True, eq=False)
class BlockPass:
    """One block under calibration, between the states that reach it and those it passes on.

    passes: what each forward of the calibration set through it was for, so far.
    """

    work: PassContext
    block: LoadedBlock
    passes: list[str] = field(default_factory=list)

    @property
    def spec(self) -> BlockSpec:
        return self.block.spec

    @property
    def module(self) -> nn.Module:
        return self.block.module


def by_what_they_read(
    work: PassContext, block: LoadedBlock, modules: list[ModulePlan]
) -> list[ModulePlan]:
    """The modules with their shared-input keys as this run will observe them.

    A decoder in no table is asked by one small forward; experts that all see every token read
    one and the same input.
    """
    if work.plan.spec.family == "generic":
        linears = regroup(block.module, [m.linear for m in modules], block.run_first_row)
        return [replace(m, linear=x) for m, x in zip(modules, linears, strict=True)]
    if not _shows_all_tokens(work, modules):
        return modules
    for views in expert_views(block.module):
        views.all_tokens = True
    return [
        replace(m, linear=replace(m.linear, shared_input=EXPERTS_IN)) if _reads_block(m) else m
        for m in modules
    ]


def _reads_block(m: ModulePlan) -> bool:
    return m.linear.expert is not None and m.linear.role in ("gate", "up")


def _shows_all_tokens(work: PassContext, modules: list[ModulePlan]) -> bool:
    """Whether any of these experts asks for every token (the forward is one for all).

    As its method needs; where that has no say, when its scheme takes something from the inputs,
    which an expert without tokens would lack.
    """
    experts = [m for m in modules if m.linear.expert is not None]
    return any(
        (stage_needs(work, m.stage).experts or ("all" if fixes_inputs(m.scheme) else "routed"))
        == "all"
        for m in experts
    )


def observation_rounds(work: PassContext, modules: list[ModulePlan]) -> list[list[ModulePlan]]:
    """Modules to observe together: as many as HESSIAN_BYTES allow, or input by input for
    true-sequential stages."""
    one_by_one = is_sequential(work, modules)
    rounds: list[list[ModulePlan]] = []
    held = HESSIAN_BYTES
    for _, members in by_input(modules):
        size = 4 * members[0].linear.shape[1] ** 2
        if one_by_one or held + size > HESSIAN_BYTES:
            rounds.append([])
            held = 0
        rounds[-1] += members
        held += size
    return rounds


def stage_needs(work: PassContext, stage: int) -> Needs:
    """What a stage's method needs of the run under the stage's options."""
    asked = work.plan.recipe.stages[stage]
    return METHODS[asked.method].needs(asked.config)


def by_input(modules: list[ModulePlan]) -> list[tuple[str, list[ModulePlan]]]:
    """(key, modules) by shared input, in the order the block computes them."""
    keys = dict.fromkeys(m.linear.shared_input for m in modules)
    return [(key, [m for m in modules if m.linear.shared_input == key]) for key in keys]


def observe(block: BlockPass, modules: list[ModulePlan]) -> dict[str, InputStats]:
    """Statistics of the modules' inputs over the whole calibration set, by shared input."""
    block.passes.append("observe")
    magnitudes = any(needs_magnitudes(block.work, m) for m in modules)
    linears, ranks = [m.linear for m in modules], block.work.ranks
    return input_stats(block.block, linears, magnitudes=magnitudes, ranks=ranks)


def input_stats(
    block: LoadedBlock, linears: list[LinearSpec], *, magnitudes: bool, ranks: Ranks = ONE_RANK
) -> dict[str, InputStats]:
    """Statistics of what linears of a block read, by shared input, in one pass over its inputs.

    magnitudes: whether to keep them beside the Hessians. ranks: each of which passes its own rows.
    """
    grams = block_grams(block, linears, magnitudes=magnitudes)
    # Each sum goes as its mean comes, or both would be in memory.
    return {key: sum_over(ranks, grams.pop(key)).stats() for key in list(grams)}


def sum_over(ranks: Ranks, gram: GramAccumulator) -> GramAccumulator:
    """What all ranks have seen of an input."""
    sizes = gram.magnitudes
    if sizes is not None:
        sizes = Magnitudes(largest(ranks, sizes.peak), ranks.sum(sizes.total))
    tokens = summed_count(ranks, gram.tokens)
    return GramAccumulator(gram.key, ranks.sum(gram.gram), sizes, tokens)


def needs_magnitudes(work: PassContext, m: ModulePlan) -> bool:
    """Whether someone asks how large the inputs are: a method of the layer's stages, or its scheme
    for static scales and fixed outliers."""
    stages = {m.stage, *m.folds}
    return fixes_inputs(m.scheme) or any(stage_needs(work, i).magnitudes for i in stages)


def is_sequential(work: PassContext, modules: list[ModulePlan]) -> bool:
    """Whether a stage on these modules wants each input observed behind quantized predecessors."""
    return any(stage_needs(work, m.stage).sequential for m in modules)
