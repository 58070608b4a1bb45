"""Running the calibration set through a block, and what its linears are seen to read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import collect, regroup
from compress.blocks.experts import expert_views
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.methods import METHODS
from compress.methods.observed import Needs, fixes_inputs
from compress.passes.context import PassContext
from compress.passes.hidden_states import HiddenStates
from compress.plan.layers import ModulePlan
from compress_calibration.hessian import GramAccumulator, InputStats

# Hessians held at once; a block with more (a wide mixture) is observed in several forwards.
HESSIAN_BYTES = 2 << 30
EXPERTS_IN = "experts.in"  # every expert's input when all tokens go to all experts

OnBatch = Callable[[Tensor, Tensor | None, BlockContext, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The calibration set, `rows` rows at a time. ids: int64 [n, length]; mask: bool or None."""

    ids: Tensor
    mask: Tensor | None
    skeleton: Skeleton
    rows: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        n = self.ids.shape[0]
        return ((start, min(start + self.rows, n)) for start in range(0, n, self.rows))

    def forward(self, source: HiddenStates, on_batch: OnBatch) -> None:
        """Call on_batch(hidden, mask, context, start) for every batch of stored hidden states."""
        for start, stop in self:
            mask = None if self.mask is None else self.mask[start:stop]
            context = self.skeleton.context(self.ids[start:stop], mask)
            hidden = source.read(start, stop).to(self.skeleton.device)
            on_batch(hidden, mask, context, start)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPass:
    """One block under calibration: loaded, and with the inputs that reach it.

    passes: what each forward of the calibration set through it was for, so far.
    """

    work: PassContext
    batches: Batches
    module: nn.Module
    spec: BlockSpec
    source: HiddenStates
    passes: list[str] = field(default_factory=list)

    def forward(self, purpose: str, on_batch: OnBatch) -> None:
        """One pass: on_batch(hidden, mask, context, start) for every batch of the inputs."""
        self.passes.append(purpose)
        self.batches.forward(self.source, on_batch)


def by_what_they_read(
    work: PassContext,
    batches: Batches,
    module: nn.Module,
    spec: BlockSpec,
    modules: list[ModulePlan],
    source: HiddenStates,
) -> list[ModulePlan]:
    """The modules with their shared-input keys as this run will observe them.

    A decoder in no table is asked by one small forward; experts that all see every token read
    one and the same input.
    """
    if work.plan.spec.family == "generic":
        context = batches.skeleton.context(batches.ids[:1], None)
        hidden = source.read(0, 1).to(work.device)
        linears = regroup(
            module,
            [m.linear for m in modules],
            lambda: batches.skeleton.run_block(module, spec.index, hidden, context),
        )
        return [replace(m, linear=x) for m, x in zip(modules, linears, strict=True)]
    if not _shows_all_tokens(work, modules):
        return modules
    for views in expert_views(module):
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
    linears = [m.linear for m in modules]
    magnitudes = any(needs_magnitudes(block.work, m) for m in modules)
    observer = Observer.create(
        block.batches.skeleton, block.module, block.spec.index, linears, magnitudes=magnitudes
    )
    block.forward("observe", observer.on_batch)
    return observer.stats()


@dataclass(frozen=True, slots=True, eq=False)
class Observer:
    """Sums up what linears of a block read in its forwards, by shared input."""

    skeleton: Skeleton
    module: nn.Module
    index: int
    linears: list[LinearSpec]
    grams: dict[str, GramAccumulator]

    @classmethod
    def create(
        cls,
        skeleton: Skeleton,
        module: nn.Module,
        index: int,
        linears: list[LinearSpec],
        *,
        magnitudes: bool,
    ) -> "Observer":
        """Nothing seen yet. magnitudes: whether to keep them beside the Hessians."""
        grams = {
            x.shared_input: GramAccumulator.create(
                x.shared_input, x.shape[1], device=skeleton.device, magnitudes=magnitudes
            )
            for x in linears
        }
        return cls(skeleton, module, index, linears, grams)

    def on_batch(
        self, hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int
    ) -> None:
        collect(
            self.module,
            self.linears,
            lambda: self.skeleton.run_block(self.module, self.index, hidden, context),
            lambda key, x: self.grams[key].add(x),
            mask=mask,
            stop_after_last=True,
        )

    def stats(self) -> dict[str, InputStats]:
        """What was seen, once: each sum goes as its mean comes, or both would be in memory."""
        return {key: self.grams.pop(key).stats() for key in list(self.grams)}


def needs_magnitudes(work: PassContext, m: ModulePlan) -> bool:
    """Whether someone asks how large the inputs are: a method of the layer's stages, or its scheme
    for static scales and fixed outliers."""
    stages = {m.stage, *m.folds}
    return fixes_inputs(m.scheme) or any(stage_needs(work, i).magnitudes for i in stages)


def is_sequential(work: PassContext, modules: list[ModulePlan]) -> bool:
    """Whether a stage on these modules wants each input observed behind quantized predecessors."""
    return any(stage_needs(work, m.stage).sequential for m in modules)
